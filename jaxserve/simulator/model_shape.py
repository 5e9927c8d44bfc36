"""How many parameters, bytes and operations a model has, from its published configuration. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Counts of one model. Parameters are counted, not bytes; attention_params and mlp_params are per layer.

    num_layers         all; num_moe_layers of them have experts instead of the dense feed-forward part
    num_window_layers  layers that see the last `window` tokens only
    attention_params   projections around attention
    kv_elements        kept per token and layer; kv_shards: over how many devices tensor parallelism can split them
                       (latent attention keeps one latent for all heads: 1)
    pair_operations    per layer, for one query token and one context token
    mlp_params         of a dense layer; expert_params of one expert; always_params: router and shared experts
    embedding_params   of the input; head_params of the output (read even if they are the same numbers)
    weight_bytes, kv_bytes   per number
    """

    name: str
    num_layers: int
    num_moe_layers: int = 0
    num_window_layers: int = 0
    window: int = 0
    hidden_size: int
    attention_params: int
    kv_elements: int
    kv_shards: int
    pair_operations: int
    mlp_params: int
    num_experts: int = 0
    num_chosen_experts: int = 0
    expert_params: int = 0
    always_params: int = 0
    embedding_params: int
    head_params: int
    is_tied: bool = False
    max_model_len: int = 8192
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    @property
    def num_params(self) -> int:
        """All of them, the experts' too."""
        moe = self.num_moe_layers * (self.num_experts * self.expert_params + self.always_params)
        ends = self.embedding_params + (0 if self.is_tied else self.head_params)
        return self.num_layers * self.attention_params + self.num_dense_layers * self.mlp_params + moe + ends

    @property
    def num_active_params(self) -> int:
        """Those that one token meets; embedding and head count once."""
        moe = self.num_moe_layers * (self.num_chosen_experts * self.expert_params + self.always_params)
        return (
            self.num_layers * self.attention_params + self.num_dense_layers * self.mlp_params + moe + self.head_params
        )

    @property
    def kv_token_bytes(self) -> float:
        """Of one token over all layers, unsplit. (Layers with a window keep what the page table holds: all of it.)"""
        return self.num_layers * self.kv_elements * self.kv_bytes


def shape_of(config: Mapping[str, Any], *, name: str = "model", weight_bytes: float = 2.0) -> ModelShape:
    """From the content of a Hugging Face config.json. Raises ValueError naming a key that is missing."""
    config = config.get("text_config", config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    num_layers = _integer(config, "num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if config.get("kv_lora_rank"):
        rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        value, q_rank = config["v_head_dim"], config.get("q_lora_rank") or 0
        query = heads * (nope + rope)
        attention = (hidden * q_rank + q_rank * query) if q_rank else hidden * query
        attention += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        kv = {"kv_elements": rank + rope, "kv_shards": 1, "pair_operations": 2 * heads * (2 * rank + rope)}
    else:
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        kv = {
            "kv_elements": 2 * kv_heads * head_dim,
            "kv_shards": kv_heads,
            "pair_operations": 4 * heads * head_dim,
        }
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts")
    moe: dict[str, int] = {}
    if experts:
        size = config.get("moe_intermediate_size") or _integer(config, "intermediate_size")
        first, every = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
        shared = (config.get("n_shared_experts") or 0) * 3 * hidden * size
        shared += 3 * hidden * (config.get("shared_expert_intermediate_size") or 0)
        moe = {
            "num_moe_layers": sum(1 for layer in range(first, num_layers) if layer % every == 0),
            "num_experts": experts,
            "num_chosen_experts": _first(config, "num_experts_per_tok", "num_experts_per_token"),
            "expert_params": 3 * hidden * size,
            "always_params": shared + hidden * experts,
        }
    window, num_window = _window(config, num_layers)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        attention_params=attention,
        mlp_params=3 * hidden * _integer(config, "intermediate_size"),
        embedding_params=_integer(config, "vocab_size") * hidden,
        head_params=_integer(config, "vocab_size") * hidden,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        max_model_len=config.get("max_position_embeddings") or 8192,
        window=window,
        num_window_layers=num_window,
        weight_bytes=weight_bytes,
        **kv,
        **moe,
    )


def _window(config: Mapping[str, Any], num_layers: int) -> tuple[int, int]:
    """Width of the sliding window, and how many layers have one."""
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if kinds:
        return window, sum(kind == "sliding_attention" for kind in kinds)
    period = config.get("sliding_window_pattern")
    return window, num_layers - num_layers // period if period else num_layers


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key}: got {value!r}; allowed: a positive integer")
    return value


def _first(config: Mapping[str, Any], *keys: str) -> int:
    return next((config[key] for key in keys if config.get(key)), 0)


def _config(**fields: Any) -> dict[str, Any]:
    return fields


# Published configurations, so that planning needs no download.
PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "llama-3.1-8b": _config(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
    ),
    "llama-3.1-70b": _config(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        intermediate_size=28672, vocab_size=128256, max_position_embeddings=131072,
    ),
    "qwen3-30b-a3b": _config(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "mixtral-8x7b": _config(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        max_position_embeddings=32768,
    ),
    "deepseek-v2": _config(
        hidden_size=5120, num_hidden_layers=60, num_attention_heads=128, intermediate_size=12288,
        moe_intermediate_size=1536, n_routed_experts=160, num_experts_per_tok=6, n_shared_experts=2,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, vocab_size=102400, max_position_embeddings=163840,
    ),
    "deepseek-v3": _config(
        hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, intermediate_size=18432,
        moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
        first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, vocab_size=129280, max_position_embeddings=163840,
    ),
}  # fmt: skip


def load_shape(model: str, *, weight_bytes: float = 2.0) -> ModelShape:
    """A preset's name, a config.json, or a folder with one. Raises ValueError for anything else."""
    if model in PRESETS:
        return shape_of(PRESETS[model], name=model, weight_bytes=weight_bytes)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model: got {model!r}; allowed: {', '.join(PRESETS)}, a config.json or a folder with one")
    return shape_of(json.loads(path.read_text()), name=path.parent.name, weight_bytes=weight_bytes)
