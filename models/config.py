"""What a model computes: one frozen description, whatever file it came from. No jax.

`models/config_hf.py` and `models/config_gguf.py` read the files; a family module says which of their keys it uses.
"""

from __future__ import annotations

import dataclasses

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu_tanh")
QK_NORMS = ("none", "per_head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of a layer; frequencies as in transformers' ROPE_INIT_FUNCTIONS.

    theta             base of the frequencies
    dim               leading dimensions of a head that are rotated, halves against each other
    type              one of ROPE_TYPES
    factor            context extension (linear, llama3, yarn)
    original_max_position_embeddings      trained context (llama3, yarn)
    low_freq_factor, high_freq_factor     llama3
    beta_fast, beta_slow, truncate        yarn
    attention_factor  multiplies cos and sin (yarn); None: from factor and mscale
    mscale, mscale_all_dim                yarn of DeepSeek
    freq_divisors     [dim / 2] divisors of the frequencies as a GGUF file carries them; () none
    """

    theta: float = 10000.0
    dim: int
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

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(f"rope type: got {self.type!r}; allowed: {', '.join(ROPE_TYPES)}")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rope dim: got {self.dim}; allowed: a positive even number")
        if not self.theta > 0 or not self.factor > 0:
            raise ValueError(f"rope theta, factor: got {self.theta}, {self.factor}; allowed: above 0")
        if self.type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ValueError(f"original_max_position_embeddings: missing, which rope type {self.type} needs")
        if self.freq_divisors and len(self.freq_divisors) != self.dim // 2:
            raise ValueError(f"rope frequency divisors: got {len(self.freq_divisors)}; allowed: {self.dim // 2}")


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
    """Experts of a layer.

    scoring            "softmax" (over all experts), "softmax_topk" (over the chosen ones) or "sigmoid"
    normalize_top_k    weights of the chosen experts sum to one
    num_groups, num_chosen_groups    group-limited choice; 1, 1: none
    group_score        "max" or "top2_sum": how a group is ranked
    routed_scale       factor on the sum of the routed experts
    num_shared         shared experts, computed for every token; their width is num_shared * intermediate_size
    has_router_bias    a bias on the router's logits; has_correction_bias: one that takes part in the choice only
    swiglu_limit       0: none; clamps gate and up before the activation
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
    num_shared: int = 0
    has_router_bias: bool = False
    has_correction_bias: bool = False
    has_expert_bias: bool = False
    swiglu_limit: float = 0.0


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
    qk_norm             "per_head": RMS norm over head_dim of queries and keys, before the rotation
    has_qkv_bias, has_o_bias, has_mlp_bias
    has_pre_norms       norms in front of attention and feed-forward
    has_post_norms      norms behind them, before the residual sum
    norm_offset         added to stored norm weights at load (1 where files store weight - 1)
    embedding_scale     factor on embedded tokens
    attention_softcap, logit_softcap   c tanh(x / c) on scores, on logits; 0: none
    eos_token_ids       every token that ends a text
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
        for layer in self.layers:
            if layer.rope is not None and layer.rope.dim > self.head_dim:
                raise ValueError(f"rope dim: got {layer.rope.dim}; allowed: up to head_dim ({self.head_dim})")

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        return self.max_position_embeddings
