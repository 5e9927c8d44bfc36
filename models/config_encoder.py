"""What an encoder computes: text in, one vector out. No jax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

ENCODER_ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One encoder: bidirectional attention, learned positions, LayerNorm behind each part (Devlin et al., 2018,
    arXiv:1810.04805). Raises ValueError naming the field, the value seen and the values allowed.

    max_model_len      longest text in tokens
    position_offset    index of the first token's row in the table of positions
    num_token_types    rows of the table of segments; every token is of the first
    pooling            "mean", "cls" or "last": what makes the vector
    """

    # Questions that loading asks of every model.
    task: ClassVar[str] = "embed"
    tie_word_embeddings: ClassVar[bool] = False
    num_draft_layers: ClassVar[int] = 0
    eos_token_ids: ClassVar[tuple[int, ...]] = ()

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_model_len: int
    num_positions: int
    position_offset: int
    num_token_types: int
    norm_eps: float
    activation: str
    pooling: str = "mean"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_model_len",
            "num_token_types",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}; allowed: 1 or more")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads: got {self.num_heads}; allowed: a divisor of {self.hidden_size}")
        if self.activation not in ENCODER_ACTIVATIONS:
            raise ValueError(f"activation: got {self.activation!r}; allowed: {', '.join(ENCODER_ACTIVATIONS)}")
        if self.max_model_len + self.position_offset > self.num_positions:
            raise ValueError(
                f"max_model_len: got {self.max_model_len}; allowed: up to {self.num_positions - self.position_offset}"
            )
