"""Pages as [page, token, 2, kv_head, head_dim], for the backends that are written in jax.numpy alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_kv(k: jax.Array, v: jax.Array, pages: jax.Array, write_slot: jax.Array) -> jax.Array:
    """Write this step's K and V into `pages`, in place when the caller donates them.

    k, v [T, KV, D] float32; write_slot [T] int32, past the end: dropped. Returns the updated pages.
    With bfloat16 pages XLA:CPU widens the whole operand of the scatter, which copies the cache once per layer:
    right but slow, so use float32 pages there (`writes_in_place` in the api module).
    """
    num_pages, page_size = pages.shape[:2]
    flat = pages.reshape(num_pages * page_size, *pages.shape[2:])  # [slots, 2, KV, D]
    new = jnp.stack([k, v], axis=1).astype(pages.dtype)  # [T, 2, KV, D]
    return flat.at[write_slot].set(new, mode="drop").reshape(pages.shape)
