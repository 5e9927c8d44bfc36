"""Tiles of outputs times blocks of 16 rows of x in bytes: what cpu_ffi_tiles does where x may be rounded to 8 bits.

Each 32 values of a row of x become whole numbers of 8 bits times a scale of their own, so that one instruction
(vpdpbusd) multiplies four of them with four codes of the weights for 16 rows: twice the work of one with bfloat16. The
codes are those stored, made unsigned by a bias if they are not; a weight is factor * code + offset, with two such
numbers for each 32 inputs of an output (or 16, where the form has them).

Where the largest of 32 values of a row is more than OUTLIER times the mean of the row, as in the few channels of a
language model that are far larger than all others, 8 bits would leave nothing of the other 31 values. Those have a
second digit: 16 bits, for which the block of 16 rows takes twice the time at that place. The second digit of the other
rows is zero, so that a row does not depend on its neighbours. (Two parts of x for outliers: Dettmers et al., 2022,
arXiv:2208.07339; there by columns, and in float16.) Only where support.has_byte_dot().
"""

from __future__ import annotations

import functools
from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I8, I32, I64, jit
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, emit_row_starts
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    INT_VECTOR,
    LANES,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul.cpu_ffi_byte_dots import FORMS, Form
from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import load_byte, load_half
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_products import Dots
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, ROW_KINDS, block_bytes
from llvmlite import ir
from numba import types
from numba.core import cgutils

OUTLIER = 20.0
_LARGEST = 127.0
_LEAST = 1e-20  # values far below it become 0: products of scales are not to leave the range of float32
_FOURS = BLOCK // 4  # lines of 16 rows x 4 values in a block
# What a block of 32 inputs and 16 rows of x is made into: lines of the first digit, then a line of scales and two of
# what is added for all its values and for the first 16: the sum, which offsets are multiplied with, or where codes have
# a bias, its part of the sum of products as int32. Behind all blocks lie the lines of second digits, then for each
# block an int64: whether it has any.
_SCALES_AT = _FOURS * LINE
_SUMS_AT = _SCALES_AT + LINE
_BLOCK_BYTES, _SECOND_BYTES = _SUMS_AT + 2 * LINE, _FOURS * LINE
_TOGETHER = 8  # sums at a time: as many in int32 and in float32 as registers hold
_BYTES16 = ir.VectorType(I8, LANES)


@jit
def packed_bytes(k):
    """Of 16 rows of x."""
    blocks = k // BLOCK
    return blocks * (_BLOCK_BYTES + _SECOND_BYTES) + (blocks * 8 + LINE - 1) // LINE * LINE


@jit
def read_bytes(k):
    """Those of packed_bytes that products read where no value has a second digit."""
    return k // BLOCK * _BLOCK_BYTES


def _number_bytes(form: Form) -> int:
    """Of the factors of a block, each with its offset where codes have no bias."""
    return 4 * (2 if form.is_split else 1) * (1 if form.bias else 2)


def make_expanded_bytes(kind: str) -> Any:
    """expanded_bytes(k): of one output: codes, then in float32 the numbers of each block."""
    per_block = _number_bytes(FORMS[kind])

    @jit
    def expanded_bytes(k):
        return k + k // BLOCK * per_block

    return expanded_bytes


def _splat_at(e: Emitter, address: ir.Value, type_: ir.Type, lanes: int = LANES) -> ir.Value:
    return e.splat(e.load(address, type_, 4), lanes)


