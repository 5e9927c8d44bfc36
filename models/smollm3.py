"""SmolLM3: the plain decoder without rotation in every fourth layer (NoPE; Yang et al., 2025, arXiv:2501.18795)."""

from __future__ import annotations

from jaxserve.models import llama
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import Family

_EVERY = 4


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    num_layers, has_bias = common["num_layers"], hf.flag("attention_bias", False)
    has_rope = hf.get("no_rope_layers", None)
    if has_rope is None:
        has_rope = _rotated(num_layers, hf.integer("no_rope_layer_interval", _EVERY))
    if not isinstance(has_rope, (list, tuple)) or len(has_rope) < num_layers:
        raise ValueError(f"no_rope_layers: got {has_rope!r}; allowed: 0 or 1 for each of {num_layers} layers")
    window = hf.integer("sliding_window", 0) if hf.flag("use_sliding_window", False) else 0
    is_sliding = hf.layer_is_sliding(tuple(window > 0 and not rotated for rotated in has_rope[:num_layers]))
    common["tie_word_embeddings"] = hf.flag("tie_word_embeddings", True)
    rope = hf.rope(theta=2000000.0)
    return ModelConfig(
        **common,
        family="smollm3",
        layers=tuple(
            LayerConfig(sliding_window=window if sliding else 0, rope=rope if rotated else None)
            for sliding, rotated in zip(is_sliding, has_rope)
        ),
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        has_mlp_bias=hf.flag("mlp_bias", False),
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common()
    rope = gguf.rope(common["head_dim"])
    return ModelConfig(
        **common,
        family="smollm3",
        layers=tuple(LayerConfig(rope=rope if rotated else None) for rotated in _rotated(common["num_layers"], _EVERY)),
    )


def _rotated(num_layers: int, every: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % every != 0 for layer in range(num_layers))


FAMILY = Family(_read_hf, _read_gguf, llama.HF_NAMES, llama.FAMILY.gguf_names)
