"""Few rows times stored weights by dot products of bytes: the codes are multiplied as they are, and the sums are exact.

Each block of 32 values of x becomes whole numbers X of 21 to 23 bits and a sign, times a scale of its own; X is split
into three signed digits of 8 bits, so that each digit is multiplied with codes by one instruction (vpdpbusd: four
unsigned bytes times four signed ones, added to an int32). With the digits moved to their places in between the int32 is
the sum of code * X, without rounding. So a weight costs less than two operations in place of a conversion to float32
and a multiplication, and the result is as exact as in float32.

A group is four blocks, one in each quarter of a vector. A code that is stored signed is made unsigned by adding a bias,
whose part of the sum is known from x alone; it may pass the range of an int32 on the way, where sums wrap around, as
long as the sum without it does not. Only where support.has_byte_dot().
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I8, I16, I32, U8, store_i64
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, named
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    INT_VECTOR,
    LANES,
    VECTOR,
    Emitter,
    emit_by_count,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from jaxserve.pallas_kernels.matmul.cpu_ffi import BLOCK_ROWS
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, ROW_KINDS, block_bytes, tail_bytes
from llvmlite import ir
from numba import types
from numba.core import cgutils

GROUP = 4  # blocks that are multiplied together
_DIGITS = 3
# What a group of x is made into: the digits of the first and of the second halves of its blocks, highest first; the
# parts of the sums that the bias of the codes has; and for each block two numbers that its scales are multiplied with.
_BIAS_AT = 2 * _DIGITS * 64
FACTORS_AT = _BIAS_AT + 2 * 64
GROUP_BYTES = FACTORS_AT + 64
ZERO_BLOCK_BYTES = 64  # behind the last group of x: stands in for the blocks that a row's last group lacks

_ITEM_BYTES = 8192  # of stored weights per work item, at least
_AHEAD = 2  # how many times as many outputs as are computed at once lie between them and what is fetched
_MIN_THREAD_BYTES = 32768
_BYTES16, _BYTES64 = ir.VectorType(I8, LANES), ir.VectorType(I8, 64)
_FOUR_INTS = ir.VectorType(I32, GROUP)
_PAIRS = ir.VectorType(FLOAT, 2 * GROUP)


@dataclasses.dataclass(frozen=True)
class Form:
    codes_at: int  # where the codes begin in a block
    is_nibbles: bool = False
    bias: int = 0  # added to a code to make it unsigned
    largest: float = 8.3e6  # of X: three digits reach 8355711
    offset_sign: int = 0  # of the part of a value that does not depend on its code
    is_split: bool = False  # whether the halves of a block have scales of their own


# Where codes are bytes a sum of 8 (of 4 if halves are split) products has to stay below 2**31.
FORMS = {
    "int8": Form(0, bias=128, largest=2.09e6),
    "q8_0": Form(2, bias=128, largest=2.09e6),
    "q4_1": Form(4, is_nibbles=True, offset_sign=1),
    "q4_z": Form(4, is_nibbles=True, offset_sign=-1),
    "q4_k": Form(6, is_nibbles=True, offset_sign=-1),
    "q6_k": Form(4, bias=128, largest=4.18e6, is_split=True),
}


def fits(kind: str) -> bool:
    """Whether this form has codes that are whole numbers."""
    return kind in FORMS


def _shuffle(e: Emitter, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
    return e.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def make_arrange(kind: str) -> Any:
    """arrange(x, target): BLOCK float32 into their places in a group, of which `target` is the part of that block:
    16 * (its index in the group) bytes behind the group's beginning, and 8 * (its index) for `pairs`."""
    form = FORMS[kind]

    def emit(e: Emitter, x: ir.Value, target: ir.Value, pairs: ir.Value) -> None:
        b = e.b
        halves = [e.load(x), e.load(e.at(x, 4 * LANES))]
        # The maximum that keeps NaN, which has no digits: the scale becomes NaN in its place.
        largest = e.max_or_nan(*(e.size(half) for half in halves))
        for step in (8, 4, 2, 1):
            other = _shuffle(e, largest, largest, [lane ^ step for lane in range(LANES)])
            largest = e.max_or_nan(largest, other)
        up = b.fdiv(e.splat_const(form.largest), e.max(largest, e.splat_const(1e-30)))
        scale = b.fmul(e.lane(largest, 0), ir.Constant(FLOAT, 1.0 / form.largest))
        biases = []
        for j, half in enumerate(halves):
            digits = e.to_int(b.fmul(half, up))
            if form.bias:
                fours = [_shuffle(e, digits, digits, [4 * i + lane for i in range(4)]) for lane in range(4)]
                total = b.add(b.add(fours[0], fours[1]), b.add(fours[2], fours[3]))
                biases.append(b.mul(total, ir.Constant(_FOUR_INTS, [-form.bias] * 4)))
            for place in reversed(range(_DIGITS)):
                e.store(b.trunc(digits, _BYTES16), e.at(target, (j * _DIGITS + place) * 64), 16)
                # What is left when the lowest digit, which is between -128 and 127, is taken away.
                digits = b.ashr(b.add(digits, e.ints(128)), e.ints(8))
        if form.bias and not form.is_split:
            biases = [b.add(*biases)]
        for j, bias in enumerate(biases):
            e.store(bias, e.at(target, _BIAS_AT + 64 * j), 16)
        second = scale
        if form.offset_sign:
            second = b.fmul(e.sum_lanes(b.fadd(*halves)), ir.Constant(FLOAT, float(form.offset_sign)))
        e.store(scale, pairs)
        e.store(second, e.at(pairs, 4))

    return void_intrinsic((types.intp,) * 3, emit)


