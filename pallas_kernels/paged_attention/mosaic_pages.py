"""Walking the pages of a row inside a Mosaic GPU kernel, `keys` tokens of the context per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def parts_per_step(page_size: int, keys: int) -> int:
    """Copies that bring one step's K (or V): one per page, or one when a page holds several steps."""
    return max(1, keys // page_size)


def copy_steps(
    pages_ref: Any,  # [num_pages, KV, 2, page_size, D]
    page_ids: Callable[[Any], Any],  # index in the row's page list -> page
    kv_head: Any,
    first: Any,
    steps: Any,
    last_page: Any,
    rings: tuple[tuple[Any, Any, Any], ...],  # per K and V: buffer [stages, keys, D], full barriers, free barriers
) -> None:
    """The copying warpgroup: bring steps first, first + 1, ... of K and V into their rings with TMA.

    Past index `last_page` of the row's list that page is copied again: those slots are masked. The ids of the next
    pages are read one step ahead, so that the latency of that read never stands between a freed buffer and its
    next copy.
    """
    page_size = pages_ref.shape[3]
    stages, keys = rings[0][0].shape[:2]
    tokens = min(page_size, keys)

    def ids(step):
        if page_size > keys:
            return (page_ids(jnp.minimum(lax.div(step, page_size // keys), last_page)),)
        count = keys // page_size
        return tuple(page_ids(jnp.minimum(step * count + i, last_page)) for i in range(count))

    def fetch(step, pages):
        slot = lax.rem(step, stages)
        offset = lax.rem(first + step, page_size // keys) * keys if page_size > keys else 0
        for which, (smem, full, free) in enumerate(rings):

            @pl.when(step >= stages)
            def _wait(free=free):
                plgpu.barrier_wait(free.at[slot])

            for i, page in enumerate(pages):
                source = pages_ref.at[page, kv_head, which]
                plgpu.copy_gmem_to_smem(
                    source if tokens == page_size else source.at[pl.ds(offset, tokens)],
                    smem.at[slot] if tokens == keys else smem.at[slot, pl.ds(i * tokens, tokens)],
                    full.at[slot],
                )
        return ids(first + jnp.minimum(step + 1, steps - 1))

    lax.fori_loop(0, steps, fetch, ids(first))
