"""Gemma 2 and 3 (text): norms on both sides of each part, scaled embedding, local and global layers; Gemma 2 with
soft caps, Gemma 3 with a norm per head and another rotation base in local layers."""

from __future__ import annotations

import math

from jaxserve.models.config import LayerConfig, ModelConfig, RopeConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
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

_LOCAL_THETA = 10000.0
_GLOBAL_EVERY = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "gemma2": 2, "gemma3": 6}
_WIDEST_LAYERS = {"gemma2": 46, "gemma3": 62}  # the 27B models scale scores by hidden_size / num_heads


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    is_gemma2 = hf.architecture == "Gemma2ForCausalLM"
    every = hf.integer("sliding_window_pattern", hf.integer("_sliding_window_pattern", _GLOBAL_EVERY[hf.architecture]))
    default = tuple((layer + 1) % every != 0 for layer in range(common["num_layers"]))
    common |= {
        "tie_word_embeddings": hf.flag("tie_word_embeddings", True),
        "attention_scale": hf.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }
    if hf.get("hidden_activation", None) is None and hf.get("hidden_act", None) is None:
        common["activation"] = "gelu_tanh"
    has_bias = hf.flag("attention_bias", False)
    return ModelConfig(
        **common,
        **_shared(common, is_gemma2),
        layers=_layers(
            hf.layer_is_sliding(default),
            hf.integer("sliding_window", 4096),
            local=hf.rope(is_sliding=True, theta=_LOCAL_THETA) if not is_gemma2 else hf.rope(),
            everywhere=hf.rope(theta=_LOCAL_THETA if is_gemma2 else 1e6),
        ),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        attention_softcap=hf.number("attn_logit_softcapping", 0.0),
        logit_softcap=hf.number("final_logit_softcapping", 0.0),
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common()
    is_gemma2 = gguf.architecture == "gemma2"
    head_dim, num_layers = common["head_dim"], common["num_layers"]
    common["activation"] = "gelu_tanh"
    if num_layers == _WIDEST_LAYERS[gguf.architecture]:
        common["attention_scale"] = (common["hidden_size"] / common["num_heads"]) ** -0.5
    rope = gguf.rope(head_dim, theta=_LOCAL_THETA if is_gemma2 else 1e6)
    local = RopeConfig(theta=gguf.number("rope.freq_base_swa", _LOCAL_THETA), dim=rope.dim)
    return ModelConfig(
        **common,
        **_shared(common, is_gemma2),
        layers=_layers(
            gguf.layer_is_sliding(num_layers, _GLOBAL_EVERY[gguf.architecture]),
            gguf.integer("attention.sliding_window"),
            local=rope if is_gemma2 else local,
            everywhere=rope,
        ),
        attention_softcap=gguf.number("attn_logit_softcapping", 0.0),
        logit_softcap=gguf.number("final_logit_softcapping", 0.0),
    )


def _shared(common: dict, is_gemma2: bool) -> dict:
    return {
        "family": "gemma",
        "has_post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(common["hidden_size"]),
        "qk_norm": "none" if is_gemma2 else "per_head",
    }


def _layers(
    is_sliding: tuple[bool, ...], window: int, *, local: RopeConfig, everywhere: RopeConfig
) -> tuple[LayerConfig, ...]:
    return tuple(
        LayerConfig(sliding_window=window, rope=local) if sliding else LayerConfig(rope=everywhere)
        for sliding in is_sliding
    )


FAMILY = Family(
    _read_hf,
    _read_gguf,
    WeightNames(
        HF_TOP,
        HF_LAYER
        | {
            "attention_post_norm": "model.layers.{i}.post_attention_layernorm",
            "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
            "mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
        },
        HF_IGNORED,
        norms_have_offset=True,
    ),
    # llama.cpp's converter has added the one already.
    WeightNames(
        GGUF_TOP,
        GGUF_LAYER | {"attention_post_norm": "blk.{i}.post_attention_norm", "mlp_post_norm": "blk.{i}.post_ffw_norm"},
        GGUF_IGNORED,
    ),
)
