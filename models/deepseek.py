"""DeepSeek-V2, V3 and R1: latent attention, dense first layers, routed experts beside shared ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxserve.models.config import LayerConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.family import HF_EXPERTS, HF_LAYER, Family
from jaxserve.models.llama import GGUF_NAMES, HF_NAMES
from jaxserve.models.rope import yarn_mscale
from jaxserve.models.weights.derived import DerivedTensors, rearranged
from jaxserve.models.weights.tensor_file import TensorFile

_TOP_K_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


def _read_hf(hf: HFConfig) -> ModelConfig:
    if hf.flag("attention_bias", False):
        raise ValueError("attention_bias: got true; allowed: false with latent attention")
    mla = MLAConfig(
        kv_lora_rank=hf.integer("kv_lora_rank"),
        q_lora_rank=hf.integer("q_lora_rank", 0),
        nope_head_dim=hf.integer("qk_nope_head_dim"),
        rope_head_dim=hf.integer("qk_rope_head_dim"),
        value_head_dim=hf.integer("v_head_dim"),
    )
    rope = dataclasses.replace(hf.rope(head_dim=mla.rope_head_dim), is_interleaved=hf.flag("rope_interleave", True))
    common = hf.common()
    common |= {
        "head_dim": mla.nope_head_dim + mla.rope_head_dim,
        "num_kv_heads": common["num_heads"],
        "attention_scale": _scale(mla, rope),
    }
    first, every = hf.integer("first_k_dense_replace", 0), hf.integer("moe_layer_freq", 1)
    return ModelConfig(
        **common,
        family="deepseek",
        layers=_layers(common["num_layers"], rope, first, every),
        mla=mla,
        moe=_experts(hf) if hf.get("n_routed_experts", None) is not None else None,
        num_draft_layers=hf.integer("num_nextn_predict_layers", 0),
    )


def _experts(hf: HFConfig) -> MoEConfig:
    is_v3 = hf.architecture != "DeepseekV2ForCausalLM"
    method = hf.get("topk_method", "noaux_tc" if is_v3 else "greedy")
    scoring = hf.get("scoring_func", "sigmoid" if is_v3 else "softmax")
    if method not in _TOP_K_METHODS:
        raise ValueError(f"topk_method: got {method!r}; allowed: {', '.join(_TOP_K_METHODS)}")
    size = hf.integer("moe_intermediate_size")
    in_groups = method != "greedy"
    return MoEConfig(
        num_experts=hf.integer("n_routed_experts"),
        num_experts_per_token=hf.integer("num_experts_per_tok"),
        intermediate_size=size,
        scoring=scoring,
        normalize_top_k=hf.flag("norm_topk_prob", is_v3),
        num_groups=hf.integer("n_group", 1) if in_groups else 1,
        num_chosen_groups=hf.integer("topk_group", 1) if in_groups else 1,
        # V2 ranks groups by their best expert, V3 by the sum of their two best.
        group_score="top2_sum" if method == "noaux_tc" else "max",
        routed_scale=hf.number("routed_scaling_factor", 1.0),
        shared_size=hf.integer("n_shared_experts", 0) * size,
        has_correction_bias=method == "noaux_tc",
    )


def _read_gguf(gguf: GGUFConfig) -> ModelConfig:
    rank, rope_dim = gguf.integer("attention.kv_lora_rank"), gguf.integer("rope.dimension_count")
    # Files since 2025 describe the absorbed form in key_length and keep the head sizes under other keys.
    key = gguf.integer("attention.key_length_mla", gguf.integer("attention.key_length"))
    value = gguf.integer("attention.value_length_mla", gguf.integer("attention.value_length"))
    mla = MLAConfig(
        kv_lora_rank=rank,
        q_lora_rank=gguf.integer("attention.q_lora_rank", 0),
        nope_head_dim=key - rope_dim,
        rope_head_dim=rope_dim,
        value_head_dim=value,
    )
    # The scale of cos and sin, 0.1 mscale ln(factor) + 1, is stored as 0.1 mscale; published models have one mscale.
    mscale = 10 * gguf.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope = dataclasses.replace(gguf.rope(rope_dim), is_interleaved=True, mscale=mscale, mscale_all_dim=mscale)
    common = gguf.common(has_experts=True, head_dim=key)
    common |= {"num_kv_heads": common["num_heads"], "attention_scale": _scale(mla, rope)}
    has_correction = gguf.has_tensor(f"blk.{common['num_layers'] - 1}.exp_probs_b.bias")
    return ModelConfig(
        **common,
        family="deepseek",
        layers=_layers(common["num_layers"], rope, gguf.integer("leading_dense_block_count", 0), 1),
        mla=mla,
        moe=gguf.moe(
            normalize_top_k=has_correction,
            group_score="top2_sum" if has_correction else "max",
            has_correction_bias=has_correction,
        ),
    )


def _scale(mla: MLAConfig, rope: RopeConfig) -> float:
    """Of scores: yarn's factor enters once for queries and once for keys."""
    scale = (mla.nope_head_dim + mla.rope_head_dim) ** -0.5
    if rope.type == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _layers(num_layers: int, rope: RopeConfig, first_moe: int, every: int) -> tuple[LayerConfig, ...]:
    return tuple(LayerConfig(rope=rope, uses_moe=i >= first_moe and i % every == 0) for i in range(num_layers))