class _Group:
    """The stored blocks of one output that one group of x is multiplied with."""

    def __init__(self, e: Emitter, kind: str, start: ir.Value, blocks: list[ir.Value] | None, scale: ir.Value) -> None:
        """blocks: their addresses if they do not lie one behind the other; scale: where the one of a row is."""
        self.e, self.kind, self.form, self.size = e, kind, FORMS[kind], block_bytes(kind)
        self.start, self.blocks, self.row_scale = start, blocks, scale

    def _quarters(self, at: int) -> ir.Value:
        """16 bytes of each block, in the quarters of a vector."""
        e = self.e
        if self.blocks:
            parts = [e.load(e.at(block, at), _BYTES16, 1) for block in self.blocks]
            pairs = [_shuffle(e, x, y, list(range(32))) for x, y in (parts[:2], parts[2:])]
            return _shuffle(e, *pairs, list(range(64)))
        # One look-up in two vectors, which reach from the first of these bytes to the last.
        unit = 4 if self.size % 4 == 0 else 2
        type_ = ir.VectorType(ir.IntType(8 * unit), 64 // unit)
        last = (GROUP - 1) * self.size + 16 - 64
        low, high = (e.load(e.at(self.start, at + start), type_, 1) for start in (0, last))
        lanes = []
        for j in range(GROUP):
            first = j * self.size
            first = first // unit if first + 16 <= 64 else (64 + first - last) // unit
            lanes += range(first, first + 16 // unit)
        return e.b.bitcast(_shuffle(e, low, high, lanes), _BYTES64)

    def codes(self) -> list[ir.Value]:
        """Those of the first halves and of the second halves of the blocks, as unsigned bytes."""
        b, at = self.e.b, self.form.codes_at
        if self.form.is_nibbles:
            both = b.bitcast(self._quarters(at), ir.VectorType(I16, 32))
            high = b.lshr(both, ir.Constant(both.type, [4] * 32))
            return [b.and_(b.bitcast(x, INT_VECTOR), self.e.ints(0x0F0F0F0F)) for x in (both, high)]
        flip = 0x80808080 - 2**32  # adding 128 is flipping the highest bit
        return [b.xor(b.bitcast(self._quarters(at + j), INT_VECTOR), self.e.ints(flip)) for j in (0, LANES)]

    def _words(self, at: int) -> ir.Value:
        """The int32 at this offset of each block."""
        e = self.e
        if self.blocks:
            words: ir.Value = ir.Constant(_FOUR_INTS, ir.Undefined)
            for j, block in enumerate(self.blocks):
                words = e.b.insert_element(words, e.load(e.at(block, at), I32, 1), ir.Constant(I32, j))
            return words
        # Loaded so that each is in its place already: selecting costs less than moving.
        loads = [e.load(e.at(self.start, at + j * (self.size - 4)), _FOUR_INTS, 1) for j in range(GROUP)]
        words = loads[0]
        for j in range(1, GROUP):
            words = _shuffle(e, words, loads[j], [lane + GROUP * (lane == j) for lane in range(GROUP)])
        return words

    def scales(self) -> ir.Value:
        """Two numbers for each block: that of the code, or of first halves; the offset, or that of second halves."""
        e, b = self.e, self.e.b
        if self.kind in ROW_KINDS:
            return e.splat(e.load(self.row_scale, FLOAT, 1), 2 * GROUP)
        words = self._words(0)
        halves = b.fpext(b.bitcast(words, ir.VectorType(ir.HalfType(), 2 * GROUP)), _PAIRS)
        if self.kind in ("q8_0", "q4_1"):
            return halves
        if self.kind == "q4_k":
            return b.fmul(halves, self._two_bytes(self._words(2), signed=False))
        first = _shuffle(e, halves, halves, [0, 0, 2, 2, 4, 4, 6, 6])
        numbers = self._two_bytes(words, signed=self.kind == "q6_k")
        if self.kind == "q4_z":  # 1 and the zero point
            ones = ir.Constant(_PAIRS, [1.0] * 2 * GROUP)
            numbers = _shuffle(e, numbers, ones, [8, 0, 8, 2, 8, 4, 8, 6])
        return b.fmul(first, numbers)

    def _two_bytes(self, words: ir.Value, *, signed: bool) -> ir.Value:
        """The two highest bytes of each int32."""
        e, b = self.e, self.e.b
        both = b.bitcast(words, _BYTES16)
        both = _shuffle(e, both, both, [4 * j + byte for j in range(GROUP) for byte in (2, 3)])
        wide = ir.VectorType(I32, 2 * GROUP)
        return b.sitofp(b.sext(both, wide) if signed else b.zext(both, wide), _PAIRS)


class _Sums:
    """What one output and one row of x have added up."""

    def __init__(self, e: Emitter, form: Form) -> None:
        self.e, self.form = e, form
        self.products = cgutils.alloca_once(e.b, VECTOR)
        self.offsets = cgutils.alloca_once(e.b, _PAIRS)
        e.b.store(e.splat_const(0.0), self.products)
        e.b.store(ir.Constant(_PAIRS, [0.0] * 2 * GROUP), self.offsets)

    def add(self, codes: list[ir.Value], scales: ir.Value, x: ir.Value) -> None:
        """x: address of the group of a row of x."""
        e, b, form = self.e, self.e.b, self.form
        factors = b.fmul(scales, e.load(e.at(x, FACTORS_AT), _PAIRS, 32))
        if form.offset_sign:
            b.store(b.fadd(b.load(self.offsets), factors), self.offsets)
        halves = [[0], [1]] if form.is_split else [[0, 1]]
        for j, parts in enumerate(halves):
            total: ir.Value = e.ints(0)
            for place in range(_DIGITS):
                if place:
                    total = b.shl(total, e.ints(8))
                if form.bias and place == _DIGITS - 1:
                    total = b.add(total, e.load(e.at(x, _BIAS_AT + 64 * j), INT_VECTOR, 64))
                for part in parts:
                    digits = e.load(e.at(x, (part * _DIGITS + place) * 64), INT_VECTOR, 64)
                    total = e.dot_bytes(total, codes[part], digits)
            factor = _shuffle(e, factors, factors, [2 * (lane // 4) + j for lane in range(LANES)])
            sums = e.fma(b.sitofp(total, VECTOR), factor, b.load(self.products))
            b.store(sums, self.products)

    def vector(self) -> ir.Value:
        """What is left to be added up, in lanes."""
        e, products = self.e, self.e.b.load(self.products)
        if not self.form.offset_sign:
            return products
        zeros = ir.Constant(_PAIRS, [0.0] * 2 * GROUP)
        odd = [lane if lane % 2 else 2 * GROUP for lane in range(2 * GROUP)] + [2 * GROUP] * 2 * GROUP
        return e.b.fadd(products, _shuffle(e, e.b.load(self.offsets), zeros, odd))


def make_dots(kind: str) -> Any:
    """dots(rows, w, w_stride, x, x_stride, k, y, y_stride, outputs): y[rows, outputs] = x[rows, k] @ w[outputs, k].T

    rows is 1 to BLOCK_ROWS, x as `arrange` leaves it. Strides are in bytes.
    """

    def emit(e: Emitter, rows, w, w_stride, x, x_stride, k, y, y_stride, outputs) -> None:
        b = e.b

        def emit_rows(r: int) -> None:
            wide = 4 if r < 3 else 2  # enough sums to hide latency, few enough for the registers
            whole = b.mul(b.udiv(outputs, e.const(wide)), e.const(wide))
            for start, stop, width in ((e.const(0), whole, wide), (whole, outputs, 1)):
                with emit_loop(e, start, stop, width) as (n, _):
                    w_rows = [b.add(w, b.mul(b.add(n, e.const(j)), w_stride)) for j in range(width)]
                    x_rows = [b.add(x, b.mul(x_stride, e.const(m))) for m in range(r)]
                    totals = _emit_outputs(e, kind, w_rows, w_stride, x_rows, k)
                    y_start = b.add(y, b.mul(n, e.const(4)))
                    for i, total in enumerate(totals):
                        e.store(total, e.at(b.add(y_start, b.mul(y_stride, e.const(i % r))), 4 * (i // r)))

        emit_by_count(e, rows, BLOCK_ROWS, emit_rows)

    return void_intrinsic((types.intp,) * 9, emit)


def _emit_outputs(
    e: Emitter, kind: str, w_rows: list[ir.Value], w_stride: ir.Value, x_rows: list[ir.Value], k: ir.Value
) -> list[ir.Value]:
    """All rows of the first output, then of the second, and so on."""
    b, size = e.b, GROUP * block_bytes(kind)
    sums = [[_Sums(e, FORMS[kind]) for _ in x_rows] for _ in w_rows]
    ahead = b.add(w_rows[0], b.mul(w_stride, e.const(_AHEAD * len(w_rows))))

    def multiply(group: ir.Value, num_blocks: ir.Value | None) -> None:
        offset, x_offset = b.mul(group, e.const(size)), b.mul(group, e.const(GROUP_BYTES))
        fetched = b.add(ahead, b.mul(offset, e.const(len(w_rows))))
        for line in range(0, size * len(w_rows), 64):
            e.prefetch(e.at(fetched, line))
        for n, w_row in enumerate(w_rows):
            start, blocks = b.add(w_row, offset), None
            if num_blocks is not None:
                spare = b.add(x_rows[0], b.mul(b.add(group, e.const(1)), e.const(GROUP_BYTES)))
                blocks = [
                    b.select(b.icmp_unsigned("<", e.const(j), num_blocks), e.at(start, j * block_bytes(kind)), spare)
                    for j in range(GROUP)
                ]
            stored = _Group(e, kind, start, blocks, b.add(w_row, k))
            codes, scales = stored.codes(), stored.scales()
            for m, x_row in enumerate(x_rows):
                x = b.add(x_row, x_offset)
                # Of several rows the digits do not fit the registers: they are read where they are multiplied.
                sums[n][m].add(codes, scales, x if len(x_rows) == 1 else e.hidden(x))

    num_blocks = b.udiv(k, e.const(BLOCK))
    whole, rest = b.udiv(num_blocks, e.const(GROUP)), b.urem(num_blocks, e.const(GROUP))
    with emit_loop(e, 0, whole, 1) as (group, _):
        multiply(group, None)
    with b.if_then(b.icmp_unsigned("!=", rest, e.const(0))):
        multiply(whole, rest)
    return e.sum_lanes_of([one.vector() for of_output in sums for one in of_output])


def make_product(name: str, kind: str) -> tuple[Any, Any, Any]:
    """The parts of a handler for any number of rows, which are taken BLOCK_ROWS at a time."""
    arrange, dots = make_arrange(kind), make_dots(kind)
    stored_size, tail = block_bytes(kind), tail_bytes(kind)

    @named(name)
    def stored_bytes(frame):
        return frames.num_inputs(frame) // BLOCK * stored_size + tail

    @named(name)
    def x_bytes(frame):
        return (frames.num_inputs(frame) // BLOCK + GROUP - 1) // GROUP * GROUP_BYTES + ZERO_BLOCK_BYTES

    @named(name)
    def plan(frame):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), frames.num_outputs(frame)
        stored, row_bytes = stored_bytes(frame), x_bytes(frame)
        if not frames.has_shapes(frame, U8, stored, BLOCK):
            return BAD_ARGUMENTS
        threads = frames.num_workers(frame, outputs, stored, _MIN_THREAD_BYTES)
        made = frames.make_plan(outputs, threads, stored, _ITEM_BYTES, rows * row_bytes)
        if frames.is_plan(made):
            for m in range(rows):
                x, target = frames.x_data(frame) + m * k * 4, frames.work_space(made) + m * row_bytes
                for at in range((k // BLOCK) // GROUP * GROUP_BYTES, row_bytes, 8):
                    store_i64(target, at, 0)
                for i in range(k // BLOCK):
                    group, j = target + i // GROUP * GROUP_BYTES, i % GROUP
                    arrange(x + i * BLOCK * 4, group + 16 * j, group + FACTORS_AT + 8 * j)
        return made

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), frames.num_outputs(frame)
        stored, row_bytes, x = stored_bytes(frame), x_bytes(frame), frames.work_space(plan)
        first, count = frames.first_output(plan, i), frames.item_outputs(plan, i)
        w, y = frames.w_data(frame) + first * stored, frames.y_data(frame) + first * 4
        for m in range(0, rows, BLOCK_ROWS):
            dots(
                min(BLOCK_ROWS, rows - m), w, stored, x + m * row_bytes, row_bytes, k,
                y + m * outputs * 4, outputs * 4, count,
            )  # fmt: skip

    return frames.parts(plan, body)
