"""Pages as [page, token, 2, kv_head, head_dim], for the backends that are written in jax.numpy alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, QuantizedPages, quantize


def write_kv(k: jax.Array, v: jax.Array, pages: Pages, write_slot: jax.Array) -> Pages:
    """Write this step's K and V into `pages`, in place when the caller donates them.

    k, v [T, KV, D] float32; write_slot [T] int32, past the end: dropped. Returns the updated pages.
    With bfloat16 pages XLA:CPU widens the whole operand of the scatter, which copies the cache once per layer:
    right but slow, so use float32 pages there (`writes_in_place` in the api module). Pages of codes: quantises.
    """
    new = jnp.stack([k, v], axis=1)  # [T, 2, KV, D]
    if isinstance(pages, QuantizedPages):
        codes, scales = quantize(new, pages.dtype)
        return QuantizedPages(_write(codes, pages.codes, write_slot), _write(scales, pages.scales, write_slot))
    return _write(new.astype(pages.dtype), pages, write_slot)


def _write(new: jax.Array, pages: jax.Array, write_slot: jax.Array) -> jax.Array:
    flat = pages.reshape(-1, *pages.shape[2:])  # [slots, ...]
    return flat.at[write_slot].set(new, mode="drop").reshape(pages.shape)
