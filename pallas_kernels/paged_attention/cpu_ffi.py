"""Ragged paged attention on CPU: one FFI handler for decode rows, prefill chunks and any mixture.

The handler reads the filled part of the batch at run time, so padding of tokens, rows and page tables costs
nothing, and one compiled handler serves all head counts, page sizes, windows and caps; head_dim and the page
dtype are compiled in.

Work is cut into units: up to _UNIT_ROWS query rows (tokens x heads of one kv head) of one row. A unit walks its
context in segments of SEGMENT tokens that start at absolute positions; each segment is a softmax of its own,
and segments are merged in order. Long units are split over threads at segment boundaries and merged by
whoever finishes last, in the same order: the arithmetic of a query token never depends on the split, on the
other tokens, or on the number of threads, so every result is bitwise reproducible.

Decode rows whose page tables begin with the same pages compute the segments that lie there together, as one unit
(cpu_ffi_cascade.py), and take them from it as parts: the same bits for a fraction of the work.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    arg,
    atomic_add,
    attr,
    data,
    dim,
    free,
    jit,
    load_f32,
    load_i32,
    load_i64,
    ret,
    stack,
    store_f32,
    store_i64,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
    register_handler,
    wait_for,
)
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot, has_bf16_tiles, has_wide_vectors
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import ROWS, STEP
from jaxserve.pallas_kernels.cpu_ffi.vectors import ELEMENT_BYTES, LANES, MASKED, exp_in_place
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_cascade import RECORD_UNIT, record_of
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_layout import (
    ARG_K,
    ARG_PAGES,
    ARG_Q,
    ARG_SCALES,
    ARG_SINKS,
    ARG_SLOTS,
    ARG_V,
    ATTR_HAS_SINKS,
    ATTR_SCALE,
    ITEM_BYTES,
    ITEM_SEGMENT,
    ITEM_STOP,
    ITEM_UNIT,
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
    UNIT_RECORDS,
    UNIT_TOKEN,
    WRITE_TOKENS,
    align,
    group_of,
    page_size_of,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_plan import make_plan
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_segment import (
    SegmentKernel,
    make_pair_kernel,
    make_tile_kernel,
    make_vector_kernel,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import (
    TILE,
    make_clear_row,
    make_finish_row,
    make_merge_row,
    make_scale_row,
    make_write_row,
)
from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES, Pages, QuantizedPages, code_kind
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.ragged import RaggedBatch

_LANE_BYTES = LANES * 4


def paged_attention_cpu(
    q: jax.Array,  # [T, H, D] float32
    k: jax.Array,  # [T, KV, D] float32
    v: jax.Array,  # [T, KV, D] float32
    pages: Pages,  # [num_pages, KV, 2, page_size, D] float32, bfloat16 or codes
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    cascade: bool = True,
    sinks: jax.Array | None = None,  # [H] float32
) -> tuple[jax.Array, Pages]:
    """Returns (out [T, H, D] float32, pages updated in place). Always deterministic, with `cascade` or without."""
    is_quantized = isinstance(pages, QuantizedPages)
    parts, kind = [pages], np.dtype(pages.dtype).name
    aliases = {ARG_PAGES: RET_PAGES}
    if is_quantized:
        parts, kind = [pages.codes, pages.scales], code_kind(pages.dtype)
        aliases[ARG_SCALES] = RET_SCALES
    call = jax.ffi.ffi_call(
        _handler(spec.head_dim, kind, parts[0].shape[3]),
        [jax.ShapeDtypeStruct(q.shape, jnp.float32), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in parts)],
        input_output_aliases=aliases,
    )
    out, *parts = call(
        q, k, v, parts[0],
        batch.write_slot, batch.query_start, batch.seq_len, batch.page_table, batch.num_rows,
        jnp.zeros((1,), jnp.float32) if sinks is None else sinks,
        *parts[1:],
        a_scale=np.float32(spec.scale),
        b_softcap=np.float32(spec.logit_softcap),
        c_window=np.int32(spec.sliding_window),
        d_has_sinks=np.int32(sinks is not None),
        e_cascade=np.int32(cascade),
    )  # fmt: skip
    return out, QuantizedPages(*parts) if is_quantized else parts[0]


def form_of(head_dim: int, kind: str, page_size: int) -> str:
    """How pages of `kind` are computed with on this CPU: in "tiles" of its registers, by "pairs" of bfloat16, or by
    other "vectors"."""
    if kind == "bfloat16" and head_dim % STEP == 0 and page_size % ROWS == 0 and has_bf16_dot():
        return "tiles" if has_bf16_tiles() else "pairs"
    return "vectors"


@functools.cache
def _handler(head_dim: int, kind: str, page_size: int) -> str:
    form, block_vectors = form_of(head_dim, kind, page_size), TILE // LANES if has_wide_vectors() else 1
    name = f"jaxserve_paged_attention_d{head_dim}_{kind}_b{block_vectors}_{form}"

    def make_kernel() -> SegmentKernel:
        if form == "tiles":
            return make_tile_kernel(head_dim)
        if form == "pairs":
            return make_pair_kernel(head_dim, block_vectors)
        return make_vector_kernel(head_dim, kind, block_vectors)

    return register_handler(name, lambda: _make_handler(name, head_dim, kind, make_kernel()))


def _make_write(head_dim: int, kind: str) -> Any:
    write_row = make_write_row(head_dim, kind)
    row_bytes, has_scales = head_dim * ELEMENT_BYTES[kind], kind in CODES

    @named(f"d{head_dim}_{kind}")
    def write(frame, first, last):
        """K and V of tokens first : last into their page slots; slots out of range are dropped."""
        kv_heads, page_size = dim(arg(frame, ARG_K), 1), page_size_of(frame)
        k, v, pages = data(arg(frame, ARG_K)), data(arg(frame, ARG_V)), data(arg(frame, ARG_PAGES))
        num_slots = dim(arg(frame, ARG_PAGES), 0) * page_size
        scales = data(arg(frame, ARG_SCALES)) if has_scales else 0
        for token in range(first, last):
            slot = load_i32(data(arg(frame, ARG_SLOTS)), 4 * token)
            if slot < 0 or slot >= num_slots:
                continue
            page, offset = slot // page_size, slot % page_size
            for head in range(kv_heads):
                row = (page * kv_heads + head) * 2 * page_size + offset
                source = (token * kv_heads + head) * head_dim * 4
                write_row(k + source, pages + row * row_bytes, scales + row * 4)
                row += page_size
                write_row(v + source, pages + row * row_bytes, scales + row * 4)

    return write


@jit
def member_unit(unit, place):
    """The unit, of the same kv head, of the row at `place` in a shared unit."""
    record = record_of(load_i64(unit, UNIT_RECORDS), load_i64(load_i64(unit, UNIT_MEMBERS), 8 * place))
    return load_i64(record, RECORD_UNIT) + load_i64(unit, UNIT_HEAD) * UNIT_BYTES


def _make_handler(name: str, head_dim: int, kind: str, kernel: SegmentKernel) -> tuple[Any, Any, Any]:
    write = _make_write(head_dim, kind)
    plan = make_plan(name, head_dim, kind, write, kernel)
    prepare, segment, finish_segments = kernel.prepare, kernel.segment, kernel.finish
    clear_row, merge_row = make_clear_row(head_dim), make_merge_row(head_dim)
    scale_row, finish_row = make_scale_row(head_dim), make_finish_row(head_dim)
    head_bytes = head_dim * 4

    @named(name)
    def token_offset(frame, unit, i):
        """Bytes from the start of q (and of the result) to the rows of token i of the unit, which lie together."""
        token = load_i64(unit, UNIT_TOKEN) + i
        if load_i64(unit, UNIT_MEMBERS) != 0:
            token = load_i64(member_unit(unit, i), UNIT_TOKEN)
        return (token * dim(arg(frame, ARG_Q), 1) + load_i64(unit, UNIT_HEAD) * group_of(frame)) * head_bytes

    @named(name)
    def finish_unit(frame, unit, sums, states):
        group, sink = group_of(frame), np.float32(MASKED)
        has_sinks, first = load_i32(attr(frame, ATTR_HAS_SINKS), 0) != 0, load_i64(unit, UNIT_HEAD) * group
        for i in range(load_i64(unit, UNIT_COUNT)):
            target = data(ret(frame, RET_OUT)) + token_offset(frame, unit, i)
            for r in range(group):
                if has_sinks:
                    sink = load_f32(data(arg(frame, ARG_SINKS)), 4 * (first + r))
                finish_row(sums, states, sink, target + r * head_bytes)
                sums, states = sums + head_bytes, states + 8

    @named(name)
    def clear(rows, sums, states):
        for r in range(rows):
            clear_row(sums + r * head_bytes, states + 8 * r)

    @named(name)
    def merge(rows, sums, states, part, part_states):
        keep, take = stack(_LANE_BYTES), stack(_LANE_BYTES)
        for first in range(0, rows, LANES):
            count = min(LANES, rows - first)
            for i in range(count):
                r = first + i
                top, other = load_f32(states, 8 * r), load_f32(part_states, 8 * r)
                highest = top if top > other else other
                store_f32(keep, 4 * i, top - highest)
                store_f32(take, 4 * i, other - highest)
                store_f32(states, 8 * r, highest)
            exp_in_place(keep)
            exp_in_place(take)
            for i in range(count):
                r = first + i
                merge_row(
                    sums + r * head_bytes, states + 8 * r, part + r * head_bytes, part_states + 8 * r,
                    load_f32(keep, 4 * i), load_f32(take, 4 * i),
                )  # fmt: skip

    @named(name)
    def finish_part(frame, unit, sums, states):
        """One of the items that compute a unit's segments is done; the last one merges them all, in order."""
        if atomic_add(unit + UNIT_LEFT, -1) != 1:
            return
        rows = load_i64(unit, UNIT_COUNT) * group_of(frame)
        segments = (load_i64(unit, UNIT_END) - 1) // SEGMENT + 1 - load_i64(unit, UNIT_FIRST) // SEGMENT
        part_bytes = align(rows * (head_bytes + 8))
        clear(rows, sums, states)
        for index in range(segments):
            part = load_i64(unit, UNIT_PARTS) + index * part_bytes
            merge(rows, sums, states, part, part + rows * head_bytes)
        finish_unit(frame, unit, sums, states)

    @named(name)
    def hand_out(frame, unit, index, part, part_states):
        """A segment of a shared unit, to the parts of its members."""
        group = group_of(frame)
        part_bytes = align(group * (head_bytes + 8))
        for r in range(load_i64(unit, UNIT_COUNT) * group):
            target = load_i64(member_unit(unit, r // group), UNIT_PARTS) + index * part_bytes
            scale_row(part + r * head_bytes, target + r % group * head_bytes, np.float32(1.0))
            store_i64(target + group * head_bytes, 8 * (r % group), load_i64(part_states, 8 * r))

    @named(name)
    def compute(frame, item, following, queries, unit_rows, plan_address):
        sums = queries + unit_rows * head_bytes
        part = sums + unit_rows * head_bytes
        states = part + unit_rows * head_bytes
        part_states = states + align(unit_rows * 8)
        work = part_states + align(unit_rows * 8)
        unit = load_i64(item, ITEM_UNIT)
        group, scale = group_of(frame), load_f32(attr(frame, ATTR_SCALE), 0)
        rows = load_i64(unit, UNIT_COUNT) * group
        for i in range(load_i64(unit, UNIT_COUNT)):
            source, target = data(arg(frame, ARG_Q)) + token_offset(frame, unit, i), queries + i * group * head_bytes
            for r in range(group):
                scale_row(source + r * head_bytes, target + r * head_bytes, scale)
        prepare(frame, unit, load_i64(item, ITEM_SEGMENT), queries, work)
        # Rows may share pages, so all of them wait for all writes.
        wait_for(plan_address + PLAN_WRITTEN, load_i64(plan_address, PLAN_NUM_WRITES))

        parts, is_shared = load_i64(unit, UNIT_PARTS), load_i64(unit, UNIT_MEMBERS) != 0
        first = load_i64(unit, UNIT_FIRST) // SEGMENT
        clear(rows, sums, states)
        for index in range(load_i64(item, ITEM_SEGMENT), load_i64(item, ITEM_STOP)):
            if parts != 0:
                part = parts + (index - first) * align(rows * (head_bytes + 8))
                part_states = part + rows * head_bytes
            is_last = index + 1 == load_i64(item, ITEM_STOP)
            segment(frame, unit, index, queries, work, part, part_states, following if is_last else 0)
            if is_shared:
                hand_out(frame, unit, index, part, part_states)
            elif parts == 0:
                merge(rows, sums, states, part, part_states)
        finish_segments()
        if is_shared:
            for place in range(load_i64(unit, UNIT_COUNT)):
                finish_part(frame, member_unit(unit, place), sums, states)
        elif parts != 0:
            finish_part(frame, unit, sums, states)
        else:
            finish_unit(frame, unit, sums, states)

    @named(name)
    def body(frame, plan_address, i, worker):
        writes = load_i64(plan_address, PLAN_NUM_WRITES)
        if i < writes:
            first = i * WRITE_TOKENS
            write(frame, first, min(first + WRITE_TOKENS, load_i64(plan_address, PLAN_TOTAL)))
            atomic_add(plan_address + PLAN_WRITTEN, 1)
            return
        item = load_i64(plan_address, PLAN_ITEMS_AT) + (i - writes) * ITEM_BYTES
        scratch = load_i64(plan_address, PLAN_SCRATCH) + worker * load_i64(plan_address, PLAN_SCRATCH_BYTES)
        # What this thread is likely to take next, if all items are alike.
        following = i + load_i64(plan_address, PLAN_THREADS)
        after = item + (following - i) * ITEM_BYTES if following < load_i64(plan_address, PLAN_ITEMS) else 0
        compute(frame, item, after, scratch, load_i64(plan_address, PLAN_UNIT_ROWS), plan_address)

    @named(name)
    def finish(frame, plan_address):
        free(load_i64(plan_address, PLAN_COUNTS))
        free(load_i64(plan_address, -8))

    return plan, body, finish
