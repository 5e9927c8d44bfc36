"""How a model's blocks get their arrays while they are built.

Blocks ask by slot, the model's own name for a weight ("layers.3.q"); families say what files call it. Whoever
answers decides what an array is: values from a checkpoint, or only shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
from jaxserve.pallas_kernels.matmul.quantized import AnyWeight

WeightValue = AnyWeight


def layer_number(slot: str) -> int:
    """3 of "layers.3.q"."""
    return int(slot.split(".")[1])


class Parameters(Protocol):
    """The arrays of one model. Parts are joined along the rows, in the order given."""

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> WeightValue:
        """[sum(rows), columns] ([out, in]) in the compute dtype, or quantised as stored."""
        ...

    def table(self, slot: str, rows: int, columns: int) -> WeightValue:
        """[rows, columns], as matrix(): a matrix whose rows are also looked up."""
        ...

    def exact(self, slot: str, rows: int, columns: int) -> jax.Array:
        """[rows, columns] float32 whatever the compute dtype: for products that decide something (routers)."""
        ...

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> WeightValue:
        """[count, sum(rows), columns], as matrix() for `count` matrices of one shape (experts, heads)."""
        ...

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.Array:
        """[count, sum(rows)] float32."""
        ...

    def vector(self, slot: str, size: int) -> jax.Array:
        """[size] float32, from a tensor whose full name the family states."""
        ...

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.Array:
        """[sum(rows)] float32."""
        ...

    def norm(self, slot: str, size: int) -> jax.Array:
        """[size] float32, what the normalised values are multiplied by (ModelConfig.norm_offset included)."""
        ...
