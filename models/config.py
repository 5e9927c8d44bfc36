"""What a checkpoint says of its architecture, in one frozen form whatever the file format. No jax."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
ROPE_TYPES = ("default", "linear", "llama3")
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6  # every sixth layer attends globally


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that is not implemented; the text names it and what is known."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. kind "llama3" scales low frequencies only (Llama 3.1), "linear" all of them."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type: got {self.kind!r}; known: {', '.join(ROPE_TYPES)}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    family             key of models/registry.py
    layer_windows      sliding window of each layer in tokens; 0: the layer sees everything
    local_rope         rotary embedding of the layers that have a window; None: the same as the others
    attention_scale    factor on q . k
    embedding_scale    factor on the embedded tokens
    qkv_bias, qk_norm  biases on q, k and v; RMS norm on each head of q and k
    post_norms         norms behind attention and MLP as well (Gemma 2 and 3)
    norm_plus_one      the file stores norm weights less one (Gemma in safetensors)
    permuted_rope      the file interleaves the rotary halves of q and k (GGUF of the llama architecture)
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_scale: float
    layer_windows: tuple[int, ...]
    local_rope: RopeConfig | None = None
    tie_word_embeddings: bool = True
    activation: str = "silu"
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_plus_one: bool = False
    permuted_rope: bool = False
    attention_softcap: float = 0.0
    final_softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim: got {self.head_dim}; allowed: an even number (rotary embedding)")
        if len(self.layer_windows) != self.num_layers:
            raise UnsupportedModel(f"{len(self.layer_windows)} layer types for {self.num_layers} layers")


# Hugging Face architecture -> (family, options that differ from a plain Llama)
_HF: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("llama", {}),
    "Qwen2ForCausalLM": ("llama", {"qkv_bias": True}),
    "Qwen3ForCausalLM": ("llama", {"qk_norm": True}),
    "Gemma2ForCausalLM": ("gemma", {"post_norms": True, "norm_plus_one": True}),
    "Gemma3ForCausalLM": ("gemma", {"post_norms": True, "norm_plus_one": True, "qk_norm": True}),
}
_GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"permuted_rope": True}),
    "qwen2": ("llama", {"qkv_bias": True}),
    "qwen3": ("llama", {"qk_norm": True}),
    "gemma2": ("gemma", {"post_norms": True}),
    "gemma3": ("gemma", {"post_norms": True, "qk_norm": True}),
}


def known_architectures() -> tuple[str, ...]:
    return (*_HF, *(f"{name} (GGUF)" for name in _GGUF))


def _family(table: dict[str, tuple[str, dict[str, Any]]], architecture: str, where: Path) -> tuple[str, dict[str, Any]]:
    if architecture not in table:
        raise UnsupportedModel(f"{where}: architecture {architecture!r}; known: {', '.join(table)}")
    return table[architecture]


def config_from_hf(folder: Path) -> ModelConfig:
    """Read config.json, in the spelling of transformers 4 or 5. Raises UnsupportedModel, or ValueError for bad json."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder}: no config.json; allowed: a Hugging Face model folder or a GGUF file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    architecture = (raw.get("architectures") or ["(none)"])[0]
    family, options = _family(_HF, architecture, path)
    try:
        return _from_hf(raw, family, architecture, dict(options))
    except KeyError as error:
        raise ValueError(f"{path}: field {error.args[0]!r} is missing") from None


def _from_hf(raw: dict[str, Any], family: str, architecture: str, options: dict[str, Any]) -> ModelConfig:
    heads, hidden, layers = raw["num_attention_heads"], raw["hidden_size"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim") or hidden // heads
    is_gemma = family == "gemma"
    rope, local_rope = _hf_rope(raw)
    scalar = raw.get("query_pre_attn_scalar") if is_gemma else None
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation: got {activation!r}; known: {', '.join(ACTIVATIONS)}")
    if "attention_bias" in raw:
        options["qkv_bias"] = options["output_bias"] = bool(raw["attention_bias"])
    return ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=raw.get("max_position_embeddings", 8192),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        attention_scale=(scalar or head_dim) ** -0.5,
        layer_windows=_hf_windows(raw, architecture),
        tie_word_embeddings=raw.get("tie_word_embeddings", is_gemma),
        activation=ACTIVATIONS[activation],
        embedding_scale=hidden**0.5 if is_gemma else 1.0,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        attention_softcap=raw.get("attn_logit_softcapping") or 0.0,
        final_softcap=raw.get("final_logit_softcapping") or 0.0,
        **options,
    )


