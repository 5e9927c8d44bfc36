"""Llama 2 and 3, SmolLM2 and Mistral: the plain decoder, with a sliding window on every layer of some Mistrals."""

from __future__ import annotations

import dataclasses

from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig, layers_of
from jaxserve.models.family import (
    GGUF_IGNORED,
    GGUF_LAYER,
    GGUF_TOP,
    HF_IGNORED,
    HF_LAYER,
    HF_TOP,
    Family,
    WeightNames,
)


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    window = hf.integer("sliding_window", 0) if hf.architecture == "MistralForCausalLM" else 0
    has_bias = hf.flag("attention_bias", False)
    return ModelConfig(
        **common,
        family="llama",
        layers=layers_of(window, (window > 0,) * common["num_layers"], hf.rope()),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=hf.flag("mlp_bias", False),
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common(has_experts=True)
    has_experts = gguf.integer("expert_count", 0) > 0  # Mixtral
    layer = LayerConfig(
        sliding_window=gguf.integer("attention.sliding_window", 0),
        rope=gguf.rope(common["head_dim"]),
        uses_moe=has_experts,
    )
    return ModelConfig(
        **common,
        family="mixtral" if has_experts else "llama",
        layers=(layer,) * common["num_layers"],
        moe=gguf.moe() if has_experts else None,
        has_qkv_bias=gguf.has_tensor("blk.0.attn_q.bias"),
        has_o_bias=gguf.has_tensor("blk.0.attn_output.bias"),
        has_mlp_bias=gguf.has_tensor("blk.0.ffn_down.bias"),
    )


HF_NAMES = WeightNames(HF_TOP, HF_LAYER, HF_IGNORED)
GGUF_NAMES = WeightNames(GGUF_TOP, GGUF_LAYER, GGUF_IGNORED)
FAMILY = Family(_read_hf, _read_gguf, HF_NAMES, dataclasses.replace(GGUF_NAMES, has_interleaved_qk=True))
