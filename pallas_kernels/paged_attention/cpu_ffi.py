"""Ragged paged attention on CPU: one FFI handler for decode rows, prefill chunks and any mixture.

The handler reads the filled part of the batch at run time, so padding of tokens, rows and page tables costs
nothing, and one compiled handler serves all head counts, page sizes, windows and caps; head_dim and the page
dtype are compiled in.

Work is cut into units: up to _UNIT_ROWS query rows (tokens x heads of one kv head) of one row. A unit walks its
context in segments of SEGMENT tokens that start at absolute positions; each segment is a softmax of its own,
and segments are merged in order. Long units are split over threads at segment boundaries and merged by
whoever finishes last, in the same order: the arithmetic of a query token never depends on the split, on the
other tokens, or on the number of threads, so every result is bitwise reproducible.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    F32,
    S32,
    arg,
    atomic_add,
    attr,
    data,
    dim,
    dtype,
    free,
    jit,
    load_f32,
    load_i32,
    load_i64,
    malloc,
    num_threads,
    rank,
    ret,
    store_i64,
    zero_bytes,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    BAD_ARGUMENTS,
    NO_MEMORY,
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
    register_handler,
    wait_for,
)
from jaxserve.pallas_kernels.cpu_ffi.support import has_wide_vectors
from jaxserve.pallas_kernels.cpu_ffi.vectors import ELEMENT_BYTES, LANES, MASKED
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import (
    MAX_BLOCK_ROWS,
    TILE,
    make_clear_row,
    make_finish_row,
    make_load_tokens,
    make_merge_row,
    make_product,
    make_scale_row,
    make_softmax_row,
    make_write_row,
)
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.ragged import RaggedBatch

SEGMENT = 256  # tokens per independent softmax; a multiple of TILE
_UNIT_ROWS = 96  # query rows per unit: enough to pay for laying out a tile, few enough to stay in L2
_WRITE_TOKENS = 64  # tokens per work item of the K/V write
_ITEMS_PER_THREAD = 4  # so that uneven items even out
# A unit of cost is roughly one query row against one context token, 2 ns.
_TOKEN_COST = 4  # laying out one context token, in the same unit
_MIN_ITEM_COST = 4096  # below this, handing an item to another thread costs more than it saves

# Arguments, results and attributes of the call.
_Q, _K, _V, _PAGES, _SLOTS, _STARTS, _LENGTHS, _TABLE, _NUM_ROWS, _SINKS = range(10)
_OUT, _PAGES_OUT = range(2)
_SCALE, _SOFTCAP, _WINDOW, _HAS_SINKS = range(4)  # sorted by name: a_scale, b_softcap, c_window, d_has_sinks

# The plan: counters, then units, items, parts and work space.
_WRITTEN = 64  # write items that are done; alone on its cache line
_NUM_WRITES, _TOTAL, _SCRATCH, _SCRATCH_BYTES, _UNIT_ROWS_MAX, _ITEMS_AT = 128, 136, 144, 152, 160, 168
_PLAN_BYTES = 192
# A unit: which query rows, where their context lies, and the state of its split.
_U_ROW, _U_HEAD, _U_TOKEN, _U_COUNT, _U_POSITION = 0, 8, 16, 24, 32
_U_FIRST, _U_END, _U_PARTS, _U_LEFT = 40, 48, 56, 64
_UNIT_BYTES = 128
# An item: a unit and the segments to compute.
_I_UNIT, _I_SEGMENT, _I_STOP = 0, 8, 16
_ITEM_BYTES = 32
# What a walk over the batch counts.
_C_COST, _C_UNITS, _C_ITEMS, _C_PARTS, _C_ROWS = 0, 8, 16, 24, 32
_NO_SPLIT = 1 << 62
_SCORE_BYTES = MAX_BLOCK_ROWS * TILE * 4
_MAX_PART_BYTES = 64 << 20


def paged_attention_cpu(
    q: jax.Array,  # [T, H, D] float32
    k: jax.Array,  # [T, KV, D] float32
    v: jax.Array,  # [T, KV, D] float32
    pages: jax.Array,  # [num_pages, KV, 2, page_size, D] float32 or bfloat16
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,  # [H] float32
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [T, H, D] float32, pages updated in place). Always deterministic."""
    name = _handler(spec.head_dim, np.dtype(pages.dtype).name)
    call = jax.ffi.ffi_call(
        name,
        (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(pages.shape, pages.dtype)),
        input_output_aliases={_PAGES: _PAGES_OUT},
    )
    out, pages = call(
        q, k, v, pages,
        batch.write_slot, batch.query_start, batch.seq_len, batch.page_table, batch.num_rows,
        jnp.zeros((1,), jnp.float32) if sinks is None else sinks,
        a_scale=np.float32(spec.scale),
        b_softcap=np.float32(spec.logit_softcap),
        c_window=np.int32(spec.sliding_window),
        d_has_sinks=np.int32(sinks is not None),
    )  # fmt: skip
    return out, pages


