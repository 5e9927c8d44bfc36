"""Grouped products written plainly: every row against every matrix, all but one thrown away."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def grouped_matmul_reference(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x [M, K] float32, w [E, N, K], group_sizes [E] -> [M, N] float32. Memory grows with M * E * N."""
    end = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]
    is_in_group = (row >= end - group_sizes) & (row < end)  # [M, E]
    each = jnp.einsum("mk,enk->men", x.astype(w.dtype), w, preferred_element_type=jnp.float32, precision="highest")
    # Selected, not multiplied by zero: a row past the last group may hold anything.
    return jnp.sum(jnp.where(is_in_group[:, :, None], each, 0.0), axis=1)
