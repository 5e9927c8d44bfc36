"""OLMo-2 (norms behind each part, queries and keys normalised over all heads) and OLMoE (experts, the same norms of
queries and keys, clamped projections)."""

from __future__ import annotations

import dataclasses

from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import GGUF_LAYER, HF_EXPERTS, HF_LAYER, Family, WeightNames
from jaxserve.models.llama import GGUF_NAMES, HF_NAMES


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    is_olmoe = hf.architecture == "OlmoeForCausalLM"
    has_bias = hf.flag("attention_bias", False)
    moe = None
    if is_olmoe:
        moe = MoEConfig(
            num_experts=hf.integer("num_experts", hf.get("num_local_experts", 64)),
            num_experts_per_token=hf.integer("num_experts_per_tok", 8),
            intermediate_size=common["intermediate_size"],
            normalize_top_k=hf.flag("norm_topk_prob", False),
        )
    return ModelConfig(
        **common,
        **_shared(is_olmoe),
        layers=(LayerConfig(rope=hf.rope(), uses_moe=is_olmoe),) * common["num_layers"],
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
        qkv_clip=hf.number("clip_qkv", 0.0),
        moe=moe,
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    is_olmoe = gguf.architecture == "olmoe"
    common = gguf.common(has_experts=is_olmoe)
    layer = LayerConfig(rope=gguf.rope(common["head_dim"]), uses_moe=is_olmoe)
    return ModelConfig(
        **common,
        **_shared(is_olmoe),
        layers=(layer,) * common["num_layers"],
        qkv_clip=gguf.number("attention.clamp_kqv", 0.0),
        moe=gguf.moe(normalize_top_k=False) if is_olmoe else None,
    )


def _shared(is_olmoe: bool) -> dict:
    return {"family": "olmo", "qk_norm": "full", "has_pre_norms": is_olmoe, "has_post_norms": not is_olmoe}


def _with_post_norms(names: WeightNames, layer: dict[str, str], attention: str, mlp: str) -> WeightNames:
    return dataclasses.replace(names, layer=layer | {"attention_post_norm": attention, "mlp_post_norm": mlp})


_LAYER = "model.layers.{i}"
FAMILY = Family(
    _read_hf,
    _read_gguf,
    _with_post_norms(
        HF_NAMES, HF_LAYER | HF_EXPERTS, f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.post_feedforward_layernorm"
    ),
    _with_post_norms(GGUF_NAMES, GGUF_LAYER, "blk.{i}.post_attention_norm", "blk.{i}.post_ffw_norm"),
)