def make_pack(kind: str) -> Any:
    """pack(x, x_stride, rows, k, target, space): up to ROWS rows of x; missing rows repeat the last. space: 2 LINEs."""
    bias = FORMS[kind].bias

    def emit(e: Emitter, x, x_stride, rows, k, target, space) -> None:
        b = e.b
        starts = emit_row_starts(e, x, x_stride, rows)
        second = b.add(target, b.mul(b.udiv(k, e.const(BLOCK)), e.const(_BLOCK_BYTES)))
        flags = b.add(second, b.mul(b.udiv(k, e.const(BLOCK)), e.const(_SECOND_BYTES)))
        bound = _emit_bound(e, starts, k)
        with emit_loop(e, 0, k, BLOCK) as (i, count):
            offset = b.mul(i, e.const(4))
            rows_at = [b.add(start, offset) for start in starts]
            largest = _emit_largest(e, rows_at)
            is_outlier = b.fcmp_ordered(">", largest, bound)
            has_outlier = b.icmp_unsigned(
                "!=", b.bitcast(is_outlier, ir.IntType(LANES)), ir.Constant(ir.IntType(16), 0)
            )
            e.store(b.zext(has_outlier, I64), b.add(flags, b.mul(count, e.const(8))), 8)
            first_at = b.add(target, b.mul(count, e.const(_BLOCK_BYTES)))
            second_at = b.add(second, b.mul(count, e.const(_SECOND_BYTES)))
            largest = e.max_or_nan(largest, e.splat_const(_LEAST))
            up = b.fdiv(e.splat_const(_LARGEST), largest)
            scale = b.fmul(largest, e.splat_const(1 / _LARGEST))
            e.store(up, space, LINE)
            with b.if_else(has_outlier) as (two, one):
                with two:
                    # The whole number of a row without outlier is shifted, so that its second digit is zero.
                    e.store(b.select(is_outlier, b.fmul(up, e.splat_const(256.0)), up), space, LINE)
                    shift = b.select(is_outlier, e.ints(0), e.ints(8))
                    e.store(shift, e.at(space, LINE), LINE)
                    sums = _emit_digits(e, rows_at, e.hidden(space), first_at, second_at)
                    scale_two = b.fmul(scale, e.splat_const(1 / 256))
                    _emit_head(e, first_at, scale_two, sums, bias)
                with one:
                    sums = _emit_digits(e, rows_at, e.hidden(space), first_at, None)
                    _emit_head(e, first_at, scale, sums, bias)

    return void_intrinsic((types.intp,) * 6, emit)


def _emit_bound(e: Emitter, starts: list[ir.Value], k: ir.Value) -> ir.Value:
    """OUTLIER times the mean size of the values of each row, the rows in lanes."""
    b = e.b
    share = e.splat(b.fdiv(ir.Constant(FLOAT, OUTLIER), b.sitofp(k, FLOAT)))
    totals = [cgutils.alloca_once(b, VECTOR) for _ in starts]
    for total in totals:
        b.store(e.splat_const(0.0), total)
    with emit_loop(e, 0, k, LANES) as (i, _):
        for start, total in zip(starts, totals):
            value = e.size(e.load(b.add(start, b.mul(i, e.const(4)))))
            b.store(e.fma(value, share, b.load(total)), total)
    columns = e.transpose([b.load(total) for total in totals])
    while len(columns) > 1:
        columns = [b.fadd(x, y) for x, y in zip(columns[::2], columns[1::2])]
    return columns[0]


def _emit_largest(e: Emitter, rows: list[ir.Value]) -> ir.Value:
    """The largest size of BLOCK values of each row, the rows in lanes. NaN is kept: such a row gets a scale of NaN."""
    halves = [[e.size(e.load(e.at(row, 4 * half))) for half in (0, LANES)] for row in rows]
    columns = e.transpose([e.max_or_nan(*both) for both in halves])
    while len(columns) > 1:
        columns = [e.max_or_nan(x, y) for x, y in zip(columns[::2], columns[1::2])]
    return columns[0]


def _emit_digits(
    e: Emitter, rows: list[ir.Value], space: ir.Value, first: ir.Value, second: ir.Value | None
) -> list[ir.Value]:
    """The digits of BLOCK values of ROWS rows, by the factors (and, for two digits, shifts) in `space`. Returns the
    sums of the first half and of all values as int32, the rows in lanes."""
    b = e.b
    whole = ir.Constant(ir.VectorType(I32, 64), [*range(32), *([32] * 32)])

    def widened(parts: list[ir.Value]) -> ir.Value:
        """Two times 16 bytes, as the first 8 int32 of a vector."""
        both = b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, 32), list(range(32))))
        nothing = ir.Constant(both.type, ir.Undefined)
        return b.bitcast(b.shuffle_vector(both, nothing, whole), INT_VECTOR)

    highs, lows = [], []
    for n, row in enumerate(rows):
        factor = _splat_at(e, e.at(space, 4 * n), FLOAT)
        high, low = [], []
        for half in (0, LANES):
            number = e.to_int(b.fmul(e.load(e.at(row, 4 * half)), factor))
            if second is not None:
                number = b.shl(number, _splat_at(e, e.at(space, LINE + 4 * n), I32))
                low.append(b.trunc(number, _BYTES16))
                number = b.ashr(b.add(number, e.ints(128)), e.ints(8))
            high.append(b.trunc(number, _BYTES16))
        highs.append(widened(high))
        if second is not None:
            lows.append(widened(low))
    sums = []
    for vectors, target in ((highs, first), (lows, second)):
        if target is None:
            continue
        total = e.ints(0)
        at_half = total
        for four, line in enumerate(e.transpose(vectors)[:_FOURS]):
            e.store(line, e.at(target, four * LINE), LINE)
            total = e.dot_bytes(total, e.ints(0x01010101), line)
            if four == _FOURS // 2 - 1:
                at_half = total
        sums.append((at_half, total))
    if second is None:
        return list(sums[0])
    return [b.add(b.shl(high, e.ints(8)), low) for high, low in zip(*sums)]


