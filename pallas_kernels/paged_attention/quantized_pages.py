"""Pages of 8-bit codes with a scale per token and kv head, K and V apart: a little over half of bfloat16's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# name in the configuration -> (type of the codes, the largest magnitude that it holds)
CODES = {"int8": (jnp.dtype(jnp.int8), 127.0), "fp8": (jnp.dtype(jnp.float8_e4m3fn), 448.0)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedPages:
    """Pages of one layer; a value is its code times the scale of its vector.

    codes   int8 or float8_e4m3fn, in the layout of the backend, head_dim last
    scales  float32, the same without head_dim
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> Any:
        """That of the codes."""
        return self.codes.dtype

    def __getitem__(self, index: Any) -> jax.Array:
        """The values of these pages, float32."""
        return self.codes[index].astype(jnp.float32) * self.scales[index][..., None]


Pages = jax.Array | QuantizedPages


def page_struct(shape: tuple[int, ...], page_dtype: str) -> Any:
    """Abstract pages of this shape: one array, or codes and scales."""
    if page_dtype not in CODES:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(page_dtype))
    codes = jax.ShapeDtypeStruct(shape, CODES[page_dtype][0])
    return QuantizedPages(codes, jax.ShapeDtypeStruct(shape[:-1], jnp.float32))


def code_kind(dtype: Any) -> str:
    """The name of pages whose codes are of `dtype`."""
    return next(name for name, (codes, _) in CODES.items() if codes == dtype)


def quantize(values: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """values [..., D] float32 -> (codes [..., D] of `dtype`, scales [...] float32): the largest magnitude of a vector
    is the largest of the codes."""
    largest = CODES[code_kind(dtype)][1]
    scales = jnp.max(jnp.abs(values), axis=-1) * (1 / largest)
    # Not a division of each value: XLA turns that into this product in some programs and not in others, and a code
    # must not depend on the program.
    scaled = values * (1.0 / jnp.where(scales > 0, scales, 1.0))[..., None]
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    # The product may end a rounding error above the limit, which is NaN in float8_e4m3fn.
    return jnp.clip(scaled, -largest, largest).astype(dtype), scales
