"""Work items of handlers that compute each row of their arguments for itself."""

from __future__ import annotations

from jaxserve.pallas_kernels.cpu_ffi.call_frame import free, jit, load_i64, malloc, num_threads, store_i64
from jaxserve.pallas_kernels.cpu_ffi.parallel import NO_MEMORY, PLAN_HEAD, PLAN_ITEMS, PLAN_THREADS

_THREAD_VALUES = 32768  # float32 below which a second thread costs more than it saves
_ITEM_VALUES = 8192
_ROWS, _PER_ITEM = PLAN_HEAD, PLAN_HEAD + 8


@jit
def plan_rows(frame, rows, width):
    """A plan for so many rows of `width` values each, or NO_MEMORY."""
    plan = malloc(PLAN_HEAD + 16)
    if plan == 0:
        return NO_MEMORY
    threads = max(1, min(num_threads(frame), rows * width // _THREAD_VALUES))
    per_item = max(rows, 1) if threads == 1 else max(_ITEM_VALUES // width, 1)
    store_i64(plan, PLAN_ITEMS, (rows + per_item - 1) // per_item)
    store_i64(plan, PLAN_THREADS, threads)
    store_i64(plan, _ROWS, rows)
    store_i64(plan, _PER_ITEM, per_item)
    return plan


@jit
def first_row(plan, i):
    """The first row of item i; that of the item behind it is where it ends."""
    return min(i * load_i64(plan, _PER_ITEM), load_i64(plan, _ROWS))


@jit
def free_rows(frame, plan):
    """The `finish` part of a handler."""
    free(plan)
