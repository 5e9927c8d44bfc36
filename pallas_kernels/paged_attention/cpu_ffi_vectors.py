"""The inner loops of CPU paged attention: one tile of context against some query rows.

A query row is one query head of one token. Tiles hold TILE tokens; within a tile the keys lie transposed
([head_dim, TILE]) and the values straight ([TILE, head_dim]), both float32 or in pairs of bfloat16, so that scores and
sums are matrix products (cpu_ffi_products.py) whose every element is summed in one order: over head_dim, over tokens.
That order is the same for any number of rows taken at once, which is what makes a token's result independent of its
neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I8, I32, I64, jit, zero_bytes
from jaxserve.pallas_kernels.cpu_ffi.parallel import named
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    ELEMENT_BYTES,
    INT_VECTOR,
    LANES,
    LOCALITY_SECOND_CACHE,
    MASKED,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul.quantized import FP8_SCALE
from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES
from llvmlite import ir
from numba import types
from numba.core import cgutils

TILE = 64  # context tokens per tile
MAX_BLOCK_ROWS = 6  # query rows per register block
_RISE = 8.0  # how far a score may lie above the one whose weight is 1
_INT, _FLOAT = types.intp, types.float32


def make_write_row(head_dim: int, kind: str) -> Any:
    """write_row(source float32, target, scale): one token's K or V of one head, as pages hold it.

    scale: where that of codes goes; not used for other kinds.
    """

    def emit(e: Emitter, source: ir.Value, target: ir.Value, scale: ir.Value) -> None:
        size = ELEMENT_BYTES[kind]
        factor = _emit_scale(e, head_dim, kind, source, scale) if kind in CODES else None
        for d in range(0, head_dim, LANES):
            value = e.load(e.at(source, 4 * d))
            if factor is None:
                e.store_as(value, e.at(target, size * d), kind)
            else:
                e.store(_emit_codes(e, e.b.fmul(value, factor), kind), e.at(target, d), 1)

    return void_intrinsic((_INT, _INT, _INT), emit)


def _emit_scale(e: Emitter, head_dim: int, kind: str, source: ir.Value, scale: ir.Value) -> ir.Value:
    """Store the scale of a vector, as quantized_pages.quantize has it; returns its inverse, 16 times."""
    b, top = e.b, None
    magnitude = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES)
    for d in range(0, head_dim, LANES):
        # As integers: they are ordered like the magnitudes, and NaN is the largest.
        bits = b.and_(e.load(e.at(source, 4 * d), INT_VECTOR), magnitude)
        top = bits if top is None else b.select(b.icmp_signed(">", bits, top), bits, top)
    highest = e.lane(top, 0)
    for lane in range(1, LANES):
        bits = e.lane(top, lane)
        highest = b.select(b.icmp_signed(">", bits, highest), bits, highest)
    value = b.fmul(b.bitcast(highest, FLOAT), ir.Constant(FLOAT, np.float32(1 / CODES[kind][1])))
    e.store(value, scale)
    one = ir.Constant(FLOAT, 1.0)
    return e.splat(b.fdiv(one, b.select(b.fcmp_ordered(">", value, ir.Constant(FLOAT, 0.0)), value, one)))


def _emit_codes(e: Emitter, scaled: ir.Value, kind: str) -> ir.Value:
    """16 float32 rounded to nearest even as 16 codes."""
    b, largest = e.b, e.splat_const(CODES[kind][1])
    bytes16, zero = ir.VectorType(I8, LANES), e.splat_const(0.0)
    is_negative = b.fcmp_ordered("<", scaled, zero)
    size = b.select(is_negative, b.fsub(zero, scaled), scaled)
    size = b.select(b.fcmp_ordered("<", size, largest), size, largest)  # NaN too: its scale is NaN

    def ints(value: int) -> ir.Constant:
        return ir.Constant(INT_VECTOR, [value] * LANES)

    def rounded(value: ir.Value) -> ir.Value:
        return b.fptosi(b.call(e.function("llvm.rint.v16f32", VECTOR, [VECTOR]), [value]), INT_VECTOR)

    if kind == "int8":
        codes = rounded(size)
        return b.trunc(b.select(is_negative, b.neg(codes), codes), bytes16)
    # float8_e4m3fn: 4 bits of exponent, bias 7, and 3 of mantissa; below 2**-6 multiples of 2**-9.
    bits = b.bitcast(size, INT_VECTOR)
    odd = b.and_(b.lshr(bits, ints(20)), ints(1))
    normal = b.sub(b.lshr(b.add(bits, b.add(odd, ints(0x7FFFF))), ints(20)), ints((127 - 7) << 3))
    small = rounded(b.fmul(size, e.splat_const(512.0)))
    codes = b.select(b.fcmp_ordered("<", size, e.splat_const(2.0**-6)), small, normal)
    return b.trunc(b.or_(codes, b.and_(b.lshr(b.bitcast(scaled, INT_VECTOR), ints(24)), ints(0x80))), bytes16)


def make_scale_row(head_dim: int) -> Any:
    """scale_row(source, target, factor): a query row times the attention scale."""

    def emit(e: Emitter, source: ir.Value, target: ir.Value, factor: ir.Value) -> None:
        wide = e.splat(factor)
        for d in range(0, head_dim, LANES):
            e.store(e.b.fmul(e.load(e.at(source, 4 * d)), wide), e.at(target, 4 * d))

    return void_intrinsic((_INT, _INT, _FLOAT), emit)


def widen(e: Emitter, narrow: ir.Value) -> ir.Value:
    """16 bfloat16, as int16, in float32."""
    shifted = e.b.shl(e.b.zext(narrow, INT_VECTOR), ir.Constant(INT_VECTOR, [16] * LANES))
    return e.b.bitcast(shifted, VECTOR)


def make_load_keys(head_dim: int, kind: str) -> Any:
    """load_keys(addresses, keys, pages, scales): K of 16 tokens into a tile, transposed.

    addresses       16 addresses of K rows
    keys            column of the tile where the 16 tokens start
    pages, scales   the first row and its scale, for codes
    """
    size = ELEMENT_BYTES[kind]
    # Neighbouring dims travel together as one 32-bit lane: a half or a quarter of the shuffles.
    group = 4 // size if head_dim % (LANES * 4 // size) == 0 else 1

    def ungroup(e: Emitter, lanes: ir.Value, i: int) -> ir.Value:
        """The i-th element of every lane as float32."""
        b = e.b
        if kind == "bfloat16":
            shifted = b.and_(lanes, ir.Constant(INT_VECTOR, [-65536] * LANES))
            return b.bitcast(shifted if i else b.shl(lanes, ir.Constant(INT_VECTOR, [16] * LANES)), VECTOR)
        shifted = b.lshr(lanes, ir.Constant(INT_VECTOR, [8 * i] * LANES))
        return e.codes_as_float(b.trunc(shifted, ir.VectorType(I8, LANES)), kind)

    def emit(e: Emitter, addresses, keys, pages, scales) -> None:
        b = e.b
        rows = [e.load(e.at(addresses, 8 * i), I64, 8) for i in range(LANES)]
        factors = _emit_scales(e, head_dim, kind, rows, pages, scales) if kind in CODES else None
        with emit_loop(e, 0, head_dim, LANES * group) as (d, _):
            offset = b.mul(d, e.const(size))
            target = b.add(keys, b.mul(d, e.const(4 * TILE)))
            if group > 1:
                columns = e.transpose([e.load(b.add(row, offset), INT_VECTOR, size) for row in rows])
                columns = [ungroup(e, lanes, i) for lanes in columns for i in range(group)]
            else:
                columns = e.transpose([e.load_as_float(b.add(row, offset), kind) for row in rows])
            for i, column in enumerate(columns):
                e.store(column if factors is None else b.fmul(column, factors), e.at(target, 4 * i * TILE))

    return void_intrinsic((_INT,) * 4, emit)


def make_load_values(head_dim: int, kind: str) -> Any:
    """load_values(addresses, page_size, values, pages, scales): V of 16 tokens into a tile.

    page_size   rows from a token's K, whose addresses are given as in load_keys, to its V
    values      row of the tile where the 16 tokens start
    """

    def emit(e: Emitter, addresses, page_size, values, pages, scales) -> None:
        b = e.b
        # Token by token: one address at a time stays in a register, where 16 would not.
        with emit_loop(e, 0, LANES, 1) as (i, _):
            vectors = emit_values(
                e, head_dim, kind, e.const(0), head_dim // LANES, addresses, None, page_size, pages, scales, i
            )
            target = b.add(values, b.mul(i, e.const(4 * head_dim)))
            for j, vector in enumerate(vectors):
                e.store(vector, e.at(target, 64 * j))

    return void_intrinsic((_INT,) * 5, emit)


def emit_values(
    e: Emitter, head_dim: int, kind: str, start: ir.Value, width: int, addresses, ahead, page_size, pages, scales, token
) -> list[ir.Value]:
    """`width` vectors of a token's V as float32, from dim `start` on; those of the token ahead, if any, are fetched."""
    b, size = e.b, ELEMENT_BYTES[kind]
    place = b.mul(token, e.const(8))
    key = e.load(b.add(addresses, place), I64, 8)
    offset = b.add(b.mul(page_size, e.const(head_dim * size)), b.mul(start, e.const(size)))
    row = b.add(key, offset)
    if ahead is not None:
        fetched = b.add(e.load(b.add(ahead, place), I64, 8), offset)
        for byte in range(0, LANES * width * size, 64):
            e.prefetch(e.at(fetched, byte), locality=LOCALITY_SECOND_CACHE)
    vectors = [e.load_as_float(e.at(row, LANES * j * size), kind) for j in range(width)]
    if kind not in CODES:
        return vectors
    factor = e.splat(_emit_scale_of(e, head_dim, kind, key, pages, scales, page_size))
    return [b.fmul(vector, factor) for vector in vectors]


