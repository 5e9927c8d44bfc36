"""New K/V of a step into their pages, in place, for Hopper GPUs (Pallas Mosaic GPU).

Each block carries the K and V of a few tokens, all heads, through shared memory with two TMA copies a token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.mosaic.hopper import launch

MAX_TOKENS = 8  # tokens per block
BLOCK_BYTES = 32768  # shared memory one block takes at most, where it holds more than one token


def _write_kernel(kv_ref, slots_ref, pages_ref, kv_smem, ready, *, num_slots: int):
    # kv_ref [T, KV, 2, 1, D]; slots_ref [T]; pages_ref [pages, KV, 2, page_size, D].
    page_size = pages_ref.shape[3]
    tokens = kv_smem.shape[0]
    first = lax.axis_index("block") * tokens

    for i in range(tokens):
        slot = slots_ref[first + i]

        @pl.when(slot < num_slots)
        def _load(i=i):
            plgpu.copy_gmem_to_smem(kv_ref.at[first + i], kv_smem.at[i], ready.at[i])

    for i in range(tokens):
        slot = slots_ref[first + i]

        @pl.when(slot < num_slots)
        def _store(i=i, slot=slot):
            plgpu.barrier_wait(ready.at[i])
            page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
            plgpu.copy_smem_to_gmem(kv_smem.at[i], pages_ref.at[page, :, :, pl.ds(offset, 1)])

    plgpu.wait_smem_to_gmem(0)


def write_kv(
    k: jax.Array,  # [T, KV, D]
    v: jax.Array,  # [T, KV, D]
    pages: jax.Array,  # [num_pages, KV, 2, page_size, D]
    write_slot: jax.Array,  # [T] int32; past the end: dropped
    *,
    interpret: Any = None,
) -> jax.Array:
    """Returns the updated pages: the same memory when the caller donates them."""
    num_pages, kv_heads, _, page_size, head_dim = pages.shape
    token_bytes = kv_heads * 2 * head_dim * pages.dtype.itemsize
    tokens = max(1, min(MAX_TOKENS, BLOCK_BYTES // token_bytes))
    padding = -k.shape[0] % tokens
    num_slots = num_pages * page_size
    kv = jnp.pad(jnp.stack([k, v], axis=2).astype(pages.dtype), ((0, padding), (0, 0), (0, 0), (0, 0)))
    slots = jnp.pad(write_slot, (0, padding), constant_values=num_slots)

    def kernel(kv_ref, slots_ref, pages_ref, *scratch):
        _write_kernel(kv_ref, slots_ref, pages_ref, *scratch, num_slots=num_slots)

    pages_ref = jax.new_ref(pages)
    launch(
        kernel,
        "write_kv",
        interpret=interpret,
        grid=(kv.shape[0] // tokens,),
        grid_names=("block",),
        num_threads=1,
        scratch_types=[
            plgpu.SMEM((tokens, kv_heads, 2, 1, head_dim), pages.dtype),
            plgpu.Barrier(num_barriers=tokens),
        ],
    )(kv[:, :, :, None], slots, pages_ref)
    return jax.freeze(pages_ref)
