"""The call and the plan of CPU paged attention, by byte offset: what planner, cascade and inner loop agree on.

The plan is one block of memory per call: counters, then units, items, partial results, and a work space for each
thread. Everything is read and written by byte offset.
"""

from __future__ import annotations

from jaxserve.pallas_kernels.cpu_ffi.call_frame import arg, data, dim, jit, load_i32
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import MAX_BLOCK_ROWS, TILE

SEGMENT = 256  # tokens per independent softmax; a multiple of TILE
WRITE_TOKENS = 64  # tokens per work item of the K/V write

# Arguments, results and attributes (sorted by name: a_scale, b_softcap, c_window, d_has_sinks, e_cascade) of the call.
ARG_Q, ARG_K, ARG_V, ARG_PAGES, ARG_SLOTS, ARG_STARTS, ARG_LENGTHS, ARG_TABLE, ARG_NUM_ROWS, ARG_SINKS = range(10)
RET_OUT, RET_PAGES = range(2)
ARG_SCALES, RET_SCALES = 10, 2  # [num_pages, KV, 2, page_size] float32, where pages hold codes
ATTR_SCALE, ATTR_SOFTCAP, ATTR_WINDOW, ATTR_HAS_SINKS, ATTR_CASCADE = range(5)

# The plan: counters, then units, items, parts and work space.
PLAN_WRITTEN = 64  # write items that are done; alone on its cache line
PLAN_NUM_WRITES, PLAN_TOTAL, PLAN_SCRATCH, PLAN_SCRATCH_BYTES = 128, 136, 144, 152
PLAN_UNIT_ROWS, PLAN_ITEMS_AT, PLAN_COUNTS = 160, 168, 176
PLAN_BYTES = 192
# A unit: which query rows, where their context lies, and the state of its split. A unit of several rows that read
# the same pages has members (addresses of their numbers, and of all rows' records); the others have 0 there.
UNIT_ROW, UNIT_HEAD, UNIT_TOKEN, UNIT_COUNT, UNIT_POSITION = 0, 8, 16, 24, 32
UNIT_FIRST, UNIT_END, UNIT_PARTS, UNIT_LEFT, UNIT_MEMBERS, UNIT_RECORDS = 40, 48, 56, 64, 72, 80
UNIT_BYTES = 128
# An item: a unit and the segments to compute.
ITEM_UNIT, ITEM_SEGMENT, ITEM_STOP = 0, 8, 16
ITEM_BYTES = 32
SCORE_BYTES = MAX_BLOCK_ROWS * TILE * 4


@jit
def clamp(value, low, high):
    return min(max(value, low), high)


@jit
def rows_in_use(frame):
    return clamp(load_i32(data(arg(frame, ARG_NUM_ROWS)), 0), 0, dim(arg(frame, ARG_LENGTHS), 0))


@jit
def page_size_of(frame):
    return dim(arg(frame, ARG_PAGES), 3)


@jit
def group_of(frame):
    return dim(arg(frame, ARG_Q), 1) // dim(arg(frame, ARG_K), 1)


@jit
def align(value):
    return (value + 63) // 64 * 64
