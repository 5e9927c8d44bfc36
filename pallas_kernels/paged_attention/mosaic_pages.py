"""Walking the pages of a row inside a Mosaic GPU kernel, `keys` tokens of the context per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def parts_per_step(page_size: int, keys: int) -> int:
    """Copies that bring one step's K (or V): one per page, or one when a page holds several steps."""
    return max(1, keys // page_size)


def copy_steps(
    sources: Sequence[Callable[[Any], Any]],  # page -> [page_size, D] of each ring
    rings: Sequence[tuple[Any, Any, Any]],  # buffer [stages, keys, D], full barriers, free barriers
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
        for source, (smem, full, free) in zip(sources, rings, strict=True):

            @pl.when(step >= stages)
            def _wait(free=free):
                plgpu.barrier_wait(free.at[slot])

            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    source(page) if tokens == page_size else source(page).at[pl.ds(offset, tokens)],
                    smem.at[slot] if tokens == keys else smem.at[slot, pl.ds(i * tokens, tokens)],
                    full.at[slot],
                )
        return ids(first + jnp.minimum(step + 1, steps - 1))

    lax.fori_loop(0, steps, fetch, ids(first))
