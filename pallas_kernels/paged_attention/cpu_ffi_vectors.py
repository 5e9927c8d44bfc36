"""The inner loops of CPU paged attention: one tile of context against some query rows.

A query row is one query head of one token. Tiles hold TILE tokens; within a tile the keys lie transposed
([head_dim, TILE]) and the values straight ([TILE, head_dim]), both float32, so that scores and sums are matrix
products whose every element is summed in one order: over head_dim, over tokens. That order is the same for any
number of rows taken at once, which is what makes a token's result independent of its neighbours.
"""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I32, I64
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    ELEMENT_BYTES,
    INT_VECTOR,
    LANES,
    MASKED,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from llvmlite import ir
from numba import types
from numba.core import cgutils

TILE = 64  # context tokens per tile
MAX_BLOCK_ROWS = 6  # query rows per register block
_INT, _FLOAT = types.intp, types.float32


def make_write_row(head_dim: int, kind: str) -> Any:
    """write_row(source float32, target): one token's K or V of one head, as pages hold it."""

    def emit(e: Emitter, source: ir.Value, target: ir.Value) -> None:
        size = ELEMENT_BYTES[kind]
        for d in range(0, head_dim, LANES):
            e.store_as(e.load(e.at(source, 4 * d)), e.at(target, size * d), kind)

    return void_intrinsic((_INT, _INT), emit)


def make_scale_row(head_dim: int) -> Any:
    """scale_row(source, target, factor): a query row times the attention scale."""

    def emit(e: Emitter, source: ir.Value, target: ir.Value, factor: ir.Value) -> None:
        wide = e.splat(factor)
        for d in range(0, head_dim, LANES):
            e.store(e.b.fmul(e.load(e.at(source, 4 * d)), wide), e.at(target, 4 * d))

    return void_intrinsic((_INT, _INT, _FLOAT), emit)


def make_load_tokens(head_dim: int, kind: str) -> Any:
    """load_tokens(addresses, ahead, value_offset, keys, values): 16 tokens into a tile.

    addresses, ahead   16 addresses of K rows: of these tokens, and of those to fetch for the next tile
    value_offset       from a token's K row to its V row
    keys, values       where the 16 tokens start in the tile: column of keys, row of values
    """
    size = ELEMENT_BYTES[kind]
    line = 64 // size  # elements per cache line

    def emit(e: Emitter, addresses, ahead, value_offset, keys, values) -> None:
        b = e.b
        rows = [e.load(e.at(addresses, 8 * i), I64, 8) for i in range(LANES)]
        nexts = [e.load(e.at(ahead, 8 * i), I64, 8) for i in range(LANES)]
        paired = kind == "bfloat16" and head_dim % (2 * LANES) == 0
        step = 2 * LANES if paired else LANES
        with emit_loop(e, 0, head_dim, step) as (d, _):
            offset = b.mul(d, e.const(size))
            target = b.add(keys, b.mul(d, e.const(4 * TILE)))
            with b.if_then(b.icmp_unsigned("==", b.and_(d, e.const(line - 1)), e.const(0))):
                for address in nexts:
                    e.prefetch(b.add(address, offset))
            if paired:
                # Two neighbouring dims travel as one 32-bit lane: half the shuffles.
                columns = e.transpose([e.load(b.add(row, offset), INT_VECTOR, 2) for row in rows])
                high = ir.Constant(INT_VECTOR, [-65536] * LANES)
                for i, pair in enumerate(columns):
                    even = b.bitcast(b.shl(pair, ir.Constant(INT_VECTOR, [16] * LANES)), VECTOR)
                    e.store(even, e.at(target, 8 * i * TILE))
                    e.store(b.bitcast(b.and_(pair, high), VECTOR), e.at(target, (8 * i + 4) * TILE))
            else:
                columns = e.transpose([e.load_as_float(b.add(row, offset), kind) for row in rows])
                for i, column in enumerate(columns):
                    e.store(column, e.at(target, 4 * i * TILE))
        with emit_loop(e, 0, head_dim, LANES) as (d, _):
            offset = b.add(value_offset, b.mul(d, e.const(size)))
            target = b.add(values, b.mul(d, e.const(4)))
            with b.if_then(b.icmp_unsigned("==", b.and_(d, e.const(line - 1)), e.const(0))):
                for address in nexts:
                    e.prefetch(b.add(address, offset))
            for i, row in enumerate(rows):
                e.store(e.load_as_float(b.add(row, offset), kind), e.at(target, 4 * i * head_dim))

    return void_intrinsic((_INT,) * 5, emit)


