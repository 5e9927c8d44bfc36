"""Pages as [page, token, 2, kv_head, head_dim], for the backends that are written in jax.numpy alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def write_kv(k: jax.Array, v: jax.Array, pages: jax.Array, write_slot: jax.Array) -> jax.Array:
    """Write this step's K and V into `pages`, in place when the caller donates them.

    k, v [T, KV, D] float32; write_slot [T] int32, past the end: dropped. Returns the updated pages.
    """
    num_pages, page_size = pages.shape[:2]
    flat = pages.reshape(num_pages * page_size, *pages.shape[2:])  # [slots, 2, KV, D]
    new = jnp.stack([k, v], axis=1).astype(pages.dtype)  # [T, 2, KV, D]

    def scatter(flat: jax.Array) -> jax.Array:
        return flat.at[write_slot].set(new, mode="drop", unique_indices=True)

    def one_by_one(flat: jax.Array) -> jax.Array:
        # XLA:CPU widens the whole operand of a 16-bit scatter to float32 (one copy of the cache per layer);
        # a slice update stays in place. A dropped token rewrites what slot 0 holds.
        def body(t: jax.Array, flat: jax.Array) -> jax.Array:
            is_used = write_slot[t] < flat.shape[0]
            slot = jnp.where(is_used, write_slot[t], 0)
            old = lax.dynamic_slice_in_dim(flat, slot, 1)
            return lax.dynamic_update_slice_in_dim(flat, jnp.where(is_used, new[t][None], old), slot, 0)

        return lax.fori_loop(0, new.shape[0], body, flat)

    if pages.dtype.itemsize < 4:
        flat = lax.platform_dependent(flat, cpu=one_by_one, default=scatter)
    else:
        flat = scatter(flat)
    return flat.reshape(pages.shape)
