"""Products of a few rows with quantised weights on CPU: the stored bytes are read once.

At few rows weights are expanded to float32 in registers. With more, a few outputs at a time are
expanded in a work space that stays in the cache and multiplied there with all rows, so that expanding is paid
once per weight. Either way the result is, bit for bit, that of the expanded weights.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    F32,
    FLOAT,
    I8,
    U8,
    arg,
    data,
    dim,
    dtype,
    free,
    load_i64,
    malloc,
    num_threads,
    rank,
    ret,
    store_i64,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    BAD_ARGUMENTS,
    NO_MEMORY,
    PLAN_HEAD,
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
    register_handler,
)
from jaxserve.pallas_kernels.cpu_ffi.support import has_wide_vectors
from jaxserve.pallas_kernels.cpu_ffi.vectors import INT_VECTOR, LANES, VECTOR, Emitter, emit_loop, void_intrinsic
from jaxserve.pallas_kernels.matmul.cpu_ffi import BLOCK_ROWS, STEP, LoadWeights, make_block
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, QuantizedWeight, row_bytes
from llvmlite import ir
from numba import types

MAX_ROWS = 64  # up to how many rows this beats expanding the whole weight for XLA (benchmarks/cpu_kernels.py)
_DIRECT_ROWS = 2 * BLOCK_ROWS  # up to here expanding again for each block of rows is cheaper than a work space
_OUTPUTS = 8  # expanded at once
_ITEM_BYTES = 32768  # of stored weights per work item
_MIN_THREAD_BYTES = 32768
_X, _W = range(2)
_PER_ITEM, _RAW, _SPACE, _SPACE_BYTES, _PLAN_BYTES = PLAN_HEAD, PLAN_HEAD + 8, PLAN_HEAD + 16, PLAN_HEAD + 24, 64


def linear_cpu_quantized(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """x [T, K] float32 times w [N, K] -> [T, N] float32; K is a multiple of STEP."""
    call = jax.ffi.ffi_call(_handler(w.kind), jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))
    return call(x, w.codes)


@functools.cache
def _handler(kind: str) -> str:
    name = f"jaxserve_linear_{kind}_w{int(has_wide_vectors())}"
    return register_handler(name, lambda: _make_handler(name, kind))


def _loader(kind: str) -> LoadWeights:
    """STEP (one block of) stored weights as float32 vectors."""
    block_bytes = BLOCK if kind == "int8" else row_bytes(kind, BLOCK)
    bytes16 = ir.VectorType(I8, LANES)

    def load(e: Emitter, row: ir.Value, i: ir.Value, k: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        b = e.b

        def half(address: ir.Value) -> ir.Value:
            return e.splat(b.fpext(e.load(address, ir.HalfType(), 2), FLOAT))

        block = b.add(row, b.mul(b.udiv(i, e.const(BLOCK)), e.const(block_bytes)))
        if kind == "q4_1":
            codes, nibble = e.load(e.at(block, 4), bytes16, 1), ir.Constant(bytes16, [4] * LANES)
            parts = [b.and_(codes, ir.Constant(bytes16, [15] * LANES)), b.lshr(codes, nibble)]
            factor, offset = half(block), half(e.at(block, 2))
            return block, [e.fma(b.sitofp(b.zext(p, INT_VECTOR), VECTOR), factor, offset) for p in parts]
        if kind == "int8":
            start, factor = 0, e.splat(e.load(b.add(row, k), FLOAT, 1))
        else:
            start, factor = 2, half(block)
        return block, [b.fmul(e.load_as_float(e.at(block, start + j), "int8"), factor) for j in (0, LANES)]

    return load


def _make_expand(kind: str) -> Any:
    """expand(row, target, k): one stored row to float32."""
    load = _loader(kind)

    def emit(e: Emitter, row: ir.Value, target: ir.Value, k: ir.Value) -> None:
        with emit_loop(e, 0, k, STEP) as (i, _):
            _, values = load(e, row, i, k)
            for j, value in enumerate(values):
                e.store(value, e.at(e.b.add(target, e.b.mul(i, e.const(4))), 64 * j))

    return void_intrinsic((types.intp,) * 3, emit)


def _make_handler(name: str, kind: str) -> tuple[Any, Any, Any]:
    expand, expanded_block = _make_expand(kind), make_block("float32", False, prefetch=0)
    stored_block = make_block("float32", False, load_weights=_loader(kind), prefetch=1)
    tail, block_bytes = (4, BLOCK) if kind == "int8" else (0, row_bytes(kind, BLOCK))

    @named(name)
    def stored_bytes(frame):
        return dim(arg(frame, _X), 1) // BLOCK * block_bytes + tail

    @named(name)
    def plan(frame):
        x, w, y = arg(frame, _X), arg(frame, _W), ret(frame, 0)
        if dtype(x) != F32 or dtype(w) != U8 or rank(x) != 2 or rank(w) != 2 or rank(y) != 2:
            return BAD_ARGUMENTS
        k, outputs = dim(x, 1), dim(w, 0)
        if k == 0 or k % STEP != 0 or dim(w, 1) != stored_bytes(frame):
            return BAD_ARGUMENTS
        if dim(y, 0) != dim(x, 0) or dim(y, 1) != outputs:
            return BAD_ARGUMENTS
        threads = max(1, min(num_threads(frame), outputs * stored_bytes(frame) // _MIN_THREAD_BYTES))
        per_item = outputs
        if threads > 1:
            per_item = min(_ITEM_BYTES // stored_bytes(frame), outputs // threads) // _OUTPUTS * _OUTPUTS
        per_item = max(per_item, _OUTPUTS)
        space = _OUTPUTS * k * 4
        raw = malloc(_PLAN_BYTES + 64 + threads * space)
        if raw == 0:
            return NO_MEMORY
        plan_address = (raw + 63) // 64 * 64
        store_i64(plan_address, PLAN_ITEMS, (outputs + per_item - 1) // per_item)
        store_i64(plan_address, PLAN_THREADS, threads)
        store_i64(plan_address, _PER_ITEM, per_item)
        store_i64(plan_address, _RAW, raw)
        store_i64(plan_address, _SPACE, plan_address + _PLAN_BYTES)
        store_i64(plan_address, _SPACE_BYTES, space)
        return plan_address

    @named(name)
    def body(frame, plan_address, i, worker):
        rows, k, outputs = dim(arg(frame, _X), 0), dim(arg(frame, _X), 1), dim(arg(frame, _W), 0)
        per_item, stored = load_i64(plan_address, _PER_ITEM), stored_bytes(frame)
        x, w, y = data(arg(frame, _X)), data(arg(frame, _W)), data(ret(frame, 0))
        space = load_i64(plan_address, _SPACE) + worker * load_i64(plan_address, _SPACE_BYTES)
        if rows <= _DIRECT_ROWS:
            first = i * per_item
            count = min(per_item, outputs - first)
            for m in range(0, rows, BLOCK_ROWS):
                stored_block(
                    min(BLOCK_ROWS, rows - m), w + first * stored, stored, x + m * k * 4, k * 4, k,
                    y + (m * outputs + first) * 4, outputs * 4, count,
                )  # fmt: skip
            return
        for n in range(i * per_item, min(outputs, (i + 1) * per_item), _OUTPUTS):
            count = min(_OUTPUTS, outputs - n)
            for j in range(count):
                expand(w + (n + j) * stored, space + j * k * 4, k)
            for m in range(0, rows, BLOCK_ROWS):
                expanded_block(
                    min(BLOCK_ROWS, rows - m), space, k * 4, x + m * k * 4, k * 4, k,
                    y + (m * outputs + n) * 4, outputs * 4, count,
                )  # fmt: skip

    @named(name)
    def finish(frame, plan_address):
        free(load_i64(plan_address, _RAW))

    return plan, body, finish
