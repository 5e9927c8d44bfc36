"""Writes tiny checkpoints as llama.cpp's converter would: names by the `gguf` package's own table, float32 values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama_bias_tied": gguf.MODEL_ARCH.LLAMA, "mistral_swa": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3, "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE, "olmo2": gguf.MODEL_ARCH.OLMO2, "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "phi3": gguf.MODEL_ARCH.PHI3, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "deepseek_v2_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}  # fmt: skip
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write(folder: Path, target: Path, *, splits_kv_b: bool = True, in_blocks: bool = False) -> Path:
    """The checkpoint in `folder` as a GGUF file named after its fixture.

    splits_kv_b   the key and value up-projections of latent attention as two tensors, as files since 2025 have them
    in_blocks     matrices as Q8_0 where their rows allow it
    """
    name, config = target.stem, json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    _write_metadata(writer, name, config)
    # Dense layers of an architecture that usually has none are named as everywhere.
    tables = [gguf.get_tensor_name_map(a, config["num_hidden_layers"]) for a in (architecture, gguf.MODEL_ARCH.LLAMA)]
    tensors = {key: value.astype(np.float32) for key, value in load_file(folder / "model.safetensors").items()}
    for key, values in _converted(name, config, _stacked(tensors), splits_kv_b):
        names = [table.get_name(key, try_suffixes=(".weight", ".bias")) for table in tables]
        written = names[0] or names[1]
        assert written is not None, key
        if in_blocks and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(written, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(written, np.ascontiguousarray(values))
    if name == "phi3":
        for length in ("long", "short"):
            factors = np.float32(config["rope_scaling"][f"{length}_factor"])
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of one kind as one tensor."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        match = _EXPERT.fullmatch(name)
        key, index = (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, 0)
        found.setdefault(key, {})[index] = values
    return {
        key: np.stack([parts[i] for i in sorted(parts)]) if ".experts." in key and parts[0].ndim < 3 else parts[0]
        for key, parts in found.items()
        if not key.endswith("_proj_bias")
    } | {key: parts[0] for key, parts in found.items() if key.endswith("_proj_bias")}


def _converted(
    name: str, config: dict, tensors: dict[str, np.ndarray], splits_kv_b: bool
) -> Iterator[tuple[str, np.ndarray]]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for key, values in tensors.items():
        if name in ("llama_bias_tied", "mistral_swa", "mixtral", "smollm3") and ("q_proj" in key or "k_proj" in key):
            count = heads if "q_proj" in key else kv_heads
            halves = values.reshape(count, 2, -1, *values.shape[1:])
            yield key, halves.swapaxes(1, 2).reshape(values.shape)
        elif name.startswith("gemma") and "norm" in key:
            yield key, values + 1
        elif key.endswith("kv_b_proj.weight") and splits_kv_b:
            nope = config["qk_nope_head_dim"]
            both = values.reshape(heads, nope + config["v_head_dim"], -1)
            yield key.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2)
            yield key.replace("kv_b_proj", "v_b_proj"), both[:, nope:]
        elif key.endswith("e_score_correction_bias"):
            yield key.replace("correction_bias", "correction.bias"), values
        elif key.endswith("sinks"):
            yield f"{key}.weight", values
        elif key.endswith("experts.gate_up_proj"):
            for part, start in (("gate_proj", 0), ("up_proj", 1)):
                yield key.replace("gate_up_proj", f"{part}.weight"), values.swapaxes(1, 2)[:, start::2]
        elif key.endswith("experts.down_proj"):
            yield f"{key}.weight", values.swapaxes(1, 2)
        elif key.endswith("experts.gate_up_proj_bias"):
            for part, start in (("gate_proj", 0), ("up_proj", 1)):
                yield key.replace("gate_up_proj_bias", f"{part}.bias"), values[:, start::2]
        elif key.endswith("experts.down_proj_bias"):
            yield key.replace("down_proj_bias", "down_proj.bias"), values
        else:
            yield key, values


def _write_metadata(writer: gguf.GGUFWriter, name: str, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if name.startswith("deepseek") else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "num_experts_per_tok" in config:
        count = next(config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config)
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    rope = config.get("rope_scaling") or {}
    if "yarn" in (rope.get("type"), rope.get("rope_type")):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if name.startswith("deepseek"):
        _write_deepseek(writer, config, rope)
    elif name != "phi3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if name in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if name == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if name == "olmoe":
        writer.add_clamp_kqv(config["clip_qkv"])
    if name in ("phi3", "gpt_oss", "mistral_swa", "gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if name == "phi3":
        writer.add_rope_dimension_count(int(16 * config["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        longer = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        factor = np.sqrt(1 + np.log(longer) / np.log(config["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(factor)


def _write_deepseek(writer: gguf.GGUFWriter, config: dict, rope: dict) -> None:
    is_v3 = config["model_type"] == "deepseek_v3"
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope_dim)
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if is_v3 else gating.SOFTMAX)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
