"""Reading a Hugging Face config.json: published spellings and those of transformers 5. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.models.config import ROPE_TYPES, LayerConfig, RopeConfig
from jaxserve.models.special_tokens import hf_end_token_ids

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MISSING = object()


class HFConfig:
    """config.json of a folder. Every reader raises ValueError naming the file and the key."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self.content, self.path = content, path

    @property
    def architecture(self) -> str:
        names = self.content.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ValueError(f"{self.path}: architectures: got {names!r}; allowed: a list with the model's class")
        return names[0]

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """A value; `default` when it is absent or null."""
        value = self.content.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ValueError(f"{self.path}: the key {key!r} is missing")
        return default

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.path}: {key}: got {value!r}; allowed: an integer")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        return _number(self.get(key, default), key, self.path)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key}: got {value!r}; allowed: true, false")
        return value

    def activation(self) -> str:
        name = self.get("hidden_activation", None) or self.get("hidden_act", "silu")
        if name not in _ACTIVATIONS:
            raise ValueError(f"{self.path}: hidden_act: got {name!r}; allowed: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def head_dim(self) -> int:
        if self.get("head_dim", None) is not None:
            return self.integer("head_dim")
        return self.integer("hidden_size") // self.integer("num_attention_heads")

    def common(self) -> dict[str, Any]:
        """The ModelConfig fields that every decoder family reads the same way."""
        heads, head_dim = self.integer("num_attention_heads"), self.head_dim()
        bos = self.get("bos_token_id", None)
        return {
            "architecture": self.architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": self.integer("hidden_size"),
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("max_position_embeddings", 2048),
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
            "attention_scale": head_dim**-0.5,
            "tie_word_embeddings": self.flag("tie_word_embeddings", False),
            "activation": self.activation(),
            "bos_token_id": bos if isinstance(bos, int) else None,
            "eos_token_ids": hf_end_token_ids(self.path.parent),
        }

    def layer_is_sliding(self, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Per layer; from layer_types where the file has it."""
        kinds = self.get("layer_types", None)
        if kinds is None:
            return default
        if not isinstance(kinds, list) or not set(kinds) <= {_FULL, _SLIDING} or len(kinds) != len(default):
            raise ValueError(f"{self.path}: layer_types: got {kinds!r}; allowed: {len(default)} of {_FULL}, {_SLIDING}")
        return tuple(kind == _SLIDING for kind in kinds)

    def rope(self, *, is_sliding: bool = False, theta: float = 10000.0, head_dim: int | None = None) -> RopeConfig:
        """The rotation of one kind of layer; `theta` where the file names none, `head_dim` where it is not that of
        the file."""
        table = self._rope_table(is_sliding)
        kind = table.get("rope_type", table.get("type")) or "default"
        kind = {"su": "longrope"}.get(kind, kind)  # its first name
        if kind not in ROPE_TYPES:
            raise ValueError(f"{self.path}: rope type: got {kind!r}; allowed: {', '.join(ROPE_TYPES)}")
        partial = table.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        context = self.content.get("max_position_embeddings")
        original = table.get("original_max_position_embeddings")
        if original is None:
            original = self.get("original_max_position_embeddings", context if kind == "yarn" else 0)
        numbers = {
            name: _number(table[name], f"rope {name}", self.path)
            for name in (
                "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
                "mscale", "mscale_all_dim",
            )
            if table.get(name) is not None
        }  # fmt: skip
        if kind == "llama3" and not {"factor", "low_freq_factor", "high_freq_factor"} <= set(numbers):
            raise ValueError(f"{self.path}: rope type llama3 needs factor, low_freq_factor and high_freq_factor")
        if kind == "default":
            numbers = {}
        if kind == "longrope":
            numbers |= self._longrope(table, original, context)
        return RopeConfig(
            theta=_number(table.get("rope_theta", self.get("rope_theta", theta)), "rope_theta", self.path),
            dim=int((head_dim or self.head_dim()) * _number(partial, "partial_rotary_factor", self.path)),
            type=kind,
            original_max_position_embeddings=int(original or 0),
            truncate=bool(table.get("truncate", True)),
            **numbers,
        )

    def _longrope(self, table: dict[str, Any], original: Any, context: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for ours, name in (("short_divisors", "short_factor"), ("long_divisors", "long_factor")):
            values = table.get(name)
            if not isinstance(values, list):
                raise ValueError(f"{self.path}: rope {name}: got {values!r}; allowed: a list of numbers")
            found[ours] = tuple(_number(value, f"rope {name}", self.path) for value in values)
        if original and context:
            found["factor"] = context / original
        return found

    def _rope_table(self, is_sliding: bool) -> dict[str, Any]:
        table = self.get("rope_parameters", None)
        if table is not None and (_FULL in table or _SLIDING in table):
            table = table.get(_SLIDING if is_sliding else _FULL)
        elif table is None and is_sliding and self.get("rope_local_base_freq", None) is not None:
            # Published Gemma 3 files: the scaling belongs to the global layers alone.
            return {"rope_theta": self.number("rope_local_base_freq")}
        elif table is None:
            table = self.get("rope_scaling", {})
        if not isinstance(table, dict):
            raise ValueError(f"{self.path}: rope parameters: got {table!r}; allowed: an object")
        return table


def layers_of(window: int, is_sliding: tuple[bool, ...], rope: RopeConfig) -> tuple[LayerConfig, ...]:
    """Layers with one rotation, some of them with a sliding window."""
    return tuple(LayerConfig(sliding_window=window if sliding else 0, rope=rope) for sliding in is_sliding)


def _number(value: Any, name: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{path}: {name}: got {value!r}; allowed: a number")
    return float(value)
