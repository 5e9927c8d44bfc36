"""Reading the metadata of a GGUF file: `<architecture>.<key>`. No jax."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxserve.models.config import MoEConfig, RopeConfig
from jaxserve.models.special_tokens import gguf_end_token_ids
from jaxserve.models.weights.gguf import GGUFTensors
from jaxserve.models.weights.gguf_file import GGUFFile

_ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}
_GATINGS = {0: "", 1: "softmax", 2: "sigmoid", 3: "softmax_topk"}
_ROPE_DIVISORS = "rope_freqs.weight"
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_MISSING = object()


class GGUFConfig:
    """Metadata of one file. Every reader raises ValueError naming the file and the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.architecture

    def get(self, key: str, default: Any = _MISSING) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if value is not None:
            return value
        if default is _MISSING:
            raise ValueError(f"{self.file.path}: the metadata has no {self.architecture}.{key}")
        return default

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = int(value[0])  # one value per layer, all the same
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(
                f"{self.file.path}: {self.architecture}.{key}: got {value!r}; allowed: one integer for all layers"
            )
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.file.path}: {self.architecture}.{key}: got {value!r}; allowed: a number")
        return float(value)

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def has_experts(self, layer: int) -> bool:
        return self.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")

    def common(self, *, has_experts: bool = False, head_dim: int | None = None) -> dict[str, Any]:
        """The ModelConfig fields that every decoder family reads the same way; `head_dim` where it is not stated as
        usual."""
        if not has_experts and self.get("expert_count", 0):
            raise ValueError(
                f"{self.file.path}: {self.architecture} with {self.get('expert_count')} experts; "
                "allowed: dense models of this architecture"
            )
        heads, hidden = self.integer("attention.head_count"), self.integer("embedding_length")
        if head_dim is None:
            head_dim = self.integer("attention.key_length", hidden // heads)
            if self.integer("attention.value_length", head_dim) != head_dim:
                raise ValueError(f"{self.file.path}: attention.value_length differs from key_length ({head_dim})")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.file.path}: tensor 'token_embd.weight' is missing")
        bos = self.file.metadata.get("tokenizer.ggml.bos_token_id")
        return {
            "architecture": self.architecture,
            # The table decides: metadata may name the vocabulary without its padding.
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_layers": self.integer("block_count"),
            "num_heads": heads,
            "num_kv_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "attention_scale": self.number("attention.scale", head_dim**-0.5),
            "tie_word_embeddings": not self.has_tensor("output.weight"),
            "bos_token_id": None if bos is None else int(bos),
            "eos_token_ids": gguf_end_token_ids(self.file.metadata),
        }

    def rope(self, head_dim: int, *, theta: float = 10000.0) -> RopeConfig:
        """The rotation that the metadata describe."""
        kind = self.get("rope.scaling.type", "none")
        if kind not in _ROPE_TYPES:
            raise ValueError(f"{self.file.path}: rope type: got {kind!r}; allowed: {', '.join(_ROPE_TYPES)}")
        original = self.integer("rope.scaling.original_context_length", 0)
        found: dict[str, Any] = {"type": _ROPE_TYPES[kind], "factor": self.number("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            found["beta_fast"] = self.number("rope.scaling.yarn_beta_fast", 32.0)
            found["beta_slow"] = self.number("rope.scaling.yarn_beta_slow", 1.0)
        if self.has_tensor(_LONGROPE[0]) and self.has_tensor(_LONGROPE[1]):
            found = {
                "type": "longrope",
                "factor": self.integer("context_length") / (original or self.integer("context_length")),
                "long_divisors": self._divisors(_LONGROPE[0]),
                "short_divisors": self._divisors(_LONGROPE[1]),
                "attention_factor": self.get("rope.scaling.attn_factor", None),
            }
        return RopeConfig(
            theta=self.number("rope.freq_base", theta),
            dim=self.integer("rope.dimension_count", head_dim),
            original_max_position_embeddings=original,
            freq_divisors=self._divisors(_ROPE_DIVISORS) if self.has_tensor(_ROPE_DIVISORS) else (),
            **found,
        )

    def _divisors(self, name: str) -> tuple[float, ...]:
        values = GGUFTensors(self.file).read(name, np.dtype(np.float32))
        return tuple(float(value) for value in values.reshape(-1))

    def moe(self, **fields: Any) -> MoEConfig:
        """The experts that the metadata describe; `fields` are what the architecture fixes or, for a flag that older
        files leave out, what it then is."""
        shared = self.integer("expert_shared_count", 0)
        size = self.integer("expert_feed_forward_length", self.get("feed_forward_length", None))
        gating = self.integer("expert_gating_func", 0)
        if gating not in _GATINGS:
            raise ValueError(f"{self.file.path}: expert_gating_func: got {gating}; allowed: 1 to 3")
        if gating:
            fields["scoring"] = _GATINGS[gating]
        fields["normalize_top_k"] = bool(self.get("expert_weights_norm", fields.get("normalize_top_k", True)))
        return MoEConfig(
            num_experts=self.integer("expert_count"),
            num_experts_per_token=self.integer("expert_used_count"),
            intermediate_size=size,
            shared_size=self.integer("expert_shared_feed_forward_length", shared * size),
            num_groups=self.integer("expert_group_count", 1),
            num_chosen_groups=self.integer("expert_group_used_count", 1),
            # Some converters write 0 for "no factor".
            routed_scale=self.number("expert_weights_scale", 1.0) or 1.0,
            **fields,
        )

    def layer_is_sliding(self, num_layers: int, default_pattern: int) -> tuple[bool, ...]:
        """Per layer; every pattern-th layer is global (metadata: a number, or one flag per layer)."""
        pattern = self.get("attention.sliding_window_pattern", default_pattern)
        if isinstance(pattern, np.ndarray):
            if len(pattern) != num_layers:
                raise ValueError(f"{self.file.path}: attention.sliding_window_pattern: {len(pattern)} entries; "
                                 f"allowed: {num_layers}")  # fmt: skip
            return tuple(bool(flag) for flag in pattern)
        return tuple((layer + 1) % int(pattern) != 0 for layer in range(num_layers))
