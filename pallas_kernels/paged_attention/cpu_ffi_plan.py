"""How one call of CPU paged attention is cut into work items: the planner."""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    F8E4M3FN,
    F32,
    S8,
    S32,
    arg,
    attr,
    data,
    dim,
    dtype,
    free,
    jit,
    load_i32,
    load_i64,
    malloc,
    num_threads,
    rank,
    ret,
    store_i64,
    zero_bytes,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, NO_MEMORY, PLAN_ITEMS, PLAN_THREADS, named
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_cascade import (
    RECORD_MEMBERS,
    RECORD_PLACE,
    RECORD_RUN,
    RECORD_SIZE,
    RECORD_UNIT,
    find_groups,
    groups_bytes,
    record_of,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_layout import (
    ARG_K,
    ARG_LENGTHS,
    ARG_NUM_ROWS,
    ARG_PAGES,
    ARG_Q,
    ARG_SCALES,
    ARG_SINKS,
    ARG_SLOTS,
    ARG_STARTS,
    ARG_TABLE,
    ARG_V,
    ATTR_HAS_SINKS,
    ATTR_WINDOW,
    ITEM_BYTES,
    ITEM_SEGMENT,
    ITEM_STOP,
    ITEM_UNIT,
    PLAN_BYTES,
    PLAN_COUNTS,
    PLAN_ITEMS_AT,
    PLAN_NUM_WRITES,
    PLAN_SCRATCH,
    PLAN_SCRATCH_BYTES,
    PLAN_TOTAL,
    PLAN_UNIT_ROWS,
    PLAN_WRITTEN,
    RET_OUT,
    RET_PAGES,
    RET_SCALES,
    SEGMENT,
    UNIT_BYTES,
    UNIT_COUNT,
    UNIT_END,
    UNIT_FIRST,
    UNIT_HEAD,
    UNIT_LEFT,
    UNIT_MEMBERS,
    UNIT_PARTS,
    UNIT_POSITION,
    UNIT_RECORDS,
    UNIT_ROW,
    UNIT_TOKEN,
    WRITE_TOKENS,
    align,
    clamp,
    group_of,
    page_size_of,
    rows_in_use,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_segment import SegmentKernel
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import TILE
from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES

_UNIT_ROWS = 96  # query rows per unit: enough to pay for laying out a tile, few enough to stay in L2
_ITEMS_PER_THREAD = 4  # so that uneven items even out
# A unit of cost is roughly one query row against one context token, 2 ns.
_TOKEN_COST = 4  # laying out one context token, in the same unit
_MIN_ITEM_COST = 1024  # below this, handing an item to another thread costs more than it saves
_NO_SPLIT = 1 << 62
_MAX_PART_BYTES = 64 << 20
# What a walk over the batch counts; the records of shared rows follow.
_C_COST, _C_UNITS, _C_ITEMS, _C_PARTS, _C_ROWS, _COUNT_BYTES = 0, 8, 16, 24, 32, 64


@jit
def _count(counts, which, value):
    store_i64(counts, which, load_i64(counts, which) + value)


@jit
def _segments_per_item(segments, cost, target):
    """How many segments of a unit that costs `cost` one item takes."""
    pieces = max(1, min(segments, (cost + target - 1) // target))
    return (segments + pieces - 1) // pieces


@jit
def _put_items(items, unit, first, stop, per_item):
    """Items of `per_item` segments from `first` to `stop`; returns how many."""
    count = 0
    for segment in range(first, stop, per_item):
        item = items + count * ITEM_BYTES
        store_i64(item, ITEM_UNIT, unit)
        store_i64(item, ITEM_SEGMENT, segment)
        store_i64(item, ITEM_STOP, min(segment + per_item, stop))
        count += 1
    return count


@jit
def _put_unit(unit, row, head, token, tokens, position, first, end):
    store_i64(unit, UNIT_ROW, row)
    store_i64(unit, UNIT_HEAD, head)
    store_i64(unit, UNIT_TOKEN, token)
    store_i64(unit, UNIT_COUNT, tokens)
    store_i64(unit, UNIT_POSITION, position)
    store_i64(unit, UNIT_FIRST, first)
    store_i64(unit, UNIT_END, end)
    store_i64(unit, UNIT_PARTS, 0)
    store_i64(unit, UNIT_LEFT, 0)
    store_i64(unit, UNIT_MEMBERS, 0)
    store_i64(unit, UNIT_RECORDS, 0)


def _make_checks(name: str, head_dim: int, kind: str, page_multiple: int) -> Any:
    page_type = {"float32": F32, "bfloat16": BF16, "int8": S8, "fp8": F8E4M3FN}[kind]
    has_scales = kind in CODES

    @named(f"d{head_dim}_{kind}")
    def check_scales(frame):
        scales, pages = arg(frame, ARG_SCALES), arg(frame, ARG_PAGES)
        if dtype(scales) != F32 or rank(scales) != 4 or data(scales) != data(ret(frame, RET_SCALES)):
            return False
        same = True
        for i in range(4):
            same = same and dim(scales, i) == dim(pages, i)
        return same

    @named(name)
    def check(frame):
        """Whether types and shapes are what this handler was compiled for."""
        for i in range(10):
            expected = S32 if ARG_SLOTS <= i <= ARG_NUM_ROWS else F32
            if dtype(arg(frame, i)) != (page_type if i == ARG_PAGES else expected):
                return False
        q, k, v, pages = arg(frame, ARG_Q), arg(frame, ARG_K), arg(frame, ARG_V), arg(frame, ARG_PAGES)
        if rank(q) != 3 or rank(k) != 3 or rank(v) != 3 or rank(pages) != 5:
            return False
        if dim(q, 2) != head_dim or dim(k, 2) != head_dim or dim(v, 2) != head_dim or dim(pages, 4) != head_dim:
            return False
        tokens, kv_heads = dim(q, 0), dim(k, 1)
        if dim(k, 0) != tokens or dim(v, 0) != tokens or dim(v, 1) != kv_heads or dim(pages, 1) != kv_heads:
            return False
        if kv_heads < 1 or dim(q, 1) % kv_heads != 0 or dim(pages, 2) != 2 or dim(pages, 0) < 1:
            return False
        if page_size_of(frame) % page_multiple != 0:
            return False
        rows, table = dim(arg(frame, ARG_LENGTHS), 0), arg(frame, ARG_TABLE)
        if dim(arg(frame, ARG_SLOTS), 0) != tokens or dim(arg(frame, ARG_STARTS), 0) != rows + 1:
            return False
        if rank(table) != 2 or dim(table, 0) != rows or dim(table, 1) < 1 or dim(arg(frame, ARG_NUM_ROWS), 0) != 1:
            return False
        if load_i32(attr(frame, ATTR_HAS_SINKS), 0) != 0 and dim(arg(frame, ARG_SINKS), 0) != dim(q, 1):
            return False
        if has_scales and not check_scales(frame):
            return False
        return data(pages) == data(ret(frame, RET_PAGES))  # else the write would not reach the result

    return check


def _make_walk(head_dim: int) -> Any:
    part_row_bytes = 4 * head_dim + 8

    @named(f"d{head_dim}")
    def shared_per_item(frame, record, place, target):
        """Segments per item of the shared unit that the member at `place` belongs to."""
        group = group_of(frame)
        unit_members = max(1, _UNIT_ROWS // group)
        run = load_i64(record, RECORD_RUN)
        count = min(unit_members, load_i64(record, RECORD_SIZE) - place // unit_members * unit_members)
        return _segments_per_item(run, run * SEGMENT * (_TOKEN_COST + count * group), target)

    @named(f"d{head_dim}")
    def walk_shared(frame, plan, items, target, counts):
        """Units and items of what rows share, one unit for up to _UNIT_ROWS query rows. They stand before all other
        items, which need nothing of them, because they are the longest."""
        rows, kv_heads, group = rows_in_use(frame), dim(arg(frame, ARG_K), 1), group_of(frame)
        unit_members, groups = max(1, _UNIT_ROWS // group), counts + _COUNT_BYTES
        for row in range(rows):
            record = record_of(groups, row)
            run, place = load_i64(record, RECORD_RUN), load_i64(record, RECORD_PLACE)
            if run == 0 or place % unit_members != 0:
                continue
            members = load_i64(record, RECORD_MEMBERS) + 8 * place
            count = min(unit_members, load_i64(record, RECORD_SIZE) - place)
            per_item = shared_per_item(frame, record, place, target)
            store_i64(counts, _C_ROWS, max(load_i64(counts, _C_ROWS), count * group))
            for head in range(kv_heads):
                if plan != 0:
                    unit = plan + PLAN_BYTES + load_i64(counts, _C_UNITS) * UNIT_BYTES
                    _put_unit(unit, row, head, 0, count, run * SEGMENT, 0, run * SEGMENT)
                    store_i64(unit, UNIT_MEMBERS, members)
                    store_i64(unit, UNIT_RECORDS, groups)
                    _put_items(items + load_i64(counts, _C_ITEMS) * ITEM_BYTES, unit, 0, run, per_item)
                _count(counts, _C_COST, run * SEGMENT * (_TOKEN_COST + count * group))
                _count(counts, _C_UNITS, 1)
                _count(counts, _C_ITEMS, (run + per_item - 1) // per_item)

    @named(f"d{head_dim}")
    def walk(frame, plan, target, counts):
        """Count units, items and bytes of partial results of the batch, splitting units that cost more than
        `target`; with a plan (not 0) also write them there. The last rows come first: they hold the chunks,
        and long items should start early."""
        rows, kv_heads, group = rows_in_use(frame), dim(arg(frame, ARG_K), 1), group_of(frame)
        starts, lengths = data(arg(frame, ARG_STARTS)), data(arg(frame, ARG_LENGTHS))
        capacity = dim(arg(frame, ARG_TABLE), 1) * page_size_of(frame)
        window = load_i32(attr(frame, ATTR_WINDOW), 0)
        unit_tokens = max(1, _UNIT_ROWS // group)
        items = parts = 0
        if plan != 0:
            items = load_i64(plan, PLAN_ITEMS_AT)
            parts = items + load_i64(counts, _C_ITEMS) * ITEM_BYTES
        for which in (_C_COST, _C_UNITS, _C_ITEMS, _C_PARTS, _C_ROWS):
            store_i64(counts, which, 0)
        walk_shared(frame, plan, items, target, counts)
        limit = dim(arg(frame, ARG_Q), 0)
        for row in range(rows - 1, -1, -1):
            record = record_of(counts + _COUNT_BYTES, row)
            run = load_i64(record, RECORD_RUN)
            begin = clamp(load_i32(starts, 4 * row), 0, limit)
            count = clamp(load_i32(starts, 4 * row + 4), begin, limit) - begin
            base = max(load_i32(lengths, 4 * row) - count, 0)
            for tile in range((count + unit_tokens - 1) // unit_tokens - 1, -1, -1):
                token = tile * unit_tokens
                tokens = min(unit_tokens, count - token)
                position = min(base + token, capacity - 1)
                end = min(base + token + tokens, capacity)
                first = max(0, position - window + 1) if window > 0 else 0
                num_rows = tokens * group
                first_segment, stop_segment = max(first // SEGMENT, run), (end - 1) // SEGMENT + 1
                cost = (end - max(first, run * SEGMENT) // TILE * TILE) * (_TOKEN_COST + num_rows)
                part_bytes = align(num_rows * part_row_bytes)
                segments = stop_segment - first_segment
                per_item = _segments_per_item(segments, cost, target)
                if run == 0 and (segments + per_item - 1) // per_item * part_bytes > _MAX_PART_BYTES:
                    per_item = segments
                pieces = (segments + per_item - 1) // per_item
                left = pieces
                if run > 0:
                    shared = shared_per_item(frame, record, load_i64(record, RECORD_PLACE), target)
                    left += (run + shared - 1) // shared
                store_i64(counts, _C_ROWS, max(load_i64(counts, _C_ROWS), num_rows))
                for head in range(kv_heads):
                    if plan != 0:
                        unit = plan + PLAN_BYTES + load_i64(counts, _C_UNITS) * UNIT_BYTES
                        _put_unit(unit, row, head, begin + token, tokens, position, first, end)
                        if left > 1:
                            store_i64(unit, UNIT_PARTS, parts + load_i64(counts, _C_PARTS))
                        store_i64(unit, UNIT_LEFT, left)
                        if run > 0 and head == 0:
                            store_i64(record, RECORD_UNIT, unit)
                        item = items + load_i64(counts, _C_ITEMS) * ITEM_BYTES
                        _put_items(item, unit, first_segment, stop_segment, per_item)
                    _count(counts, _C_COST, cost)
                    _count(counts, _C_UNITS, 1)
                    _count(counts, _C_ITEMS, pieces)
                    if left > 1:
                        _count(counts, _C_PARTS, (stop_segment - first // SEGMENT) * part_bytes)

    return walk


def make_plan(name: str, head_dim: int, kind: str, write: Any, kernel: SegmentKernel) -> Any:
    check, walk = _make_checks(name, head_dim, kind, kernel.page_multiple), _make_walk(head_dim)
    work_bytes = kernel.work_bytes

    @named(name)
    def scratch_bytes(rows):
        """One worker's space: queries, sums and a part's, their states, and work space; each a multiple of 64 bytes."""
        return 3 * rows * head_dim * 4 + 2 * align(rows * 8) + work_bytes(rows)

    @named(name)
    def plan(frame):
        if not check(frame):
            return BAD_ARGUMENTS
        rows = rows_in_use(frame)
        tokens, heads = dim(arg(frame, ARG_Q), 0), dim(arg(frame, ARG_Q), 1)
        total = clamp(load_i32(data(arg(frame, ARG_STARTS)), 4 * rows), 0, tokens)
        zero_bytes(data(ret(frame, RET_OUT)) + total * heads * head_dim * 4, (tokens - total) * heads * head_dim * 4)

        counts = malloc(_COUNT_BYTES + groups_bytes(rows))
        if counts == 0:
            return NO_MEMORY
        # Shared rows keep a partial result of every segment, so a very long run is shared in part only.
        part_bytes = align(group_of(frame) * (4 * head_dim + 8)) * max(1, rows * dim(arg(frame, ARG_K), 1))
        find_groups(frame, counts + _COUNT_BYTES, _MAX_PART_BYTES // part_bytes)
        walk(frame, 0, _NO_SPLIT, counts)
        cost = load_i64(counts, _C_COST)
        threads = max(1, min(num_threads(frame), cost // _MIN_ITEM_COST))
        target = _NO_SPLIT
        if threads > 1:
            target = max(_MIN_ITEM_COST, cost // (threads * _ITEMS_PER_THREAD))
            walk(frame, 0, target, counts)
        unit_rows = load_i64(counts, _C_ROWS)
        items_at = align(PLAN_BYTES + load_i64(counts, _C_UNITS) * UNIT_BYTES)
        parts_at = items_at + load_i64(counts, _C_ITEMS) * ITEM_BYTES
        scratch_at = align(parts_at + load_i64(counts, _C_PARTS))
        raw = malloc(scratch_at + threads * scratch_bytes(unit_rows) + 128)
        if raw == 0:
            free(counts)
            return NO_MEMORY
        plan_address = align(raw + 8)
        store_i64(plan_address, -8, raw)
        store_i64(plan_address, PLAN_ITEMS_AT, plan_address + items_at)
        walk(frame, plan_address, target, counts)

        writes = 0
        if threads > 1 and total > WRITE_TOKENS:
            writes = (total + WRITE_TOKENS - 1) // WRITE_TOKENS
        else:
            write(frame, 0, total)
        store_i64(plan_address, PLAN_ITEMS, writes + load_i64(counts, _C_ITEMS))
        store_i64(plan_address, PLAN_THREADS, threads)
        store_i64(plan_address, PLAN_WRITTEN, 0)
        store_i64(plan_address, PLAN_NUM_WRITES, writes)
        store_i64(plan_address, PLAN_TOTAL, total)
        store_i64(plan_address, PLAN_SCRATCH, plan_address + scratch_at)
        store_i64(plan_address, PLAN_SCRATCH_BYTES, scratch_bytes(unit_rows))
        store_i64(plan_address, PLAN_UNIT_ROWS, unit_rows)
        store_i64(plan_address, PLAN_COUNTS, counts)
        return plan_address

    return plan