def _emit_scale_of(e: Emitter, head_dim: int, kind: str, row, pages, scales, rows_after=None) -> ir.Value:
    """The scale of a row of codes, or of the one so many rows after it; times what codes_as_float leaves out."""
    b = e.b
    index = b.sdiv(b.sub(row, pages), e.const(head_dim), flags=("exact",))
    if rows_after is not None:
        index = b.add(index, rows_after)
    scale = e.load(b.add(scales, b.mul(index, e.const(4))), FLOAT)
    return b.fmul(scale, ir.Constant(FLOAT, FP8_SCALE)) if kind == "fp8" else scale


def _emit_scales(e: Emitter, head_dim: int, kind: str, rows: list[ir.Value], pages, scales) -> ir.Value:
    """The scales of 16 rows of codes, one in each lane."""
    found = ir.Constant(VECTOR, ir.Undefined)
    for i, row in enumerate(rows):
        scale = _emit_scale_of(e, head_dim, kind, row, pages, scales)
        found = e.b.insert_element(found, scale, ir.Constant(I32, i))
    return found


def make_softmax_row(head_dim: int, *, in_pairs: bool = False) -> Any:
    """softmax_row(scores, sums, state, total, low, high, cap): one row of one tile into the running softmax.

    scores   [TILE]; on return the weights, exactly 0 outside tokens low : high; in pairs as two bfloat16 each, of which
             the second is what rounding left: all first ones, then all second ones
    sums     [head_dim], the weighted values so far; rescaled when the score whose weight is 1 changes
    state    that score; a higher one counts once it is so high that weights would grow too large
    total    [16], sums of weights so far, to be added up
    """

    def emit(e: Emitter, scores, sums, state, total, low, high, cap) -> None:
        b = e.b
        slots = [cgutils.alloca_once(b, VECTOR) for _ in range(TILE // LANES)]
        for j, slot in enumerate(slots):
            b.store(e.load(e.at(scores, 64 * j)), slot)
        with b.if_then(b.fcmp_ordered(">", cap, ir.Constant(FLOAT, 0.0)), likely=False):
            wide = e.splat(cap)
            for slot in slots:
                b.store(b.fmul(wide, e.tanh(b.fdiv(b.load(slot), wide))), slot)

        def emit_row(visible: list[ir.Value] | None) -> None:
            values = [b.load(slot) for slot in slots]
            if visible is not None:
                values = [b.select(seen, x, e.splat_const(MASKED)) for seen, x in zip(visible, values)]
            top = e.max(e.max(values[0], values[1]), e.max(values[2], values[3]))
            unit = e.load(state, FLOAT)
            highest = cgutils.alloca_once_value(b, unit)
            is_high = b.fcmp_ordered(">", top, e.splat(b.fadd(unit, ir.Constant(FLOAT, _RISE))))
            is_high = b.icmp_unsigned("!=", b.bitcast(is_high, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))
            with b.if_then(is_high, likely=False):
                new_unit = e.max_lanes(top)
                b.store(new_unit, highest)
                e.store(new_unit, state)
                factor = e.splat(e.exp_scalar(b.fsub(unit, new_unit)))
                for place in (total, *(e.at(sums, 4 * d) for d in range(0, head_dim, LANES))):
                    e.store(b.fmul(e.load(place), factor), place)
            wide, added = e.splat(b.load(highest)), e.load(total)
            weights = [e.exp(b.fsub(value, wide)) for value in values]
            if visible is not None:
                weights = [b.select(seen, weight, e.splat_const(0.0)) for seen, weight in zip(visible, weights)]
            for weight in weights:
                added = b.fadd(added, weight)
            if in_pairs:
                first = [e.upper_half(weight) for weight in weights]
                for at, part in ((0, first), (2 * TILE, list(map(b.fsub, weights, first)))):
                    for j in range(0, len(part), 2):
                        e.store(e.both_to_bf16(part[j], part[j + 1]), e.at(scores, at + 32 * j), 2)
            else:
                for j, weight in enumerate(weights):
                    e.store(weight, e.at(scores, 64 * j))
            e.store(added, total)

        is_whole = b.and_(b.icmp_signed("<=", low, e.const(0)), b.icmp_signed(">=", high, e.const(TILE)))
        with b.if_else(is_whole) as (whole, part):
            with whole:
                emit_row(None)
            with part:
                low_lanes, high_lanes = (e.splat(b.trunc(x, I32)) for x in (low, high))
                indices = [ir.Constant(INT_VECTOR, list(range(j, j + LANES))) for j in range(0, TILE, LANES)]
                emit_row(
                    [
                        b.and_(b.icmp_signed(">=", index, low_lanes), b.icmp_signed("<", index, high_lanes))
                        for index in indices
                    ]
                )

    return void_intrinsic((_INT,) * 6 + (_FLOAT,), emit)


def make_clear_row(head_dim: int) -> Any:
    """clear_row(sums, state): the softmax over no token."""

    def emit(e: Emitter, sums: ir.Value, state: ir.Value) -> None:
        for d in range(0, head_dim, LANES):
            e.store(e.splat_const(0.0), e.at(sums, 4 * d))
        e.store(ir.Constant(FLOAT, MASKED), state)
        e.store(ir.Constant(FLOAT, 0.0), e.at(state, 4))

    return void_intrinsic((_INT, _INT), emit)


# _add_up(total, state): the 16 sums of weights of a row as one, into its state.
_add_up = void_intrinsic((_INT, _INT), lambda e, total, state: e.store(e.sum_lanes(e.load(total)), e.at(state, 4)))


def make_begin_rows(tag: str, head_dim: int) -> Any:
    """begin_rows(rows, sums, states, totals): before the first tile of a segment."""
    clear_row, head_bytes = make_clear_row(head_dim), 4 * head_dim

    @named(tag)
    def begin_rows(rows, sums, states, totals):
        zero_bytes(totals, LINE * rows)
        for r in range(rows):
            clear_row(sums + r * head_bytes, states + 8 * r)

    return begin_rows


@jit
def end_rows(rows, states, totals):
    """After the last tile of a segment."""
    for r in range(rows):
        _add_up(totals + LINE * r, states + 8 * r)


def make_merge_row(head_dim: int) -> Any:
    """merge_row(sums, state, other_sums, other_state, keep, take): take another softmax into the first, whose new
    maximum is in `state`: what either was summed with counts `keep` and `take` times. Taking in one over no token
    changes no bit."""

    def emit(e: Emitter, sums, state, other_sums, other_state, keep, take) -> None:
        b = e.b
        total = b.fmul(e.load(e.at(state, 4), FLOAT), keep)
        e.store(b.fadd(total, b.fmul(e.load(e.at(other_state, 4), FLOAT), take)), e.at(state, 4))
        keep, take = e.splat(keep), e.splat(take)
        for d in range(0, head_dim, LANES):
            mine = b.fmul(e.load(e.at(sums, 4 * d)), keep)
            e.store(e.fma(e.load(e.at(other_sums, 4 * d)), take, mine), e.at(sums, 4 * d))

    return void_intrinsic((_INT,) * 4 + (_FLOAT,) * 2, emit)


def make_finish_row(head_dim: int) -> Any:
    """finish_row(sums, state, sink, target): divide by the sum of weights and store.

    sink: the head's attention sink, or MASKED for none; it only adds to the sum of weights.
    """

    def emit(e: Emitter, sums, state, sink, target) -> None:
        b, zero = e.b, ir.Constant(FLOAT, 0.0)
        top, total = e.load(state, FLOAT), e.load(e.at(state, 4), FLOAT)
        kept = cgutils.alloca_once_value(b, ir.Constant(FLOAT, 1.0))
        summed = cgutils.alloca_once_value(b, total)
        with b.if_then(b.fcmp_ordered(">", sink, ir.Constant(FLOAT, 0.5 * MASKED))):
            new_top = e.max(top, sink)
            b.store(e.exp_scalar(b.fsub(top, new_top)), kept)
            b.store(b.fadd(b.fmul(total, b.load(kept)), e.exp_scalar(b.fsub(sink, new_top))), summed)
        keep, total = b.load(kept), b.load(summed)
        is_empty = b.fcmp_ordered("<=", total, zero)
        factor = b.fdiv(keep, b.select(is_empty, ir.Constant(FLOAT, 1.0), total))
        wide = e.splat(factor)
        for d in range(0, head_dim, LANES):
            # Adding 0 turns -0 into 0: how often a zero weight was added must not show.
            value = b.fadd(b.fmul(e.load(e.at(sums, 4 * d)), wide), e.splat_const(0.0))
            e.store(value, e.at(target, 4 * d))

    return void_intrinsic((_INT, _INT, _FLOAT, _INT), emit)
