"""What a model computes: one frozen description, whatever file it came from. No jax.

`models/config_hf.py` and `models/config_gguf.py` read the files; a family module says which of their keys it uses.
"""

from __future__ import annotations

import dataclasses

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS = ("silu", "gelu_tanh")
QK_NORMS = ("none", "per_head", "full")
SCORINGS = ("softmax", "softmax_topk", "sigmoid")
GROUP_SCORES = ("max", "top2_sum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of a layer; frequencies as in transformers' ROPE_INIT_FUNCTIONS.

    theta             base of the frequencies
    dim               leading dimensions of a head that are rotated, halves against each other
    is_interleaved    neighbouring dimensions are rotated against each other instead
    type              one of ROPE_TYPES
    factor            context extension (linear, llama3, yarn, longrope)
    original_max_position_embeddings      trained context (llama3, yarn, longrope)
    low_freq_factor, high_freq_factor     llama3
    beta_fast, beta_slow, truncate        yarn
    attention_factor  multiplies cos and sin (yarn); None: from factor and mscale
    mscale, mscale_all_dim                yarn of DeepSeek
    freq_divisors     [dim / 2] divisors of the frequencies as a GGUF file carries them; () none
    short_divisors, long_divisors         [dim / 2] longrope: divisors of an engine whose requests stay within the
                      trained context, and of one that serves longer ones (RuntimeOptions.max_model_len)
    """

    theta: float = 10000.0
    dim: int
    is_interleaved: bool = False
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    freq_divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(f"rope type: got {self.type!r}; allowed: {', '.join(ROPE_TYPES)}")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rope dim: got {self.dim}; allowed: a positive even number")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"rope theta, factor: got {self.theta}, {self.factor}; allowed: above 0")
        if self.type in ("llama3", "yarn", "longrope") and self.original_max_position_embeddings < 1:
            raise ValueError(f"original_max_position_embeddings: missing, which rope type {self.type} needs")
        for divisors in (self.freq_divisors, self.short_divisors, self.long_divisors):
            if divisors and len(divisors) != self.dim // 2:
                raise ValueError(f"rope frequency divisors: got {len(divisors)}; allowed: {self.dim // 2}")
        if self.type == "longrope" and not (self.short_divisors and self.long_divisors):
            raise ValueError("rope type longrope: short_factor or long_factor is missing, which it needs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What differs from layer to layer.

    sliding_window   0: none; w: a token sees the last w positions, itself included
    rope             None: no rotation in this layer
    uses_moe         experts (config.moe) instead of the dense feed-forward part
    """

    sliding_window: int = 0
    rope: RopeConfig | None
    uses_moe: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of a layer. Raises ValueError naming the field, the value seen and the values allowed.

    intermediate_size  width of one routed expert
    scoring            "softmax" (over all experts), "softmax_topk" (over the chosen ones) or "sigmoid"
    normalize_top_k    weights of the chosen experts sum to one
    num_groups, num_chosen_groups    group-limited choice; 1, 1: none
    group_score        "max" or "top2_sum": how a group is ranked
    routed_scale       factor on the sum of the routed experts
    shared_size        width of the shared expert, computed for every token; 0: none
    has_shared_gate    the shared expert's output is multiplied by sigmoid(x . gate)
    has_router_bias    a bias on the router's logits; has_correction_bias: one that takes part in the choice only
    swiglu_limit       0: none; c: gate up to c and up within -c and c, then gate sigmoid(1.702 gate) (up + 1)
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    scoring: str = "softmax"
    normalize_top_k: bool = True
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "max"
    routed_scale: float = 1.0
    shared_size: int = 0
    has_shared_gate: bool = False
    has_router_bias: bool = False
    has_correction_bias: bool = False
    has_expert_bias: bool = False
    swiglu_limit: float = 0.0

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.intermediate_size < 1:
            raise ValueError(
                f"num_experts, their intermediate_size: got {self.num_experts}, {self.intermediate_size}; "
                "allowed: 1 or more"
            )
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring: got {self.scoring!r}; allowed: {', '.join(SCORINGS)}")
        if self.group_score not in GROUP_SCORES:
            raise ValueError(f"group_score: got {self.group_score!r}; allowed: {', '.join(GROUP_SCORES)}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups: got {self.num_groups}; allowed: a divisor of {self.num_experts}")
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(f"num_chosen_groups: got {self.num_chosen_groups}; allowed: 1 to {self.num_groups}")
        within = self.num_experts // self.num_groups * self.num_chosen_groups
        if not 1 <= self.num_experts_per_token <= within:
            raise ValueError(f"num_experts_per_token: got {self.num_experts_per_token}; allowed: 1 to {within}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2): ranks and head sizes; q_lora_rank 0: queries have no latent."""

    kv_lora_rank: int
    q_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. Raises ValueError naming the field, the value seen and the values allowed.

    architecture        as the file names it ("LlamaForCausalLM", "llama")
    family              module under models/ that declares it
    max_position_embeddings   longest context in tokens
    layers              one LayerConfig per layer
    activation          of the feed-forward gate: one of ACTIVATIONS
    attention_scale     factor on q . k
    qk_norm             RMS norm of queries and keys before the rotation: "per_head" over head_dim, "full" over all
                        heads at once
    qkv_clip            0: none; c: queries, keys and values are clamped to -c and c, before the rotation
    has_sinks           one learned logit per head takes part in the softmax of attention
    has_qkv_bias, has_o_bias, has_mlp_bias
    has_pre_norms       norms in front of attention and feed-forward
    has_post_norms      norms behind them, before the residual sum
    norm_offset         added to stored norm weights at load (1 where files store weight - 1)
    embedding_scale     factor on embedded tokens
    attention_softcap, logit_softcap   c tanh(x / c) on scores, on logits; 0: none
    eos_token_ids       every token that ends a text
    num_draft_layers    layers behind the last whose weights a file may hold for drafting; they are not loaded
    task                "generate", or "embed" for a decoder without a head, made for embeddings
    pooling             of embeddings: "last" or "mean"
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    tie_word_embeddings: bool = False
    activation: str = "silu"
    qk_norm: str = "none"
    qkv_clip: float = 0.0
    has_sinks: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    num_draft_layers: int = 0
    task: str = "generate"
    pooling: str = "last"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}; allowed: 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {self.num_kv_heads}; allowed: a divisor of {self.num_heads}")
        if len(self.layers) != self.num_layers:
            raise ValueError(f"layers: got {len(self.layers)} for num_layers {self.num_layers}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {self.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        if self.qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm: got {self.qk_norm!r}; allowed: {', '.join(QK_NORMS)}")
        if self.moe is None and any(layer.uses_moe for layer in self.layers):
            raise ValueError("layers: uses_moe without a description of the experts (moe)")
        for layer in self.layers:
            if layer.rope is not None and layer.rope.dim > self.head_dim:
                raise ValueError(f"rope dim: got {layer.rope.dim}; allowed: up to head_dim ({self.head_dim})")

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        return self.max_position_embeddings

    @property
    def trained_length(self) -> int | None:
        """Tokens up to which longrope computes as in training; None: the length makes no difference."""
        lengths = [
            layer.rope.original_max_position_embeddings
            for layer in self.layers
            if layer.rope is not None and layer.rope.type == "longrope"
        ]
        return min(lengths, default=None)