def _split_kv_b(stored: str, k_b: str, v_b: str) -> Callable[[TensorFile, ModelConfig], TensorFile]:
    """The up-projections of keys and values, stored as one matrix whose rows are each head's key part and values, as
    the two stacks that the model asks for. Names without ".weight"; `{i}` is the layer."""

    def adapt(file: TensorFile, config: ModelConfig) -> TensorFile:
        mla, heads = config.mla, config.num_heads
        nope, value, rank = mla.nope_head_dim, mla.value_head_dim, mla.kv_lora_rank

        def rows(values: np.ndarray) -> np.ndarray:
            return values.reshape(heads, nope + value, rank)

        derived = {}
        for i in range(config.num_layers):
            source, shape = f"{stored.format(i=i)}.weight", (heads * (nope + value), rank)
            derived[f"{k_b.format(i=i)}.weight"] = rearranged(
                source, shape, (heads, rank, nope), lambda values: rows(values)[:, :nope].swapaxes(1, 2)
            )
            derived[f"{v_b.format(i=i)}.weight"] = rearranged(
                source, shape, (heads, value, rank), lambda values: rows(values)[:, nope:]
            )
        return DerivedTensors(file, derived)

    return adapt


_ATTENTION = "model.layers.{i}.self_attn"
_HF_NAMES = dataclasses.replace(
    HF_NAMES,
    layer=HF_LAYER
    | HF_EXPERTS
    | {
        "q_a": f"{_ATTENTION}.q_a_proj",
        "q_a_norm": f"{_ATTENTION}.q_a_layernorm",
        "q_b": f"{_ATTENTION}.q_b_proj",
        "kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
        "kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
        "k_b": f"{_ATTENTION}.kv_b_proj[k]",
        "v_b": f"{_ATTENTION}.kv_b_proj[v]",
        "router_correction": "model.layers.{i}.mlp.gate.e_score_correction_bias",
        "shared.gate": "model.layers.{i}.mlp.shared_experts.gate_proj",
        "shared.up": "model.layers.{i}.mlp.shared_experts.up_proj",
        "shared.down": "model.layers.{i}.mlp.shared_experts.down_proj",
    },
    adapt=_split_kv_b(f"{_ATTENTION}.kv_b_proj", f"{_ATTENTION}.kv_b_proj[k]", f"{_ATTENTION}.kv_b_proj[v]"),
)
# Files since 2025 store the two stacks, older ones the one matrix.
_GGUF_NAMES = dataclasses.replace(
    GGUF_NAMES, adapt=_split_kv_b("blk.{i}.attn_kv_b", "blk.{i}.attn_k_b", "blk.{i}.attn_v_b")
)


FAMILY = Family(_read_hf, _read_gguf, _HF_NAMES, _GGUF_NAMES)