def make_product(vectors: int, block_vectors: int) -> Any:
    """product(rows, a, a_stride, b, b_stride, c, c_stride, first, last, add):
    c[rows, 16 * vectors] = (add ? c : 0) + a[rows, first:last] @ b[first:last, 16 * vectors]

    rows is 1 to MAX_BLOCK_ROWS; strides are in bytes. Columns are taken block_vectors at a time. Every element
    is one chain of fused multiply-adds in the order of the inner index, whatever the number of rows and columns
    computed with it.
    """

    def emit(e: Emitter, rows, a, a_stride, b_, b_stride, c, c_stride, first, last, add) -> None:
        b = e.b
        full = vectors // block_vectors
        for start, count, width in ((0, full, block_vectors), (full * block_vectors, 1, vectors % block_vectors)):
            if width == 0 or count == 0:
                continue
            done = b.append_basic_block("product.done")
            blocks = [b.append_basic_block(f"product.{r}") for r in range(1, MAX_BLOCK_ROWS + 1)]
            switch = b.switch(rows, blocks[-1])
            for r, block in enumerate(blocks[:-1], 1):
                switch.add_case(e.const(r), block)
            for r, block in enumerate(blocks, 1):
                b.position_at_end(block)
                with emit_loop(e, 0, 64 * width * count, 64 * width) as (column, _):
                    offset = e.at(column, 64 * start)
                    _emit_block(
                        e, r, width, a, a_stride, b.add(b_, offset), b_stride, b.add(c, offset), c_stride,
                        first, last, add,
                    )  # fmt: skip
                b.branch(done)
            b.position_at_end(done)

    return void_intrinsic((_INT,) * 10, emit)


def _emit_block(e: Emitter, rows: int, width: int, a, a_stride, b_, b_stride, c, c_stride, first, last, add) -> None:
    """One register block of make_product: `rows` times `width` vectors."""
    b = e.b
    a_rows = [b.add(a, b.mul(a_stride, e.const(r))) for r in range(rows)]
    c_rows = [b.add(c, b.mul(c_stride, e.const(r))) for r in range(rows)]
    sums = {(r, j): cgutils.alloca_once(b, VECTOR) for r in range(rows) for j in range(width)}
    with b.if_else(b.icmp_signed("!=", add, e.const(0))) as (has_start, from_zero):
        with has_start:
            for (r, j), slot in sums.items():
                b.store(e.load(e.at(c_rows[r], 64 * j)), slot)
        with from_zero:
            for slot in sums.values():
                b.store(e.splat_const(0.0), slot)
    with emit_loop(e, first, last, 1) as (i, _):
        row = b.add(b_, b.mul(i, b_stride))
        vectors = [e.load(e.at(row, 64 * j)) for j in range(width)]
        for r in range(rows):
            factor = e.splat(e.load(b.add(a_rows[r], b.mul(i, e.const(4))), FLOAT))
            for j in range(width):
                b.store(e.fma(factor, vectors[j], b.load(sums[r, j])), sums[r, j])
    for (r, j), slot in sums.items():
        e.store(b.load(slot), e.at(c_rows[r], 64 * j))