def _hf_windows(raw: dict[str, Any], architecture: str) -> tuple[int, ...]:
    layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window") or 0
    types = raw.get("layer_types")
    if types:
        known = {"full_attention": 0, "sliding_attention": window}
        unknown = set(types) - set(known)
        if unknown:
            raise UnsupportedModel(f"layer_types: got {sorted(unknown)}; known: {', '.join(known)}")
        return tuple(known[kind] for kind in types)
    if architecture == "Gemma3ForCausalLM":
        pattern = raw.get("sliding_window_pattern", _GEMMA3_PATTERN)
        return tuple(0 if (i + 1) % pattern == 0 else window for i in range(layers))
    if architecture == "Gemma2ForCausalLM":
        return tuple(window if i % 2 == 0 else 0 for i in range(layers))
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        return (0,) * layers
    if architecture.startswith("Qwen"):
        full = raw.get("max_window_layers", layers)
        return tuple(0 if i < full else window for i in range(layers))
    return (window if architecture == "MistralForCausalLM" else 0,) * layers


def _hf_rope(raw: dict[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """transformers 5 writes rope_parameters (for two kinds of layers one entry each), 4 rope_theta and rope_scaling."""
    new = raw.get("rope_parameters")
    if new and "full_attention" in new:
        local = _rope(new["sliding_attention"], raw) if "sliding_attention" in new else None
        return _rope(new["full_attention"], raw), local
    fields = dict(new or raw.get("rope_scaling") or {})
    fields.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    local_theta = raw.get("rope_local_base_freq")
    return _rope(fields, raw), RopeConfig(local_theta) if local_theta else None


def _rope(fields: dict[str, Any], raw: dict[str, Any]) -> RopeConfig:
    if (fields.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: got other than 1; known: 1")
    return RopeConfig(
        theta=fields.get("rope_theta", raw.get("rope_theta", 10_000.0)),
        kind=fields.get("rope_type") or fields.get("type") or "default",
        factor=fields.get("factor", 1.0),
        low_freq_factor=fields.get("low_freq_factor", 1.0),
        high_freq_factor=fields.get("high_freq_factor", 4.0),
        original_max_position=fields.get("original_max_position_embeddings", 8192),
    )


def config_from_gguf(path: Path, fields: dict[str, Any], tensor_names: set[str]) -> ModelConfig:
    """fields: GGUF metadata by key. Raises UnsupportedModel, or ValueError naming a missing key."""
    architecture = fields.get("general.architecture", "(none)")
    family, options = _family(_GGUF, architecture, path)

    def get(key: str, *default: Any) -> Any:
        name = f"{architecture}.{key}"
        if name not in fields and not default:
            raise ValueError(f"{path}: metadata key {name!r} is missing")
        return fields.get(name, *default)

    heads, hidden, layers = get("attention.head_count"), get("embedding_length"), get("block_count")
    head_dim = get("attention.key_length", hidden // heads)
    is_gemma = family == "gemma"
    theta = get("rope.freq_base", 10_000.0)
    window = get("attention.sliding_window", 0)
    pattern = {"gemma3": _GEMMA3_PATTERN, "gemma2": 2}.get(architecture, 1)
    if architecture in ("gemma2", "gemma3"):
        windows = tuple(0 if (i + 1) % pattern == 0 else window for i in range(layers))
    else:
        windows = (window,) * layers
    kind = get("rope.scaling.type", "none")
    return ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", 1e-6),
        rope=RopeConfig(theta, "default" if kind == "none" else kind, get("rope.scaling.factor", 1.0)),
        local_rope=RopeConfig(_GEMMA3_LOCAL_THETA) if architecture == "gemma3" else None,
        attention_scale=head_dim**-0.5,
        layer_windows=windows,
        tie_word_embeddings="output.weight" not in tensor_names,
        activation="gelu_tanh" if is_gemma else "silu",
        embedding_scale=hidden**0.5 if is_gemma else 1.0,
        attention_softcap=get("attn_logit_softcapping", 0.0),
        final_softcap=get("final_logit_softcapping", 0.0),
        **options,
    )
