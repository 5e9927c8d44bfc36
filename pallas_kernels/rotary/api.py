"""From a product to the queries, keys and values of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.rms_norm.reference import rms_norm
from jaxserve.pallas_kernels.rotary.reference import rotate


def rotate_heads(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    norm_weights: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    backend: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [T, H + 2 KV, D] float32 -> queries [T, H, D] and keys [T, KV, D], rotated, and values [T, KV, D].

    cos, sin      [T, R] float32: the first 2 R dimensions of a head turn, the others stay
    norm_weights  [D] each: queries and keys are normalised by head before (RMS norm with eps)
    backend       that of attention; cpu_ffi has a kernel for heads that vectors divide

    Raises ValueError where shapes do not fit.
    """
    if num_heads > qkv.shape[1] or (qkv.shape[1] - num_heads) % 2 or 2 * cos.shape[1] > qkv.shape[2]:
        raise ValueError(
            f"rotate_heads: got qkv {qkv.shape}, {num_heads} query heads and cos {cos.shape}; allowed: as many key as "
            f"value heads beside them, and no more than half of a head for cos"
        )
    if backend == "cpu_ffi" and qkv.shape[0]:
        # Loaded only here: it needs numba, which other platforms do without.
        from jaxserve.pallas_kernels.rotary import cpu_ffi

        if cpu_ffi.fits(qkv, cos):
            return cpu_ffi.rotate_heads_cpu(qkv, cos, sin, num_heads=num_heads, norm_weights=norm_weights, eps=eps)
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
    if norm_weights is not None:
        q, k = (rms_norm(x, weight, eps=eps) for x, weight in zip((q, k), norm_weights))
    return rotate(q, cos, sin), rotate(k, cos, sin), v
