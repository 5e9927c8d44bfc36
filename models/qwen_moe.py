"""Qwen2-MoE (a shared expert behind a gate of its own) and Qwen3-MoE (norm per head)."""

from __future__ import annotations

import dataclasses

from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import HF_EXPERTS, HF_LAYER, Family
from jaxserve.models.llama import GGUF_NAMES, HF_NAMES


def _read_hf(hf: HFConfig) -> ModelConfig:
    common = hf.common()
    num_layers = common["num_layers"]
    is_qwen2 = hf.architecture == "Qwen2MoeForCausalLM"
    has_bias = hf.flag("attention_bias", False)
    window = hf.integer("sliding_window", 0) if hf.flag("use_sliding_window", False) else 0
    first_sliding = hf.integer("max_window_layers", num_layers)
    is_sliding = hf.layer_is_sliding(tuple(window > 0 and layer >= first_sliding for layer in range(num_layers)))
    dense, step = hf.get("mlp_only_layers", []), hf.integer("decoder_sparse_step", 1)
    rope = hf.rope()
    return ModelConfig(
        **common,
        family="qwen_moe",
        layers=tuple(
            LayerConfig(
                sliding_window=window if sliding else 0,
                rope=rope,
                uses_moe=index not in dense and (index + 1) % step == 0,
            )
            for index, sliding in enumerate(is_sliding)
        ),
        has_qkv_bias=hf.flag("qkv_bias", True) if is_qwen2 else has_bias,
        has_o_bias=not is_qwen2 and has_bias,
        qk_norm="none" if is_qwen2 else "per_head",
        moe=MoEConfig(
            num_experts=hf.integer("num_experts", hf.get("num_local_experts", None)),
            num_experts_per_token=hf.integer("num_experts_per_tok"),
            intermediate_size=hf.integer("moe_intermediate_size"),
            normalize_top_k=hf.flag("norm_topk_prob", False),
            shared_size=hf.integer("shared_expert_intermediate_size") if is_qwen2 else 0,
            has_shared_gate=is_qwen2,
        ),
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    common = gguf.common(has_experts=True)
    is_qwen2 = gguf.architecture == "qwen2moe"
    rope = gguf.rope(common["head_dim"])
    return ModelConfig(
        **common,
        family="qwen_moe",
        layers=tuple(LayerConfig(rope=rope, uses_moe=gguf.has_experts(i)) for i in range(common["num_layers"])),
        has_qkv_bias=is_qwen2,
        qk_norm="none" if is_qwen2 else "per_head",
        moe=gguf.moe(normalize_top_k=not is_qwen2, has_shared_gate=is_qwen2),
    )


FAMILY = Family(
    _read_hf,
    _read_gguf,
    dataclasses.replace(
        HF_NAMES,
        layer=HF_LAYER
        | HF_EXPERTS
        | {
            "shared.gate": "model.layers.{i}.mlp.shared_expert.gate_proj",
            "shared.up": "model.layers.{i}.mlp.shared_expert.up_proj",
            "shared.down": "model.layers.{i}.mlp.shared_expert.down_proj",
            "shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
        },
    ),
    GGUF_NAMES,
)