@functools.cache
def _handler(head_dim: int, kind: str) -> str:
    block_vectors = TILE // LANES if has_wide_vectors() else 1
    name = f"jaxserve_paged_attention_d{head_dim}_{kind}_b{block_vectors}"
    return register_handler(name, lambda: _make_handler(name, head_dim, kind, block_vectors))


@jit
def _clamp(value, low, high):
    return min(max(value, low), high)


@jit
def _rows_in_use(frame):
    return _clamp(load_i32(data(arg(frame, _NUM_ROWS)), 0), 0, dim(arg(frame, _LENGTHS), 0))


@jit
def _page_size(frame):
    return dim(arg(frame, _PAGES), 3)


@jit
def _group(frame):
    return dim(arg(frame, _Q), 1) // dim(arg(frame, _K), 1)


@jit
def _count(counts, which, value):
    store_i64(counts, which, load_i64(counts, which) + value)


@jit
def _align(value):
    return (value + 63) // 64 * 64


def _make_checks(head_dim: int, kind: str) -> Any:
    page_type = F32 if kind == "float32" else BF16

    @named(f"d{head_dim}_{kind}")
    def check(frame):
        """Whether types and shapes are what this handler was compiled for."""
        for i in range(10):
            expected = S32 if _SLOTS <= i <= _NUM_ROWS else F32
            if dtype(arg(frame, i)) != (page_type if i == _PAGES else expected):
                return False
        q, k, v, pages = arg(frame, _Q), arg(frame, _K), arg(frame, _V), arg(frame, _PAGES)
        if rank(q) != 3 or rank(k) != 3 or rank(v) != 3 or rank(pages) != 5:
            return False
        if dim(q, 2) != head_dim or dim(k, 2) != head_dim or dim(v, 2) != head_dim or dim(pages, 4) != head_dim:
            return False
        tokens, kv_heads = dim(q, 0), dim(k, 1)
        if dim(k, 0) != tokens or dim(v, 0) != tokens or dim(v, 1) != kv_heads or dim(pages, 1) != kv_heads:
            return False
        if kv_heads < 1 or dim(q, 1) % kv_heads != 0 or dim(pages, 2) != 2 or dim(pages, 0) < 1:
            return False
        rows, table = dim(arg(frame, _LENGTHS), 0), arg(frame, _TABLE)
        if dim(arg(frame, _SLOTS), 0) != tokens or dim(arg(frame, _STARTS), 0) != rows + 1:
            return False
        if rank(table) != 2 or dim(table, 0) != rows or dim(table, 1) < 1 or dim(arg(frame, _NUM_ROWS), 0) != 1:
            return False
        if load_i32(attr(frame, _HAS_SINKS), 0) != 0 and dim(arg(frame, _SINKS), 0) != dim(q, 1):
            return False
        return data(pages) == data(ret(frame, _PAGES_OUT))  # else the write would not reach the result

    return check


