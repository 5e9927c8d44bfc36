"""How many pages the cache gets, from real bytes, and the arrays themselves."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

logger = logging.getLogger(__name__)

_GIB = 2**30
# On CPU a new page array is written once, at one to two seconds per GiB: an engine that nobody told how much to
# take does not spend a minute on memory that it may never use.
_CPU_BYTES = 2 * _GIB
_FULL_REQUESTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagePlan:
    """num_pages includes the dummy page 0; pages_per_request is what a request of full length takes;
    bytes_per_page is over all layers."""

    num_pages: int
    pages_per_request: int
    bytes_per_page: int

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.bytes_per_page


def plan_pages(
    *,
    bytes_per_page: int,
    pages_per_request: int,
    max_num_rows: int,
    num_pages: int | None,
    kv_cache_bytes: int | None,
    memory_fraction: float,
    free_bytes: int,
    platform: str,
    may_shorten: bool = False,
) -> PagePlan:
    """Pages to allocate: `num_pages`, else what `kv_cache_bytes` holds, else a share of the free memory, at most
    what max_num_rows requests of full length can use.

    may_shorten: when one request of full length would not fit, allow shorter ones only, as long as the pool does.
    Raises ValueError naming the numbers when a request of full length would not fit, or the memory is not there.
    """
    full = pages_per_request + 1
    if num_pages is not None:
        chosen, why = num_pages, f"num_pages: got {num_pages}"
    elif kv_cache_bytes is not None:
        chosen = kv_cache_bytes // bytes_per_page
        why = f"kv_cache_bytes: got {kv_cache_bytes} ({chosen} pages of {bytes_per_page} bytes)"
    else:
        budget = int(free_bytes * memory_fraction)
        why = (
            f"memory_fraction: {memory_fraction} of {free_bytes / _GIB:.2f} GiB free memory is "
            f"{budget // bytes_per_page} pages of {bytes_per_page} bytes"
        )
        if platform == "cpu":
            budget = min(budget, max(_CPU_BYTES, _FULL_REQUESTS * full * bytes_per_page))
        chosen = min(budget // bytes_per_page, max_num_rows * pages_per_request + 1)
    if may_shorten and 2 <= chosen < full:
        logger.warning("%s; requests of full length would take %d pages: allowing shorter ones only", why, full)
        pages_per_request = chosen - 1
    elif chosen < full:
        raise ValueError(
            f"{why}; allowed: at least {full} pages ({full * bytes_per_page / _GIB:.3f} GiB), which hold one "
            "request of max_model_len and the dummy page. Lower max_model_len or raise the memory"
        )
    plan = PagePlan(num_pages=chosen, pages_per_request=pages_per_request, bytes_per_page=bytes_per_page)
    if plan.total_bytes > free_bytes:
        raise ValueError(
            f"{why}; allowed: {free_bytes // bytes_per_page} pages, for {free_bytes / _GIB:.2f} GiB are free"
        )
    return plan


def free_bytes(device: jax.Device) -> int:
    """Memory that is free for page arrays on `device` now. On CPU the smaller of what the system has available and
    what the control group leaves."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
        raise ValueError(f"memory of {device}: the platform reports none; allowed: set num_pages or kv_cache_bytes")
    return min(_system_available(), _control_group_available())


def allocate(shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeroed arrays made on the device, or on those of their sharding: memory that came from numpy could not be
    donated."""

    def make() -> tuple[Any, ...]:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    if all(shape.sharding is None for shape in jax.tree.leaves(shapes)):
        return jax.block_until_ready(jax.jit(make)())
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
    return jax.block_until_ready(jax.jit(make, out_shardings=shardings)())


def _system_available(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of what is installed is the best that can be said without another dependency.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _control_group_available(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under the limit of this control group (version 2, then 1); a huge number without a limit."""
    for limit_name, used_name, stat_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            limit = (root / limit_name).read_text().strip()
            used = int((root / used_name).read_text())
            stat = dict(line.split() for line in (root / stat_name).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            # Cached file pages count as used, but the kernel gives them up on demand.
            return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    return 2**63 - 1
