"""Weights and K/V on pages of 2 MiB instead of 4 KiB, on Linux CPUs.

A step reads every weight and pages of the cache that lie anywhere. With small pages the processor walks page tables
for each 4 KiB of that, in a virtual machine those of the host as well: reading through memory then runs at a fraction
of its bandwidth. What malloc returns is on small pages unless the system gives huge ones to everybody
(/sys/kernel/mm/transparent_hugepage/enabled), so arrays that live as long as the engine are moved once, where they
are. See madvise(2): MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1; older kernels move them in the background.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_PART = 1 << 26
_SMALLEST_GAP = 1 << 16  # of unrelated memory between arrays that are moved together
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def move_to_huge_pages(arrays: Iterable[jax.Array], setting: Path = SETTING) -> int:
    """Ask for huge pages below arrays of the CPU, whose values and addresses stay; bytes for which the system agreed,
    0 where there are none: another system, another platform, or an administrator who said never."""
    try:
        if not sys.platform.startswith("linux") or "[never]" in setting.read_text():
            return 0
    except OSError:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin, moved, asked = time.monotonic(), 0, 0
    for start, end in _whole_huge_pages(_ranges(arrays)):
        asked += end - start
        # ENOMEM: a hole between arrays that were taken as one; all else in the range is done.
        if libc.madvise(start, end - start, _MADV_HUGEPAGE) and ctypes.get_errno() != errno.ENOMEM:
            logger.debug("no huge pages for %d bytes: errno %d", end - start, ctypes.get_errno())
            continue
        moved += end - start
        # In parts, since one that finds no memory ends the call.
        for first in range(start, end, _PART):
            if libc.madvise(first, min(_PART, end - first), _MADV_COLLAPSE):
                logger.debug("not moved to huge pages now: %d bytes, errno %d", _PART, ctypes.get_errno())
    logger.info("huge pages below %d of %d MiB of arrays, %.2f s", moved >> 20, asked >> 20, time.monotonic() - begin)
    return moved


def _ranges(arrays: Iterable[jax.Array]) -> list[tuple[int, int]]:
    """(start, end) in memory of every shard on a CPU, ascending."""
    found = set()
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu" and shard.data.nbytes:
                start = shard.data.unsafe_buffer_pointer()
                found.add((start, start + shard.data.nbytes))
    return sorted(found)


def _whole_huge_pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The whole huge pages within ranges, those with hardly anything in between taken as one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start - joined[-1][1] < _SMALLEST_GAP:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    whole = ((-(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE) for start, end in joined)
    return [(start, end) for start, end in whole if start < end]