def make_softmax_row(head_dim: int) -> Any:
    """softmax_row(scores, sums, state, low, high, cap): one row of one tile into the running softmax.

    scores   [TILE]; on return the weights, exactly 0 outside tokens low : high
    sums     [head_dim], the weighted values so far; rescaled when the maximum rises
    state    (maximum, sum of weights)
    cap      soft cap of the scores, 0: none
    """

    def emit(e: Emitter, scores, sums, state, low, high, cap) -> None:
        b = e.b
        slots = [cgutils.alloca_once(b, VECTOR) for _ in range(TILE // LANES)]
        for j, slot in enumerate(slots):
            b.store(e.load(e.at(scores, 64 * j)), slot)
        with b.if_then(b.fcmp_ordered(">", cap, ir.Constant(FLOAT, 0.0)), likely=False):
            wide = e.splat(cap)
            for slot in slots:
                b.store(b.fmul(wide, e.tanh(b.fdiv(b.load(slot), wide))), slot)
        low_lanes, high_lanes = (e.splat(b.trunc(x, I32)) for x in (low, high))
        masked, top = [], None
        for j, slot in enumerate(slots):
            index = ir.Constant(INT_VECTOR, list(range(j * LANES, (j + 1) * LANES)))
            visible = b.and_(b.icmp_signed(">=", index, low_lanes), b.icmp_signed("<", index, high_lanes))
            masked.append((b.select(visible, b.load(slot), e.splat_const(MASKED)), visible))
            top = masked[-1][0] if top is None else e.max(top, masked[-1][0])
        old_top, old_sum = e.load(state, FLOAT), e.load(e.at(state, 4), FLOAT)
        new_top = e.max(old_top, e.max_lanes(top))
        keep = e.exp_scalar(b.fsub(old_top, new_top))
        total, wide = None, e.splat(new_top)
        for j, (score, visible) in enumerate(masked):
            weight = b.select(visible, e.exp(b.fsub(score, wide)), e.splat_const(0.0))
            e.store(weight, e.at(scores, 64 * j))
            total = weight if total is None else b.fadd(total, weight)
        e.store(new_top, state)
        e.store(b.fadd(b.fmul(old_sum, keep), e.sum_lanes(total)), e.at(state, 4))
        with b.if_then(b.fcmp_ordered("!=", old_top, new_top)):
            factor = e.splat(keep)
            for d in range(0, head_dim, LANES):
                e.store(b.fmul(e.load(e.at(sums, 4 * d)), factor), e.at(sums, 4 * d))

    return void_intrinsic((_INT,) * 5 + (_FLOAT,), emit)


def make_clear_row(head_dim: int) -> Any:
    """clear_row(sums, state): the softmax over no token."""

    def emit(e: Emitter, sums: ir.Value, state: ir.Value) -> None:
        for d in range(0, head_dim, LANES):
            e.store(e.splat_const(0.0), e.at(sums, 4 * d))
        e.store(ir.Constant(FLOAT, MASKED), state)
        e.store(ir.Constant(FLOAT, 0.0), e.at(state, 4))

    return void_intrinsic((_INT, _INT), emit)


def make_merge_row(head_dim: int) -> Any:
    """merge_row(sums, state, other_sums, other_state): take another softmax into the first. Taking in one over
    no token changes no bit."""

    def emit(e: Emitter, sums, state, other_sums, other_state) -> None:
        b = e.b
        top, other_top = e.load(state, FLOAT), e.load(other_state, FLOAT)
        new_top = e.max(top, other_top)
        keep, take = (e.exp_scalar(b.fsub(x, new_top)) for x in (top, other_top))
        total = b.fmul(e.load(e.at(state, 4), FLOAT), keep)
        e.store(b.fadd(total, b.fmul(e.load(e.at(other_state, 4), FLOAT), take)), e.at(state, 4))
        e.store(new_top, state)
        keep, take = e.splat(keep), e.splat(take)
        for d in range(0, head_dim, LANES):
            mine = b.fmul(e.load(e.at(sums, 4 * d)), keep)
            e.store(e.fma(e.load(e.at(other_sums, 4 * d)), take, mine), e.at(sums, 4 * d))

    return void_intrinsic((_INT,) * 4, emit)


def make_finish_row(head_dim: int) -> Any:
    """finish_row(sums, state, sink, target): divide by the sum of weights and store.

    sink: the head's attention sink, or MASKED for none; it only adds to the sum of weights.
    """

    def emit(e: Emitter, sums, state, sink, target) -> None:
        b, zero = e.b, ir.Constant(FLOAT, 0.0)
        top, total = e.load(state, FLOAT), e.load(e.at(state, 4), FLOAT)
        new_top = e.max(top, sink)
        keep = e.exp_scalar(b.fsub(top, new_top))
        sink_weight = e.exp_scalar(b.fsub(sink, new_top))
        sink_weight = b.select(b.fcmp_ordered(">", sink, ir.Constant(FLOAT, 0.5 * MASKED)), sink_weight, zero)
        total = b.fadd(b.fmul(total, keep), sink_weight)
        is_empty = b.fcmp_ordered("<=", total, zero)
        factor = b.fdiv(keep, b.select(is_empty, ir.Constant(FLOAT, 1.0), total))
        wide = e.splat(factor)
        for d in range(0, head_dim, LANES):
            # Adding 0 turns -0 into 0: how often a zero weight was added must not show.
            value = b.fadd(b.fmul(e.load(e.at(sums, 4 * d)), wide), e.splat_const(0.0))
            e.store(value, e.at(target, 4 * d))

    return void_intrinsic((_INT, _INT, _FLOAT, _INT), emit)