def _make_write(head_dim: int, kind: str) -> Any:
    write_row = make_write_row(head_dim, kind)
    row_bytes = head_dim * ELEMENT_BYTES[kind]

    @named(f"d{head_dim}_{kind}")
    def write(frame, first, last):
        """K and V of tokens first : last into their page slots; slots out of range are dropped."""
        kv_heads, page_size = dim(arg(frame, _K), 1), _page_size(frame)
        k, v, pages = data(arg(frame, _K)), data(arg(frame, _V)), data(arg(frame, _PAGES))
        num_slots = dim(arg(frame, _PAGES), 0) * page_size
        for token in range(first, last):
            slot = load_i32(data(arg(frame, _SLOTS)), 4 * token)
            if slot < 0 or slot >= num_slots:
                continue
            page, offset = slot // page_size, slot % page_size
            for head in range(kv_heads):
                target = pages + ((page * kv_heads + head) * 2 * page_size + offset) * row_bytes
                source = (token * kv_heads + head) * head_dim * 4
                write_row(k + source, target)
                write_row(v + source, target + page_size * row_bytes)

    return write


def _make_walk(head_dim: int) -> Any:
    part_row_bytes = 4 * head_dim + 8

    @named(f"d{head_dim}")
    def walk(frame, plan, target, counts):
        """Count units, items and bytes of partial results of the batch, splitting units that cost more than
        `target`; with a plan (not 0) also write them there. The last rows come first: they hold the chunks,
        and long items should start early."""
        rows, kv_heads, group = _rows_in_use(frame), dim(arg(frame, _K), 1), _group(frame)
        starts, lengths = data(arg(frame, _STARTS)), data(arg(frame, _LENGTHS))
        capacity = dim(arg(frame, _TABLE), 1) * _page_size(frame)
        window = load_i32(attr(frame, _WINDOW), 0)
        unit_tokens = max(1, _UNIT_ROWS // group)
        units = plan + _PLAN_BYTES
        items = parts = np.int64(0)
        if plan != 0:
            items = load_i64(plan, _ITEMS_AT)
            parts = items + load_i64(counts, _C_ITEMS) * _ITEM_BYTES
        for which in (_C_COST, _C_UNITS, _C_ITEMS, _C_PARTS, _C_ROWS):
            store_i64(counts, which, 0)
        limit = dim(arg(frame, _Q), 0)
        for row in range(rows - 1, -1, -1):
            begin = _clamp(load_i32(starts, 4 * row), 0, limit)
            count = _clamp(load_i32(starts, 4 * row + 4), begin, limit) - begin
            base = max(load_i32(lengths, 4 * row) - count, 0)
            for tile in range((count + unit_tokens - 1) // unit_tokens - 1, -1, -1):
                token = tile * unit_tokens
                tokens = min(unit_tokens, count - token)
                position = min(base + token, capacity - 1)
                end = min(base + token + tokens, capacity)
                first = max(0, position - window + 1) if window > 0 else 0
                num_rows = tokens * group
                cost = (end - first // TILE * TILE) * (_TOKEN_COST + num_rows)
                segments = (end - 1) // SEGMENT - first // SEGMENT + 1
                part_bytes = _align(num_rows * part_row_bytes)
                pieces = min(segments, (cost + target - 1) // target)
                if pieces * part_bytes > _MAX_PART_BYTES:
                    pieces = 1
                per_item = (segments + pieces - 1) // pieces
                pieces = (segments + per_item - 1) // per_item
                store_i64(counts, _C_ROWS, max(load_i64(counts, _C_ROWS), num_rows))
                for head in range(kv_heads):
                    if plan != 0:
                        unit = units + load_i64(counts, _C_UNITS) * _UNIT_BYTES
                        store_i64(unit, _U_ROW, row)
                        store_i64(unit, _U_HEAD, head)
                        store_i64(unit, _U_TOKEN, begin + token)
                        store_i64(unit, _U_COUNT, tokens)
                        store_i64(unit, _U_POSITION, position)
                        store_i64(unit, _U_FIRST, first)
                        store_i64(unit, _U_END, end)
                        store_i64(unit, _U_PARTS, parts + load_i64(counts, _C_PARTS) if pieces > 1 else 0)
                        store_i64(unit, _U_LEFT, pieces)
                        item = items + load_i64(counts, _C_ITEMS) * _ITEM_BYTES
                        for piece in range(pieces):
                            segment = first // SEGMENT + piece * per_item
                            store_i64(item, _I_UNIT, unit)
                            store_i64(item, _I_SEGMENT, segment)
                            store_i64(item, _I_STOP, min(segment + per_item, (end - 1) // SEGMENT + 1))
                            item += _ITEM_BYTES
                    _count(counts, _C_COST, cost)
                    _count(counts, _C_UNITS, 1)
                    _count(counts, _C_ITEMS, pieces)
                    if pieces > 1:
                        _count(counts, _C_PARTS, segments * part_bytes)

    return walk


def _make_plan(head_dim: int, kind: str, write: Any) -> Any:
    check, walk = _make_checks(head_dim, kind), _make_walk(head_dim)

    @named(f"d{head_dim}_{kind}")
    def plan(frame):
        if not check(frame):
            return BAD_ARGUMENTS
        rows = _rows_in_use(frame)
        tokens, heads = dim(arg(frame, _Q), 0), dim(arg(frame, _Q), 1)
        total = _clamp(load_i32(data(arg(frame, _STARTS)), 4 * rows), 0, tokens)
        zero_bytes(data(ret(frame, _OUT)) + total * heads * head_dim * 4, (tokens - total) * heads * head_dim * 4)

        counts = malloc(64)
        if counts == 0:
            return NO_MEMORY
        walk(frame, 0, _NO_SPLIT, counts)
        cost = load_i64(counts, _C_COST)
        threads = max(1, min(num_threads(frame), cost // _MIN_ITEM_COST))
        target = _NO_SPLIT
        if threads > 1:
            target = max(_MIN_ITEM_COST, cost // (threads * _ITEMS_PER_THREAD))
            walk(frame, 0, target, counts)
        unit_rows = load_i64(counts, _C_ROWS)
        items_at = _align(_PLAN_BYTES + load_i64(counts, _C_UNITS) * _UNIT_BYTES)
        parts_at = items_at + load_i64(counts, _C_ITEMS) * _ITEM_BYTES
        scratch_at = _align(parts_at + load_i64(counts, _C_PARTS))
        scratch_bytes = _scratch_bytes(unit_rows, head_dim)
        raw = malloc(scratch_at + threads * scratch_bytes + 128)
        if raw == 0:
            free(counts)
            return NO_MEMORY
        plan_address = _align(raw + 8)
        store_i64(plan_address, -8, raw)
        store_i64(plan_address, _ITEMS_AT, plan_address + items_at)
        walk(frame, plan_address, target, counts)

        writes = 0
        if threads > 1 and total > _WRITE_TOKENS:
            writes = (total + _WRITE_TOKENS - 1) // _WRITE_TOKENS
        else:
            write(frame, 0, total)
        store_i64(plan_address, PLAN_ITEMS, writes + load_i64(counts, _C_ITEMS))
        store_i64(plan_address, PLAN_THREADS, threads)
        store_i64(plan_address, _WRITTEN, 0)
        store_i64(plan_address, _NUM_WRITES, writes)
        store_i64(plan_address, _TOTAL, total)
        store_i64(plan_address, _SCRATCH, plan_address + scratch_at)
        store_i64(plan_address, _SCRATCH_BYTES, scratch_bytes)
        store_i64(plan_address, _UNIT_ROWS_MAX, unit_rows)
        free(counts)
        return plan_address

    return plan


# One worker's space, in this order; each block a multiple of 64 bytes.
@jit
def _scratch_bytes(rows, head_dim):
    queries, states = rows * head_dim * 4, _align(rows * 8)
    return 3 * queries + _SCORE_BYTES + 2 * TILE * head_dim * 4 + 2 * states + 16 * TILE


def _make_segment(head_dim: int, kind: str, block_vectors: int) -> Any:
    tag = f"d{head_dim}_{kind}_b{block_vectors}"
    load_tokens, softmax_row = make_load_tokens(head_dim, kind), make_softmax_row(head_dim)
    clear_row = make_clear_row(head_dim)
    score_product = make_product(TILE // LANES, block_vectors)
    value_product = make_product(head_dim // LANES, min(block_vectors, head_dim // LANES))
    row_bytes, head_bytes = head_dim * ELEMENT_BYTES[kind], head_dim * 4

    @named(tag)
    def find_tokens(frame, unit, start, addresses):
        """Addresses of the K rows of TILE tokens from `start` on. Tokens outside the unit's context, whose slots
        may never have been written, read the dummy page: their scores are masked, and sums leave them out."""
        page_size, kv_heads = _page_size(frame), dim(arg(frame, _K), 1)
        num_pages, width = dim(arg(frame, _PAGES), 0), dim(arg(frame, _TABLE), 1)
        table = data(arg(frame, _TABLE)) + load_i64(unit, _U_ROW) * width * 4
        pages, head = data(arg(frame, _PAGES)), load_i64(unit, _U_HEAD)
        first, end = load_i64(unit, _U_FIRST), load_i64(unit, _U_END)
        position = start
        while position < start + TILE:
            stop = min(start + TILE, (position // page_size + 1) * page_size)
            if position >= end or stop <= first:
                for p in range(position, stop):
                    store_i64(addresses, 8 * (p - start), pages)
            else:
                # Clamped: a damaged table must not crash the process.
                page = _clamp(load_i32(table, 4 * (position // page_size)), 0, num_pages - 1)
                base = pages + ((page * kv_heads + head) * 2 * page_size) * row_bytes
                for p in range(position, stop):
                    inside = first <= p < end
                    store_i64(addresses, 8 * (p - start), base + (p % page_size) * row_bytes if inside else pages)
            position = stop

    @named(tag)
    def segment(frame, unit, index, scratch, unit_rows, sums, states):
        """The softmax of one segment for all query rows of the unit, into sums [rows, D] and states [rows, 2].
        The scaled queries lie at the start of `scratch`."""
        scores = scratch + 3 * unit_rows * head_bytes
        keys = scores + _SCORE_BYTES
        values = keys + TILE * head_bytes
        here = values + TILE * head_bytes + 2 * _align(unit_rows * 8)
        ahead = here + 8 * TILE
        group, page_size = _group(frame), _page_size(frame)
        cap, window = load_f32(attr(frame, _SOFTCAP), 0), load_i32(attr(frame, _WINDOW), 0)
        position, rows = load_i64(unit, _U_POSITION), load_i64(unit, _U_COUNT) * group
        first, end = load_i64(unit, _U_FIRST), load_i64(unit, _U_END)
        for r in range(rows):
            clear_row(sums + r * head_bytes, states + 8 * r)
        start = max(index * SEGMENT, first // TILE * TILE)
        find_tokens(frame, unit, start, here)
        for tile in range(start, min((index + 1) * SEGMENT, end), TILE):
            find_tokens(frame, unit, tile + TILE, ahead)
            for u in range(0, TILE, LANES):
                if tile + u < end and tile + u + LANES > first:
                    load_tokens(
                        here + 8 * u, ahead + 8 * u, page_size * row_bytes, keys + 4 * u, values + u * head_bytes
                    )
            for r in range(0, rows, MAX_BLOCK_ROWS):
                block = min(MAX_BLOCK_ROWS, rows - r)
                # Tokens that some row of the block sees; rows are ordered by token.
                low = max(0, position + r // group - window + 1 - tile) if window > 0 else 0
                high = min(TILE, position + (r + block - 1) // group + 1 - tile)
                if high <= low:
                    continue
                score_product(
                    block, scratch + r * head_bytes, head_bytes, keys, TILE * 4, scores, TILE * 4, 0, head_dim, 0
                )
                for i in range(block):
                    at = position + (r + i) // group - tile
                    softmax_row(
                        scores + i * TILE * 4, sums + (r + i) * head_bytes, states + 8 * (r + i),
                        max(0, at - window + 1) if window > 0 else 0, min(TILE, at + 1), cap,
                    )  # fmt: skip
                value_product(
                    block, scores, TILE * 4, values, head_bytes, sums + r * head_bytes, head_bytes, low, high, 1
                )
            here, ahead = ahead, here

    return segment


def _make_handler(name: str, head_dim: int, kind: str, block_vectors: int) -> tuple[Any, Any, Any]:
    write = _make_write(head_dim, kind)
    plan, segment = _make_plan(head_dim, kind, write), _make_segment(head_dim, kind, block_vectors)
    clear_row, merge_row = make_clear_row(head_dim), make_merge_row(head_dim)
    scale_row, finish_row = make_scale_row(head_dim), make_finish_row(head_dim)
    head_bytes = head_dim * 4

    @named(name)
    def row_offset(frame, unit, r):
        """Bytes from the start of q (and of the result) to query row r of the unit."""
        group = _group(frame)
        token = load_i64(unit, _U_TOKEN) + r // group
        return (token * dim(arg(frame, _Q), 1) + load_i64(unit, _U_HEAD) * group + r % group) * head_bytes

    @named(name)
    def finish_unit(frame, unit, sums, states):
        group = _group(frame)
        for r in range(load_i64(unit, _U_COUNT) * group):
            sink = np.float32(MASKED)
            if load_i32(attr(frame, _HAS_SINKS), 0) != 0:
                sink = load_f32(data(arg(frame, _SINKS)), 4 * (load_i64(unit, _U_HEAD) * group + r % group))
            target = data(ret(frame, _OUT)) + row_offset(frame, unit, r)
            finish_row(sums + r * head_bytes, states + 8 * r, sink, target)

    @named(name)
    def merge(rows, sums, states, part, part_states):
        for r in range(rows):
            merge_row(sums + r * head_bytes, states + 8 * r, part + r * head_bytes, part_states + 8 * r)

    @named(name)
    def body(frame, plan_address, i, worker):
        writes = load_i64(plan_address, _NUM_WRITES)
        if i < writes:
            first = i * _WRITE_TOKENS
            write(frame, first, min(first + _WRITE_TOKENS, load_i64(plan_address, _TOTAL)))
            atomic_add(plan_address + _WRITTEN, 1)
            return
        item = load_i64(plan_address, _ITEMS_AT) + (i - writes) * _ITEM_BYTES
        unit = load_i64(item, _I_UNIT)
        unit_rows = load_i64(plan_address, _UNIT_ROWS_MAX)
        scratch = load_i64(plan_address, _SCRATCH) + worker * load_i64(plan_address, _SCRATCH_BYTES)
        sums = scratch + unit_rows * head_bytes
        part = sums + unit_rows * head_bytes
        states = part + unit_rows * head_bytes + _SCORE_BYTES + 2 * TILE * head_bytes
        part_states = states + _align(unit_rows * 8)

        rows = load_i64(unit, _U_COUNT) * _group(frame)
        scale = load_f32(attr(frame, _SCALE), 0)
        for r in range(rows):
            scale_row(data(arg(frame, _Q)) + row_offset(frame, unit, r), scratch + r * head_bytes, scale)
        wait_for(plan_address + _WRITTEN, writes)  # rows may share pages, so all of them wait for all writes

        parts = load_i64(unit, _U_PARTS)
        first = load_i64(unit, _U_FIRST) // SEGMENT
        stop = (load_i64(unit, _U_END) - 1) // SEGMENT + 1
        part_bytes = _align(rows * (head_bytes + 8))
        if parts == 0:
            for r in range(rows):
                clear_row(sums + r * head_bytes, states + 8 * r)
        for index in range(load_i64(item, _I_SEGMENT), load_i64(item, _I_STOP)):
            if parts != 0:
                part = parts + (index - first) * part_bytes
                part_states = part + rows * head_bytes
            segment(frame, unit, index, scratch, unit_rows, part, part_states)
            if parts == 0:
                merge(rows, sums, states, part, part_states)
        if parts != 0:
            if atomic_add(unit + _U_LEFT, -1) != 1:
                return
            for r in range(rows):
                clear_row(sums + r * head_bytes, states + 8 * r)
            for index in range(stop - first):
                part = parts + index * part_bytes
                merge(rows, sums, states, part, part + rows * head_bytes)
        finish_unit(frame, unit, sums, states)

    @named(name)
    def finish(frame, plan_address):
        free(load_i64(plan_address, -8))

    return plan, body, finish
