"""Rotation of heads (Su et al., 2021, arXiv:2104.09864) in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, is_interleaved: bool = False) -> jax.Array:
    """x [T, heads, head_dim]: its first 2 * cos.shape[1] dimensions rotated, first half against second half.

    is_interleaved: even against odd dimensions instead; they come out as halves, in queries and keys alike.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if is_interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)
