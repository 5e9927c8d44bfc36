"""Products with quantised weights on CPU: the stored bytes are read once.

Where the CPU has dot products of bytes, forms whose codes are whole numbers are multiplied without being expanded
(cpu_ffi_byte_dots.py), whatever the number of rows. Else, at very few rows weights are expanded to float32 in
registers. With more, a few outputs at a time are expanded in a work space that stays in the cache and multiplied there
with all rows, so that expanding is paid once per weight. These two ways give, bit for bit, the result of the expanded
weights. Beyond MAX_ROWS the arithmetic costs more than the bytes: then expand_cpu writes the whole weight out for XLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    F32,
    FLOAT,
    I8,
    I32,
    U8,
    arg,
    data,
    dim,
    dtype,
    rank,
    ret,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, named, register_handler
from jaxserve.pallas_kernels.cpu_ffi.support import has_byte_dot, has_wide_vectors
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    ELEMENT_BYTES,
    INT_VECTOR,
    LANES,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul import cpu_ffi_byte_dots
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from jaxserve.pallas_kernels.matmul.cpu_ffi import BLOCK_ROWS, STEP, LoadWeights, make_block
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, FP8_SCALE, QuantizedWeight, block_bytes, tail_bytes
from llvmlite import ir
from numba import types

# Up to how many rows this beats expanding the weight for XLA (benchmarks/cpu_kernels.py).
MAX_ROWS = 16
FEW_ROWS = 2 * BLOCK_ROWS  # up to here weights are expanded in registers, again for each block of rows
_ITEM_BYTES = 32768  # of stored weights per work item, at least
_MIN_THREAD_BYTES = 32768
NIBBLES_AT = {"q4_1": 4, "q4_z": 4, "q4_k": 6}  # where in a block the codes of 4 bits begin


def linear_cpu_quantized(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """x [T, K] float32 times w [N, K] -> [T, N] float32; K is a multiple of STEP."""
    call = jax.ffi.ffi_call(_product(w.kind), jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))
    return call(x, w.codes)


def expand_cpu(w: QuantizedWeight) -> jax.Array:
    """The values [N, K] in the dtype that the weight asks for; K is a multiple of STEP."""
    call = jax.ffi.ffi_call(_expansion(w.kind, w.expanded), jax.ShapeDtypeStruct(w.shape, jnp.dtype(w.expanded)))
    return call(w.codes)


@functools.cache
def _product(kind: str) -> str:
    if has_byte_dot() and cpu_ffi_byte_dots.fits(kind):
        name = f"jaxserve_linear_{kind}_byte_dots"
        return register_handler(name, lambda: cpu_ffi_byte_dots.make_product(name, kind))
    name = f"jaxserve_linear_{kind}_w{int(has_wide_vectors())}"
    return register_handler(name, lambda: _make_product(name, kind))


@functools.cache
def _expansion(kind: str, target: str) -> str:
    name = f"jaxserve_expand_{kind}_{target}_w{int(has_wide_vectors())}"
    return register_handler(name, lambda: _make_expansion(name, kind, target))


def load_half(e: Emitter, block: ir.Value, at: int) -> ir.Value:
    """The float16 at this offset of a block, as float32."""
    return e.b.fpext(e.load(e.at(block, at), ir.HalfType(), 2), FLOAT)


def load_byte(e: Emitter, block: ir.Value, at: int, *, signed: bool = False) -> ir.Value:
    """The whole number at this offset of a block, as float32."""
    value = e.load(e.at(block, at), I8, 1)
    return e.b.sitofp(value, FLOAT) if signed else e.b.uitofp(value, FLOAT)


def make_loader(kind: str) -> LoadWeights:
    """STEP (one block of) stored weights as float32 vectors."""
    size = block_bytes(kind)
    bytes16 = ir.VectorType(I8, LANES)

    def load(e: Emitter, row: ir.Value, i: ir.Value, k: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        b = e.b
        block = b.add(row, b.mul(b.udiv(i, e.const(BLOCK)), e.const(size)))

        half, byte = functools.partial(load_half, e, block), functools.partial(load_byte, e, block)

        def nibbles() -> list[ir.Value]:
            codes = e.load(e.at(block, NIBBLES_AT[kind]), bytes16, 1)
            low = b.and_(codes, ir.Constant(bytes16, [15] * LANES))
            high = b.lshr(codes, ir.Constant(bytes16, [4] * LANES))
            return [b.sitofp(b.zext(part, INT_VECTOR), VECTOR) for part in (low, high)]

        def codes8(at: int, kind: str) -> list[ir.Value]:
            return [e.load_as_float(e.at(block, at + j), kind) for j in (0, LANES)]

        def times(values: list[ir.Value], factor: ir.Value) -> list[ir.Value]:
            wide = e.splat(factor)
            return [b.fmul(value, wide) for value in values]

        def fp8_factor(scale: ir.Value) -> ir.Value:
            return b.fmul(scale, ir.Constant(FLOAT, FP8_SCALE))

        if kind == "int8":
            return block, times(codes8(0, "int8"), e.load(b.add(row, k), FLOAT, 1))
        if kind == "fp8":
            return block, times(codes8(0, "fp8"), fp8_factor(e.load(b.add(row, k), FLOAT, 1)))
        if kind == "q8_0":
            return block, times(codes8(2, "int8"), half(0))
        if kind == "q4_1":
            # Both numbers in every pair of lanes, converted together: fewer shuffles than one after the other.
            pairs = b.bitcast(e.splat(e.load(block, I32, 2), LANES // 2), ir.VectorType(ir.HalfType(), LANES))
            wide = b.fpext(pairs, VECTOR)
            lanes = [[2 * (lane // 2) + odd for lane in range(LANES)] for odd in (0, 1)]
            factor, offset = (b.shuffle_vector(wide, wide, ir.Constant(INT_VECTOR, list(x))) for x in lanes)
            return block, [e.fma(value, factor, offset) for value in nibbles()]
        if kind == "q4_z":
            zero = e.splat(byte(2))
            return block, times([b.fsub(value, zero) for value in nibbles()], half(0))
        if kind == "q4_k":
            factor, offset = e.splat(b.fmul(half(0), byte(4))), e.splat(b.fmul(half(2), byte(5)))
            return block, [b.fsub(b.fmul(value, factor), offset) for value in nibbles()]
        if kind == "q6_k":
            factors = [e.splat(b.fmul(half(0), byte(at, signed=True))) for at in (2, 3)]
            return block, [b.fmul(value, factor) for value, factor in zip(codes8(4, "int8"), factors)]
        return block, times(codes8(4, "fp8"), fp8_factor(e.load(block, FLOAT, 1)))

    return load


def make_expand(kind: str, target_kind: str) -> Any:
    """expand(row, target, k): one stored row to float32 or bfloat16."""
    load, size = make_loader(kind), ELEMENT_BYTES[target_kind]

    def emit(e: Emitter, row: ir.Value, target: ir.Value, k: ir.Value) -> None:
        with emit_loop(e, 0, k, STEP) as (i, _):
            _, values = load(e, row, i, k)
            for j, value in enumerate(values):
                e.store_as(value, e.b.add(target, e.b.mul(e.b.add(i, e.const(LANES * j)), e.const(size))), target_kind)

    return void_intrinsic((types.intp,) * 3, emit)


def _make_product(name: str, kind: str) -> tuple[Any, Any, Any]:
    expand, expanded_block = make_expand(kind, "float32"), make_block("float32", False, prefetch=0)
    stored_block = make_block("float32", False, load_weights=make_loader(kind), prefetch=1)
    stored_size, tail, outputs_at_once = block_bytes(kind), tail_bytes(kind), frames.OUTPUTS

    @named(name)
    def stored_bytes(frame):
        return frames.num_inputs(frame) // BLOCK * stored_size + tail

    @named(name)
    def plan(frame):
        stored, outputs = stored_bytes(frame), frames.num_outputs(frame)
        if not frames.has_shapes(frame, U8, stored, STEP):
            return BAD_ARGUMENTS
        threads = frames.num_workers(frame, outputs, stored, _MIN_THREAD_BYTES)
        space = threads * outputs_at_once * frames.num_inputs(frame) * 4
        return frames.make_plan(outputs, threads, stored, _ITEM_BYTES, space)

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), frames.num_outputs(frame)
        stored, w, x, y = stored_bytes(frame), frames.w_data(frame), frames.x_data(frame), frames.y_data(frame)
        first, count = frames.first_output(plan, i), frames.item_outputs(plan, i)
        if rows <= FEW_ROWS:
            for m in range(0, rows, BLOCK_ROWS):
                stored_block(
                    min(BLOCK_ROWS, rows - m), w + first * stored, stored, x + m * k * 4, k * 4, k,
                    y + (m * outputs + first) * 4, outputs * 4, count,
                )  # fmt: skip
            return
        space = frames.work_space(plan) + worker * outputs_at_once * k * 4
        for n in range(first, first + count, outputs_at_once):
            wide = min(outputs_at_once, first + count - n)
            for j in range(wide):
                expand(w + (n + j) * stored, space + j * k * 4, k)
            for m in range(0, rows, BLOCK_ROWS):
                expanded_block(
                    min(BLOCK_ROWS, rows - m), space, k * 4, x + m * k * 4, k * 4, k,
                    y + (m * outputs + n) * 4, outputs * 4, wide,
                )  # fmt: skip

    return frames.parts(plan, body)


def _make_expansion(name: str, kind: str, target: str) -> tuple[Any, Any, Any]:
    expand, size, target_type = make_expand(kind, target), ELEMENT_BYTES[target], BF16 if target == "bfloat16" else F32
    stored_size, tail = block_bytes(kind), tail_bytes(kind)

    @named(name)
    def stored_bytes(frame):
        return dim(ret(frame, 0), 1) // BLOCK * stored_size + tail

    @named(name)
    def plan(frame):
        w, y, stored = arg(frame, 0), ret(frame, 0), stored_bytes(frame)
        if dtype(w) != U8 or dtype(y) != target_type or rank(w) != 2 or rank(y) != 2:
            return BAD_ARGUMENTS
        if dim(w, 0) != dim(y, 0) or dim(w, 1) != stored or dim(y, 1) % STEP != 0 or dim(y, 1) == 0:
            return BAD_ARGUMENTS
        threads = frames.num_workers(frame, dim(y, 0), stored, _MIN_THREAD_BYTES)
        return frames.make_plan(dim(y, 0), threads, stored, _ITEM_BYTES, 0)

    @named(name)
    def body(frame, plan, i, worker):
        k, stored = dim(ret(frame, 0), 1), stored_bytes(frame)
        first, count = frames.first_output(plan, i), frames.item_outputs(plan, i)
        w, y = data(arg(frame, 0)), data(ret(frame, 0))
        for n in range(first, first + count):
            expand(w + n * stored, y + n * k * size, k)

    return frames.parts(plan, body)
