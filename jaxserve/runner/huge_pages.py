"""Weights and K/V on pages of 2 MiB instead of 4 KiB, on Linux CPUs.

A step reads every weight and pages of the cache that lie anywhere. With small pages the processor walks page tables
for each 4 KiB of that, in a virtual machine those of the host as well: reading through memory then runs at a fraction
of its bandwidth. What malloc returns is on small pages unless the system gives huge ones to everybody
(/sys/kernel/mm/transparent_hugepage/enabled), so arrays that live as long as the engine are moved once, where they
are. See madvise(2): MADV_HUGEPAGE, MADV_POPULATE_WRITE of Linux 5.14 and MADV_COLLAPSE of 6.1; older kernels take
memory when it is used and move the rest in the background.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

Madvise = Callable[[int, int, int], int]  # (address, bytes, advice) -> errno, 0 without error

logger = logging.getLogger(__name__)

HUGE_PAGE = 1 << 21
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_PART = 1 << 26
_SMALLEST_GAP = 1 << 16  # of unrelated memory between arrays that are moved together
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def start_on_huge_pages(
    weights: Iterable[jax.Array], zeros: Iterable[jax.Array], setting: Path = SETTING
) -> threading.Thread | None:
    """Put arrays of the CPU that live as long as the engine on huge pages, where they are.

    weights   keep their values: moved by copying, at about a third of a GiB per second
    zeros     all zeros, before anybody writes: their memory is given back now and taken anew, which copies nothing

    What takes seconds happens in the thread that is returned, while the engine may use the arrays; None where there
    are no huge pages: another system, another platform, or an administrator who said never.
    """
    madvise = _advice(setting)
    if madvise is None:
        return None
    weights = list(weights)  # their buffers stay until the thread has seen them
    # Array by array: between two lies memory that is malloc's.
    anew = [whole for each in _ranges(zeros) for whole in _whole_huge_pages([each])]
    for start, end in anew:
        if madvise(start, end - start, _MADV_DONTNEED) == 0:
            madvise(start, end - start, _MADV_HUGEPAGE)

    def finish() -> None:
        begin = time.monotonic()
        # Taken, not only promised: memory that is missing shows at the start.
        taken = sum(_in_parts(madvise, start, end, _MADV_POPULATE_WRITE) for start, end in anew)
        moved = _move(madvise, weights)
        seconds = time.monotonic() - begin
        logger.info("huge pages below %d MiB of K/V and %d of weights, %.2f s", taken >> 20, moved >> 20, seconds)

    thread = threading.Thread(target=finish, name="huge-pages", daemon=True)
    thread.start()
    return thread


def move_to_huge_pages(arrays: Iterable[jax.Array], setting: Path = SETTING) -> int:
    """Ask for huge pages below arrays of the CPU and wait; bytes for which the system agreed."""
    madvise = _advice(setting)
    return 0 if madvise is None else _move(madvise, arrays)


def _advice(setting: Path) -> Madvise | None:
    """madvise(2) with errors as numbers; None where there are no huge pages."""
    try:
        if not sys.platform.startswith("linux") or "[never]" in setting.read_text():
            return None
    except OSError:
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda start, size, advice: ctypes.get_errno() if function(start, size, advice) else 0


def _move(madvise: Madvise, arrays: Iterable[jax.Array]) -> int:
    moved = 0
    for start, end in _whole_huge_pages(_ranges(arrays)):
        # ENOMEM: a hole between arrays that were taken as one; all else in the range is done.
        if madvise(start, end - start, _MADV_HUGEPAGE) in (0, errno.ENOMEM):
            moved += end - start
            _in_parts(madvise, start, end, _MADV_COLLAPSE)
    return moved


def _in_parts(madvise: Madvise, start: int, end: int, advice: int) -> int:
    """Bytes done; in parts, since a call ends where it finds no memory."""
    done = 0
    for first in range(start, end, _PART):
        size = min(_PART, end - first)
        error = madvise(first, size, advice)
        if error:
            logger.debug("advice %d for %d bytes: %s", advice, size, os.strerror(error))
        else:
            done += size
    return done


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
