"""New cache entries of a step into their pages, in place, for Hopper GPUs (Pallas Mosaic GPU).

Each block carries a few tokens through shared memory, with two TMA copies a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.mosaic.hopper import launch
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, QuantizedPages, quantize

MAX_TOKENS = 8  # tokens per block
BLOCK_BYTES = 32768  # shared memory one block takes at most, where it holds more than one token


def write_kv(
    k: jax.Array,  # [T, KV, D]
    v: jax.Array,  # [T, KV, D]
    pages: Pages,  # [num_pages, KV, 2, page_size, D]
    write_slot: jax.Array,  # [T] int32; past the end: dropped
    *,
    interpret: Any = None,
) -> Pages:
    """Returns the updated pages: the same memory when the caller donates them."""

    def write(new: jax.Array, pages: jax.Array) -> jax.Array:
        new = new[:, :, :, None]
        return _write(new, pages, write_slot, 3, lambda page, token: page.at[:, :, token], "write_kv", interpret)

    new = jnp.stack([k, v], axis=2)
    if not isinstance(pages, QuantizedPages):
        return write(new, pages)
    codes, scales = quantize(new.astype(jnp.float32), pages.dtype)
    page, token = jnp.divmod(write_slot, pages.shape[3])
    # Four bytes are less than a TMA copy can carry: XLA writes them, in place too.
    return QuantizedPages(write(codes, pages.codes), pages.scales.at[page, :, :, token].set(scales, mode="drop"))


def write_latents(
    new: jax.Array,  # [T, D]
    pages: jax.Array,  # [num_pages, page_size, D]
    write_slot: jax.Array,  # [T] int32; past the end: dropped
    *,
    interpret: Any = None,
) -> jax.Array:
    """As write_kv, for pages of one vector per token; D a multiple of 64."""
    # TMA copies at most 256 values along one axis.
    pieces = (pages.shape[2] // 64, 64)
    split = pages.reshape(*pages.shape[:2], *pieces)
    new = new.reshape(-1, 1, *pieces)
    out = _write(new, split, write_slot, 1, lambda page, token: page.at[token], "write_latents", interpret)
    return out.reshape(pages.shape)


def _write(
    new: jax.Array,  # [T, ..., 1, D]
    pages: jax.Array,  # [num_pages, ..., page_size, D]
    write_slot: jax.Array,
    token_axis: int,
    place: Callable[[Any, Any], Any],
    name: str,
    interpret: Any,
) -> jax.Array:
    page_size = pages.shape[token_axis]
    num_slots = pages.shape[0] * page_size
    entry = new.shape[1:]
    tokens = max(1, min(MAX_TOKENS, BLOCK_BYTES // (new[0].size * pages.dtype.itemsize)))
    padding = -new.shape[0] % tokens
    new = jnp.pad(new.astype(pages.dtype), ((0, padding), *((0, 0) for _ in entry)))
    slots = jnp.pad(write_slot, (0, padding), constant_values=num_slots)

    def kernel(new_ref, slots_ref, pages_ref, smem, ready):
        first = lax.axis_index("block") * tokens
        targets = [slots_ref[first + i] for i in range(tokens)]
        for i, slot in enumerate(targets):

            @pl.when(slot < num_slots)
            def _load(i=i):
                plgpu.copy_gmem_to_smem(new_ref.at[first + i], smem.at[i], ready.at[i])

        for i, slot in enumerate(targets):

            @pl.when(slot < num_slots)
            def _store(i=i, slot=slot):
                plgpu.barrier_wait(ready.at[i])
                page = pages_ref.at[lax.div(slot, page_size)]
                plgpu.copy_smem_to_gmem(smem.at[i], place(page, pl.ds(lax.rem(slot, page_size), 1)))

        plgpu.wait_smem_to_gmem(0)

    pages_ref = jax.new_ref(pages)
    launch(
        kernel,
        name,
        interpret=interpret,
        grid=(new.shape[0] // tokens,),
        grid_names=("block",),
        num_threads=1,
        scratch_types=[plgpu.SMEM((tokens, *entry), pages.dtype), plgpu.Barrier(num_barriers=tokens)],
    )(new, slots, pages_ref)
    return jax.freeze(pages_ref)
