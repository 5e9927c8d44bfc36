"""Stored weights of 16 outputs as the bfloat16 that a tile register takes, by the CPU's own conversions.

What a block has of scales is read for 16 outputs at once, converted once, and then taken from memory by the
instructions that need it in all lanes: shuffles, of which the look-ups have enough, are what limits this code.
Only where support.has_bf16_dot().
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.pallas_kernels.cpu_ffi.call_frame import BYTE_POINTER, FLOAT, I1, I8, I16, I32
from jaxserve.pallas_kernels.cpu_ffi.vectors import BF16_PAIRS, INT_VECTOR, LANES, VECTOR, Emitter, emit_loop
from jaxserve.pallas_kernels.matmul.cpu_ffi import STEP
from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import NIBBLES_AT, make_loader
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, block_bytes
from llvmlite import ir

SCALE_BYTES = 2 * 4 * LANES  # work space of an ExpandTile: two numbers per output
_SHORTS = ir.VectorType(I16, STEP)
_BYTES = ir.VectorType(I8, LANES)

# (emitter, the first output's weights, bytes from output to output, index of the first of STEP values, k,
#  where the values go, bytes from output to output there, work space)
ExpandTile = Callable[[Emitter, ir.Value, ir.Value, ir.Value, ir.Value, ir.Value, ir.Value, ir.Value], None]


def make_expand_tile(kind: str) -> ExpandTile:
    """Emits LANES outputs x STEP stored weights as bfloat16."""
    if kind in NIBBLES_AT:
        return _make_look_up(kind)
    return _make_scaled_bytes() if kind == "q8_0" else _make_row_by_row(kind)


def _narrow(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors rounded to bfloat16, as 32 int16. Subnormal ones become 0."""
    convert = e.function("llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_PAIRS, [VECTOR, VECTOR])
    return e.b.bitcast(e.b.call(convert, [high, low]), _SHORTS)


def _make_row_by_row(kind: str) -> ExpandTile:
    load = make_loader(kind)

    def emit(e, w, w_stride, i, k, target, target_stride, space) -> None:
        b = e.b
        with emit_loop(e, 0, LANES, 1) as (n, _):
            _, values = load(e, b.add(w, b.mul(n, w_stride)), i, k)
            e.store(_narrow(e, *values), b.add(target, b.mul(n, target_stride)), 2 * STEP)

    return emit


def _gather(e: Emitter, address: ir.Value, stride: ir.Value) -> ir.Value:
    """The int32 at `address` and at LANES - 1 further strides."""
    b = e.b
    offsets = b.mul(e.splat(b.trunc(stride, I32)), ir.Constant(INT_VECTOR, list(range(LANES))))
    everywhere = ir.Constant(ir.VectorType(I1, LANES), [1] * LANES)
    gather = e.function(
        "llvm.x86.avx512.mask.gather.dpi.512", INT_VECTOR, [INT_VECTOR, BYTE_POINTER, INT_VECTOR, everywhere.type, I32]
    )
    nothing = ir.Constant(INT_VECTOR, [0] * LANES)
    return b.call(gather, [nothing, b.inttoptr(address, BYTE_POINTER), offsets, everywhere, ir.Constant(I32, 1)])


def _field(e: Emitter, words: ir.Value, shift: int, kind: str) -> ir.Value:
    """A float16 or uint8 at bit `shift` of each int32, as float32."""
    b = e.b
    words = b.lshr(words, ir.Constant(INT_VECTOR, [shift] * LANES))
    if kind == "uint8":
        return b.sitofp(b.and_(words, ir.Constant(INT_VECTOR, [255] * LANES)), VECTOR)
    halves = b.bitcast(b.trunc(words, ir.VectorType(I16, LANES)), ir.VectorType(ir.HalfType(), LANES))
    return b.fpext(halves, VECTOR)


def _store_halves(e: Emitter, address: ir.Value, stride: ir.Value, space: ir.Value) -> ir.Value:
    """The two float16 at `address` and at LANES - 1 further strides, as float32 in `space`; returns where to read them.

    Conversions out of memory need no shuffle, nor do broadcasts. The compiler would rather keep all of it in registers:
    it must not see that what is read is what was written.
    """
    halves = ir.VectorType(ir.HalfType(), 4)  # what an instruction takes; blocks are longer than that
    first_two = ir.Constant(ir.VectorType(I32, 2), [0, 1])
    for n in range(LANES):
        wide = e.b.fpext(e.load(e.b.add(address, e.b.mul(stride, e.const(n))), halves, 1), ir.VectorType(FLOAT, 4))
        e.store(e.b.shuffle_vector(wide, wide, first_two), e.at(space, 8 * n), 8)
    return e.hidden(space)


def _everywhere(e: Emitter, address: ir.Value, n: int) -> ir.Value:
    """The n-th float32 of `address` in all lanes."""
    return e.splat(e.load(e.at(address, 4 * n), FLOAT))


def _make_scaled_bytes() -> ExpandTile:
    """Form q8_0."""

    def emit(e, w, w_stride, i, k, target, target_stride, space) -> None:
        b = e.b
        block = b.add(w, b.mul(b.udiv(i, e.const(BLOCK)), e.const(block_bytes("q8_0"))))
        scales = _store_halves(e, block, w_stride, space)
        for n in range(LANES):
            codes = e.at(b.add(block, b.mul(w_stride, e.const(n))), 2)
            factor = _everywhere(e, scales, 2 * n)
            values = [b.fmul(e.load_as_float(e.at(codes, j), "int8"), factor) for j in (0, LANES)]
            e.store(_narrow(e, *values), b.add(target, b.mul(target_stride, e.const(n))), 2 * STEP)

    return emit


def _make_look_up(kind: str) -> ExpandTile:
    """Codes of 4 bits: a block has 16 values, which are computed and then looked up. Two blocks share a table."""
    all_codes = ir.Constant(VECTOR, [float(code) for code in range(LANES)])
    twice = ir.Constant(ir.VectorType(I32, STEP), 2 * list(range(LANES)))
    shifts = ir.Constant(_SHORTS, [0] * LANES + [4] * LANES)
    four_bits, upper = (ir.Constant(_SHORTS, [value] * STEP) for value in (15, 16))

    def scales(e: Emitter, block: ir.Value, stride: ir.Value, space: ir.Value) -> tuple[ir.Value, ir.Value, int]:
        """Where factors and offsets lie, and the step from one to the next."""
        if kind == "q4_1":
            place = _store_halves(e, block, stride, space)
            return place, e.at(place, 4), 2
        head = _gather(e, block, stride)
        if kind == "q4_z":
            numbers = [_field(e, head, 0, "float16"), _field(e, head, 16, "uint8")]
        else:
            of_block = _gather(e, e.at(block, 4), stride)
            numbers = [
                e.b.fmul(_field(e, head, 16 * j, "float16"), _field(e, of_block, 8 * j, "uint8")) for j in (0, 1)
            ]
        for j, number in enumerate(numbers):
            e.store(number, e.at(space, 4 * LANES * j), 4 * LANES)
        place = e.hidden(space)
        return place, e.at(place, 4 * LANES), 1

    def values(e: Emitter, factor: ir.Value, offset: ir.Value) -> ir.Value:
        """As make_loader has them."""
        if kind == "q4_1":
            return e.fma(all_codes, factor, offset)
        if kind == "q4_z":
            return e.b.fmul(e.b.fsub(all_codes, offset), factor)
        return e.b.fsub(e.b.fmul(all_codes, factor), offset)

    def emit(e, w, w_stride, i, k, target, target_stride, space) -> None:
        b = e.b
        block = b.add(w, b.mul(b.udiv(i, e.const(BLOCK)), e.const(block_bytes(kind))))
        factors, offsets, step = scales(e, block, w_stride, space)
        look_up = e.function("llvm.x86.avx512.permvar.hi.512", _SHORTS, [_SHORTS, _SHORTS])
        for n in range(0, LANES, 2):
            both = [[_everywhere(e, place, step * m) for place in (factors, offsets)] for m in (n, n + 1)]
            table = _narrow(e, *(values(e, *numbers) for numbers in both))
            for m in (n, n + 1):
                stored = e.load(e.at(b.add(block, b.mul(w_stride, e.const(m))), NIBBLES_AT[kind]), _BYTES, 1)
                codes = b.and_(b.lshr(b.zext(b.shuffle_vector(stored, stored, twice), _SHORTS), shifts), four_bits)
                if m > n:
                    codes = b.or_(codes, upper)
                e.store(b.call(look_up, [table, codes]), b.add(target, b.mul(target_stride, e.const(m))), 2 * STEP)

    return emit
