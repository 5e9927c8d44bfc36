"""Walking the pages of a row inside a Mosaic GPU kernel, `keys` tokens of the context per step.

One warpgroup copies pages into rings of buffers. Pages of codes pass through rings of their own, from which another
warpgroup fills those that the products read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.mosaic.hopper import ALIGN, dequantize, free_slot
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, QuantizedPages

CODE_STAGES = 2  # steps of codes in flight


@dataclasses.dataclass(frozen=True)
class Ring:
    """Buffers that are filled and freed together.

    streams  (page -> [page_size, ...] in global memory, buffer [stages, keys, ...])
    full     [stages] barriers
    free     [stages] barriers
    """

    streams: tuple[tuple[Callable[[Any], Any], Any], ...]
    full: Any
    free: Any


def parts_per_step(page_size: int, keys: int) -> int:
    """Copies that bring one step of a stream: one per page, or one when a page holds several steps."""
    return max(1, keys // page_size)


def operand_stages(pages: Pages, stages: int) -> int:
    """Steps of K and V that products can read at once: `stages`, or what converted codes leave room for."""
    return min(stages, 2) if isinstance(pages, QuantizedPages) else stages


def full_barrier(pages: Pages, keys: int, stages: int) -> Any:
    """Barriers of a ring of K or V that products read: filled by copies, or by the warpgroup that converts codes."""
    parts = 1 if isinstance(pages, QuantizedPages) else parts_per_step(pages.shape[3], keys)
    return plgpu.Barrier(num_arrivals=parts, num_barriers=stages)


def code_rings(pages: Pages, keys: int) -> Any:
    """Scratch of a kernel over pages of codes, for K and for V: codes, scales, full and free barriers; else nothing."""
    if not isinstance(pages, QuantizedPages):
        return ()
    # Tiles of 64 columns, which are converted at a time.
    transforms = (plgpu.TilingTransform((ALIGN, 64)), plgpu.SwizzleTransform(64))
    ring = (
        plgpu.SMEM((CODE_STAGES, keys, pages.shape[4]), pages.dtype, transforms=transforms),
        plgpu.SMEM((CODE_STAGES, keys), jnp.float32),
        plgpu.Barrier(num_arrivals=2 * parts_per_step(pages.shape[3], keys), num_barriers=CODE_STAGES),
        plgpu.Barrier(num_barriers=CODE_STAGES),
    )
    return ring, ring


def page_rings(pages_ref: Any, kv_head: Any, buffers: Sequence[tuple[Any, Any, Any]], codes: Any) -> list[Ring]:
    """What copies fill with K and with V of one head. buffers: those that products read, with their full and free
    barriers; codes: code_rings."""

    def of(array: Any, which: int) -> Callable[[Any], Any]:
        return lambda page: array.at[page, kv_head, which]

    if not codes:
        return [Ring(((of(pages_ref, i), values),), *barriers) for i, (values, *barriers) in enumerate(buffers)]
    return [
        Ring(((of(pages_ref.codes, i), ring), (of(pages_ref.scales, i), scales)), *barriers)
        for i, (ring, scales, *barriers) in enumerate(codes)
    ]


def copy_steps(
    rings: Sequence[Ring],
    page_ids: Callable[[Any], Any],  # index in the row's page list -> page
    *,
    page_size: int,
    first: Any,
    steps: Any,
    last_page: Any,
) -> None:
    """The copying warpgroup: bring `steps` steps from `first` on into the rings (K and V) with TMA.

    Past index `last_page` of the row's list that page is copied again: those slots are masked. The ids of the next
    pages are read one step ahead, so that the latency of that read never stands between a freed buffer and its
    next copy.
    """
    stages, keys = rings[0].streams[0][1].shape[:2]
    tokens = min(page_size, keys)

    def ids(step):
        if page_size > keys:
            return (page_ids(jnp.minimum(lax.div(step, page_size // keys), last_page)),)
        count = keys // page_size
        return tuple(page_ids(jnp.minimum(step * count + i, last_page)) for i in range(count))

    def fetch(step, pages):
        offset = lax.rem(first + step, page_size // keys) * keys if page_size > keys else 0
        for ring in rings:
            slot = free_slot(step, stages, ring.free)
            for source, smem in ring.streams:
                for i, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        source(page) if tokens == page_size else source(page).at[pl.ds(offset, tokens)],
                        smem.at[slot] if tokens == keys else smem.at[slot, pl.ds(i * tokens, tokens)],
                        ring.full.at[slot],
                    )
        return ids(first + jnp.minimum(step + 1, steps - 1))

    lax.fori_loop(0, steps, fetch, ids(first))


def convert_steps(codes: Any, buffers: Sequence[tuple[Any, Any, Any]], steps: Any) -> None:
    """The converting warpgroup: `steps` steps of codes, times their scales, into the buffers that products read.
    Arguments as in page_rings."""

    def convert(step, _):
        for (ring, scales, ring_full, ring_free), (values, full, free) in zip(codes, buffers, strict=True):
            source = lax.rem(step, CODE_STAGES)
            plgpu.barrier_wait(ring_full.at[source])
            slot = free_slot(step, values.shape[0], free)

            dequantize(ring.at[source], scales.at[source], values.at[slot])
            plgpu.commit_smem()  # for the products, and for the copies that overwrite what was read
            plgpu.barrier_arrive(ring_free.at[source])
            plgpu.barrier_arrive(full.at[slot])
        return _

    lax.fori_loop(0, steps, convert, None)
