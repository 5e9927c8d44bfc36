"""What handlers of products with few rows share: reading the call, cutting the outputs into work items.

Arguments are x [T, K] float32 (or as a handler says) and the weights w, one row of bytes or values per output; the
result is y [T, N].
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
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    BAD_ARGUMENTS,
    NO_MEMORY,
    PLAN_HEAD,
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
)
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, block_bytes, tail_bytes

OUTPUTS = 8  # an item's number of outputs is a multiple
_X, _W = range(2)
# In a plan, behind its head: how its outputs are cut into work items.
_PER_RUN, _PER_ITEM, _OUTPUTS_AT, CUT_END = (PLAN_HEAD + 8 * i for i in range(4))
_SPACE, _RAW, _PLAN_BYTES = CUT_END, CUT_END + 8, 64
# Each thread begins with a run of outputs that lie together, since memory is read faster in one go than in pieces that
# threads take in turn. Smaller items for the rest of the outputs even out who came late.
_RUN_PERCENT = 75
_ITEMS_PER_THREAD = 8  # of the rest, at most


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
def cut_outputs(plan, outputs, threads, least, multiple):
    """Cut them into a run for each thread and items of about `least` or more, both multiples of `multiple` but for the
    last of each. Returns how many there are, runs included."""
    per_run = outputs
    if threads > 1:
        per_run = max(outputs * _RUN_PERCENT // (100 * threads) // multiple, 1) * multiple
    rest = max(outputs - threads * per_run, 0)
    per_item = max(max(least, rest // (threads * _ITEMS_PER_THREAD)) // multiple, 1) * multiple
    store_i64(plan, PLAN_THREADS, threads)
    store_i64(plan, _PER_RUN, per_run)
    store_i64(plan, _PER_ITEM, per_item)
    store_i64(plan, _OUTPUTS_AT, outputs)
    return (outputs - rest + per_run - 1) // per_run + (rest + per_item - 1) // per_item


@jit
def first_output(plan, i):
    """The first output of item i."""
    runs = load_i64(plan, PLAN_THREADS)
    return min(i, runs) * load_i64(plan, _PER_RUN) + max(i - runs, 0) * load_i64(plan, _PER_ITEM)


@jit
def item_outputs(plan, i):
    """How many outputs item i has."""
    count = load_i64(plan, _PER_RUN) if i < load_i64(plan, PLAN_THREADS) else load_i64(plan, _PER_ITEM)
    return min(count, load_i64(plan, _OUTPUTS_AT) - first_output(plan, i))


def make_stored_bytes(name: str, kind: str) -> Any:
    """stored_bytes(frame): what the weights of an output take, quantised or "bfloat16"."""
    block_size, tail = (2 * BLOCK, 0) if kind == "bfloat16" else (block_bytes(kind), tail_bytes(kind))

    @named(name)
    def stored_bytes(frame):
        return num_inputs(frame) // BLOCK * block_size + tail

    return stored_bytes


@jit
def make_plan(outputs, threads, row_bytes, item_bytes, space_bytes):
    """A plan whose items are at least `item_bytes` of weights, with work space behind it; or NO_MEMORY."""
    raw = malloc(_PLAN_BYTES + 64 + space_bytes)
    if raw == 0:
        return NO_MEMORY
    plan = (raw + 63) // 64 * 64
    store_i64(plan, PLAN_ITEMS, cut_outputs(plan, outputs, threads, item_bytes // row_bytes, OUTPUTS))
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
def free_plan(frame, plan):
    """The `finish` part of a handler."""
    free(load_i64(plan, _RAW))


def parts(plan: Any, body: Any) -> tuple[Any, Any, Any]:
    """What parallel.register_handler takes."""
    return plan, body, free_plan