def _emit_head(e: Emitter, block: ir.Value, scale: ir.Value, sums: list[ir.Value], bias: int) -> None:
    b = e.b
    if bias:
        first, total = (b.mul(x, e.ints(-bias)) for x in sums)
    else:
        first, total = (b.fmul(b.sitofp(x, VECTOR), scale) for x in sums)
    for n, line in enumerate((scale, total, first)):
        e.store(line, e.at(block, _SCALES_AT + n * LINE), LINE)


def make_expand(kind: str) -> Any:
    """expand(w, w_stride, k, target, space): ROWS outputs as make_expanded_bytes has them; space is not used."""
    form, size = FORMS[kind], block_bytes(kind)
    per_block = _number_bytes(form)
    # Adding 128 is flipping the highest bit.
    highest = ir.Constant(ir.VectorType(I8, BLOCK), [-128] * BLOCK)

    def codes(e: Emitter, block: ir.Value, target: ir.Value) -> None:
        b = e.b
        if form.is_nibbles:
            both = e.load(e.at(block, form.codes_at), _BYTES16, 1)
            e.store(b.and_(both, ir.Constant(_BYTES16, [15] * LANES)), target)
            e.store(b.lshr(both, ir.Constant(_BYTES16, [4] * LANES)), e.at(target, LANES))
        else:
            signed = e.load(e.at(block, form.codes_at), highest.type, 1)
            e.store(b.xor(signed, highest), target)

    def numbers(e: Emitter, row: ir.Value, block: ir.Value, k: ir.Value) -> list[ir.Value]:
        """Factor and offset; without offset where codes have a bias, and of each 16 inputs where they are split."""
        b = e.b
        half, byte = functools.partial(load_half, e, block), functools.partial(load_byte, e, block)

        def negative(x: ir.Value) -> ir.Value:
            return b.fsub(ir.Constant(FLOAT, -0.0), x)

        if kind == "q4_1":  # both by one conversion out of memory, which takes four
            four = e.load(block, ir.VectorType(ir.HalfType(), 4), 1)
            both = b.fpext(four, ir.VectorType(FLOAT, 4))
            return [e.lane(both, 0), e.lane(both, 1)]
        if kind == "q4_z":
            return [half(0), negative(b.fmul(half(0), byte(2)))]
        if kind == "q4_k":
            return [b.fmul(half(0), byte(4)), negative(b.fmul(half(2), byte(5)))]
        if kind == "q6_k":
            return [b.fmul(half(0), byte(at, signed=True)) for at in (2, 3)]
        return [e.load(b.add(row, k), FLOAT, 1) if kind in ROW_KINDS else half(0)]

    def emit(e: Emitter, w, w_stride, k, target, space) -> None:
        b = e.b
        blocks = b.udiv(k, e.const(BLOCK))
        stride = b.add(k, b.mul(blocks, e.const(per_block)))
        with emit_loop(e, 0, ROWS, 1) as (n, _):
            row, out = b.add(w, b.mul(n, w_stride)), b.add(target, b.mul(n, stride))
            with emit_loop(e, 0, blocks, 1) as (i, _):
                block = b.add(row, b.mul(i, e.const(size)))
                codes(e, block, b.add(out, b.mul(i, e.const(BLOCK))))
                place = b.add(b.add(out, k), b.mul(i, e.const(per_block)))
                for j, number in enumerate(numbers(e, row, block, k)):
                    e.store(number, e.at(place, 4 * j))

    return void_intrinsic((types.intp,) * 5, emit)


