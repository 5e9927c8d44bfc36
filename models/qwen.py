"""Qwen2 and 2.5 (biases on queries, keys and values) and Qwen3 (norm per head)."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig, layers_of
from jaxserve.models.family import Family
from jaxserve.models.llama import GGUF_NAMES, HF_NAMES


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    num_layers = common["num_layers"]
    is_qwen2 = hf.architecture == "Qwen2ForCausalLM"
    has_bias = hf.flag("attention_bias", False)
    window = hf.integer("sliding_window", 0) if hf.flag("use_sliding_window", False) else 0
    first_sliding = hf.integer("max_window_layers", num_layers)
    is_sliding = hf.layer_is_sliding(tuple(window > 0 and layer >= first_sliding for layer in range(num_layers)))
    return ModelConfig(
        **common,
        family="qwen",
        layers=layers_of(window, is_sliding, hf.rope()),
        has_qkv_bias=is_qwen2 or has_bias,
        has_o_bias=not is_qwen2 and has_bias,
        qk_norm="none" if is_qwen2 else "per_head",
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common()
    return ModelConfig(
        **common,
        family="qwen",
        layers=layers_of(0, (False,) * common["num_layers"], gguf.rope(common["head_dim"])),
        has_qkv_bias=gguf.architecture == "qwen2" or gguf.has_tensor("blk.0.attn_q.bias"),
        has_o_bias=gguf.has_tensor("blk.0.attn_output.bias"),
        qk_norm="none" if gguf.architecture == "qwen2" else "per_head",
    )


FAMILY = Family(_read_hf, _read_gguf, HF_NAMES, GGUF_NAMES)
