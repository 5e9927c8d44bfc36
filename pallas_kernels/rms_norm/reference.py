"""Root mean square norms (Zhang & Sennrich, 2019, arXiv:1910.07467) in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LEAST_ROWS = 8  # of a reduction, below which XLA:CPU sums a row in another order


def mean_square(x: jax.Array) -> jax.Array:
    """[..., K] -> [..., 1]: the mean of the squares, with the same bits for a row however many there are."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    padded = jnp.pad(rows, ((0, max(0, _LEAST_ROWS - num_rows)), (0, 0)))
    return jnp.mean(padded * padded, axis=-1)[:num_rows].reshape(*x.shape[:-1], 1)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, [..., K] float32."""
    return x * jax.lax.rsqrt(mean_square(x) + eps) * weight