def make_dots(kind: str) -> Dots:
    """Sums of outputs as make_expand leaves them times x as make_pack does."""
    form = FORMS[kind]
    parts = 2 if form.is_split else 1

    def emit_step(e: Emitter, i, count, k, w_starts, x_starts, sums, lanes) -> None:
        b = e.b
        vector, ints = ir.VectorType(FLOAT, lanes), ir.VectorType(I32, lanes)
        block_at, second_at = (b.mul(count, e.const(size)) for size in (_BLOCK_BYTES, _SECOND_BYTES))
        second_at = b.add(second_at, b.mul(b.udiv(k, e.const(BLOCK)), e.const(_BLOCK_BYTES)))
        flag_at = b.mul(b.udiv(k, e.const(BLOCK)), e.const(_BLOCK_BYTES + _SECOND_BYTES))
        flag_at = b.add(flag_at, b.mul(count, e.const(8)))
        blocks_at = [b.add(start, block_at) for start in x_starts]

        flags = [e.load(b.add(start, flag_at), I64, 8) for start in x_starts]
        any_second = b.icmp_signed("!=", functools.reduce(b.or_, flags), e.const(0))

        def multiply(dots, codes_at: list[ir.Value], rows: dict[int, ir.Value], four: ir.Value | int) -> None:
            """Four inputs; codes_at and rows: where those of the block begin."""
            line, inputs = (four * LINE, four * 4) if isinstance(four, int) else (
                b.mul(four, e.const(LINE)), b.mul(four, e.const(4))
            )  # fmt: skip
            right = {m: e.load(e.at(at, line), ints, LINE) for m, at in rows.items()}
            for n, start in enumerate(codes_at):
                codes = _splat_at(e, e.at(start, inputs), I32, lanes)
                for m, digits in right.items():
                    b.store(e.dot_bytes(b.load(dots[n, m]), codes, digits), dots[n, m])

        for part in range(parts):
            fours = part * _FOURS // parts, (part + 1) * _FOURS // parts
            dots = {place: cgutils.alloca_once(b, ints) for place in sums}
            for dot in dots.values():
                b.store(e.ints(0, lanes), dot)
            codes_at = [b.add(start, i) for start in w_starts]
            for four in range(*fours):
                multiply(dots, codes_at, dict(enumerate(blocks_at)), four)
            with b.if_then(any_second, likely=False):
                codes_at = [e.hidden(start) for start in codes_at]  # not to be kept in registers from above
                for m, start in enumerate(x_starts):
                    with b.if_then(b.icmp_signed("!=", flags[m], e.const(0))):
                        for n in range(len(w_starts)):
                            b.store(b.shl(b.load(dots[n, m]), e.ints(8, lanes)), dots[n, m])
                        with emit_loop(e, *fours, 1) as (four, _):
                            multiply(dots, codes_at, {m: b.add(start, second_at)}, four)
            scales = [e.load(e.at(at, _SCALES_AT), vector, LINE) for at in blocks_at]
            added = [_part_sum(e, at, part, parts, ints if form.bias else vector) for at in blocks_at]
            for n, start in enumerate(w_starts):
                numbers = e.at(b.add(b.add(start, k), b.mul(count, e.const(_number_bytes(form)))), 4 * part)
                factor = _splat_at(e, numbers, FLOAT, lanes)
                for m in range(len(x_starts)):
                    dot, total = b.load(dots[n, m]), b.load(sums[n, m])
                    if form.bias:
                        dot = b.add(dot, added[m])
                    else:
                        total = e.fma(_splat_at(e, e.at(numbers, 4), FLOAT, lanes), added[m], total)
                    b.store(e.fma(b.fmul(factor, scales[m]), b.sitofp(dot, vector), total), sums[n, m])

    return Dots(_TOGETHER, emit_step)


def _part_sum(e: Emitter, block: ir.Value, part: int, parts: int, vector: ir.Type) -> ir.Value:
    """What is added for a block, or for one half of it."""
    if parts == 1:
        return e.load(e.at(block, _SUMS_AT), vector, LINE)
    first, total = (e.load(e.at(block, at), vector, LINE) for at in (_SUMS_AT + LINE, _SUMS_AT))
    subtract = e.b.sub if vector.element == I32 else e.b.fsub
    return first if part == 0 else subtract(total, first)
