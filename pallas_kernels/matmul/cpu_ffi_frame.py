"""What handlers of products with few rows share: reading the call, cutting the outputs into work items.

Arguments are x [T, K] float32 and the weights w, one row of bytes or values per output; the result is y [T, N].
"""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    F32,
    arg,
    data,
    dim,
    dtype,
    free,
    jit,
    load_i64,
    malloc,
    num_threads,
    rank,
    ret,
    store_i64,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, NO_MEMORY, PLAN_HEAD, PLAN_ITEMS, PLAN_THREADS

OUTPUTS = 8  # an item's number of outputs is a multiple
_X, _W = range(2)
_PER_ITEM, _SPACE, _RAW, _OUTPUTS_AT, _PLAN_BYTES = PLAN_HEAD, PLAN_HEAD + 8, PLAN_HEAD + 16, PLAN_HEAD + 24, 64


@jit
def num_rows(frame):
    return dim(arg(frame, _X), 0)


@jit
def num_inputs(frame):
    return dim(arg(frame, _X), 1)


@jit
def num_outputs(frame):
    return dim(arg(frame, _W), 0)


@jit
def x_data(frame):
    return data(arg(frame, _X))


@jit
def w_data(frame):
    return data(arg(frame, _W))


@jit
def y_data(frame):
    return data(ret(frame, 0))


@jit
def has_shapes(frame, w_type, w_columns, step, per_output=1):
    """Whether x is float32 with K a positive multiple of `step`, w of type `w_type` with `w_columns` columns and
    `per_output` rows for each column of y, and y fits both."""
    x, w, y = arg(frame, _X), arg(frame, _W), ret(frame, 0)
    if dtype(x) != F32 or dtype(w) != w_type or rank(x) != 2 or rank(w) != 2 or rank(y) != 2:
        return False
    if dim(w, 1) != w_columns or dim(x, 1) % step != 0 or dim(x, 1) == 0:
        return False
    return dim(y, 0) == dim(x, 0) and dim(y, 1) * per_output == dim(w, 0)


@jit
def num_workers(frame, outputs, row_bytes, min_thread_bytes):
    """Threads worth using when the weights of each of `outputs` are `row_bytes`."""
    return max(1, min(num_threads(frame), outputs * row_bytes // min_thread_bytes))


@jit
def make_plan(outputs, threads, row_bytes, item_bytes, space_bytes):
    """A plan whose items are about `item_bytes` of weights, with work space behind it; or NO_MEMORY."""
    per_item = outputs
    if threads > 1:
        per_item = max(1, min(item_bytes // row_bytes, outputs // threads)) // OUTPUTS * OUTPUTS
    per_item = max(per_item, OUTPUTS)
    raw = malloc(_PLAN_BYTES + 64 + space_bytes)
    if raw == 0:
        return NO_MEMORY
    plan = (raw + 63) // 64 * 64
    store_i64(plan, PLAN_ITEMS, (outputs + per_item - 1) // per_item)
    store_i64(plan, PLAN_THREADS, threads)
    store_i64(plan, _PER_ITEM, per_item)
    store_i64(plan, _OUTPUTS_AT, outputs)
    store_i64(plan, _SPACE, plan + _PLAN_BYTES)
    store_i64(plan, _RAW, raw)
    return plan


@jit
def is_plan(plan):
    return plan != NO_MEMORY and plan != BAD_ARGUMENTS


@jit
def work_space(plan):
    """Address of the work space, aligned to 64 bytes."""
    return load_i64(plan, _SPACE)


@jit
def first_output(plan, i):
    """The first output of item i."""
    return i * load_i64(plan, _PER_ITEM)


@jit
def item_outputs(plan, i):
    """How many outputs item i has."""
    return min(load_i64(plan, _PER_ITEM), load_i64(plan, _OUTPUTS_AT) - first_output(plan, i))


@jit
def free_plan(frame, plan):
    """The `finish` part of a handler."""
    free(load_i64(plan, _RAW))


def parts(plan: Any, body: Any) -> tuple[Any, Any, Any]:
    """What parallel.register_handler takes."""
    return plan, body, free_plan
