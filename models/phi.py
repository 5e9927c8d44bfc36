"""Phi-3, 3.5 and 4: the plain decoder with queries, keys and values in one tensor, and gate and up in another."""

from __future__ import annotations

import dataclasses

from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import GGUF_IGNORED, GGUF_LAYER, HF_LAYER, Family
from jaxserve.models.llama import GGUF_NAMES, HF_NAMES


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    layer = LayerConfig(sliding_window=hf.integer("sliding_window", 0), rope=hf.rope())
    return ModelConfig(**common, family="phi", layers=(layer,) * common["num_layers"])


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common()
    layer = LayerConfig(sliding_window=gguf.integer("attention.sliding_window", 0), rope=gguf.rope(common["head_dim"]))
    return ModelConfig(**common, family="phi", layers=(layer,) * common["num_layers"])


def _packed(layer: dict[str, str], qkv: str, gate_up: str) -> dict[str, str]:
    """Slots of one name are one tensor, their rows in the order in which the model asks for them."""
    return layer | {"q": qkv, "k": qkv, "v": qkv, "gate": gate_up, "up": gate_up}


_LAYER = "model.layers.{i}"
FAMILY = Family(
    _read_hf,
    _read_gguf,
    dataclasses.replace(
        HF_NAMES, layer=_packed(HF_LAYER, f"{_LAYER}.self_attn.qkv_proj", f"{_LAYER}.mlp.gate_up_proj")
    ),
    dataclasses.replace(
        GGUF_NAMES,
        layer=_packed(GGUF_LAYER, "blk.{i}.attn_qkv", "blk.{i}.ffn_up"),
        ignored=(*GGUF_IGNORED, r"rope_factors_(long|short)\.weight"),
    ),
)
