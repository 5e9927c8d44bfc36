"""What a scheduler says of itself, and what must be true of its pages and rows whenever nothing moves. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxserve.cache.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges now; counters since the start. Pages: held by requests + cached + free = num_pages - 1."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_held: int
    num_pages_cached: int
    num_pages_free: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_prefill_tokens: int
    num_preemptions: int


def check_pages(cache: PrefixCache, held: Iterable[np.ndarray]) -> None:
    """Raise RuntimeError unless the cache counts exactly these references beside its own."""
    counts: dict[int, int] = {}
    for pages in held:
        for page in pages.tolist():
            counts[page] = counts.get(page, 0) + 1
    cache.check_integrity(counts)


def check_rows(rows: list[int], max_num_rows: int) -> None:
    """Raise RuntimeError unless free and used rows together are all rows, each once."""
    if sorted(rows) != list(range(max_num_rows)):
        raise RuntimeError(f"rows lost or used twice: {sorted(rows)}")
