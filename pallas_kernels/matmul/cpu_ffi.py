"""Products of a few rows with a large weight on CPU: the weights are read once, as they are stored.

out[m, n] = sum over k of x[m, k] * w[n, k]. At few rows reading w is the cost, so work is cut along n and every
weight is used for all rows while it is in the cache. An output is 16 partial sums over k (every 16th element,
or every 16th pair) added up in a tree: the same arithmetic for any number of rows, so rows do not depend on
each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import BF16, F32, I16
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, named, register_handler
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot, has_wide_vectors
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    BF16_PAIRS,
    ELEMENT_BYTES,
    INT_VECTOR,
    LANES,
    VECTOR,
    Emitter,
    emit_by_count,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from llvmlite import ir
from numba import types
from numba.core import cgutils

# Up to how many rows these kernels beat XLA: benchmarks/cpu_kernels.py, AVX-512 with bf16 dot products.
MAX_ROWS = {"float32": 16, "bfloat16": 8}
STEP = 32  # elements of k per loop iteration; k must be a multiple

BLOCK_ROWS = 4  # rows of x per register block
_ITEM_BYTES = 65536  # weights per work item, at least
_MIN_THREAD_BYTES = 131072  # weights below which a second thread costs more than it saves


def linear_cpu(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, K] float32 times w [N, K] (float32 or bfloat16) -> [T, N] float32; K is a multiple of STEP.

    With bfloat16 weights x is rounded to bfloat16.
    """
    call = jax.ffi.ffi_call(
        _handler(np.dtype(w.dtype).name), jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    )
    return call(x, w)


@functools.cache
def _handler(kind: str) -> str:
    is_paired = kind == "bfloat16" and has_bf16_dot()
    name = f"jaxserve_linear_{kind}_{'dot' if is_paired else 'fma'}_w{int(has_wide_vectors())}"
    return register_handler(name, lambda: _make_handler(name, kind, is_paired))


def _outputs_per_block(rows: int) -> int:
    """Outputs computed at once: enough independent sums to hide latency, few enough for the registers."""
    if not has_wide_vectors():
        return {1: 4, 2: 2}.get(rows, 1)
    return 8 if rows == 1 else 4


# (emitter, start of a weight row, index of the first of STEP values, k) -> (where they lie, the values)
LoadWeights = Callable[[Emitter, ir.Value, ir.Value, ir.Value], tuple[ir.Value, list[ir.Value]]]


def make_block(
    kind: str, is_paired: bool, *, load_weights: LoadWeights | None = None, prefetch: int | None = None
) -> Any:
    """block(rows, w, w_stride, x, x_stride, k, y, y_stride, outputs):
    y[rows, outputs] = x[rows, k] @ w[outputs, k].T

    rows is 1 to BLOCK_ROWS. Strides are in bytes. Weights are of the same kind as x, or whatever load_weights
    turns into vectors. prefetch: bytes of the next outputs to fetch ahead per step; None: a step's weights.
    """

    def load_same(e: Emitter, row: ir.Value, i: ir.Value, k: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
        address = e.b.add(row, e.b.mul(i, e.const(ELEMENT_BYTES[kind])))
        return address, _load_step(e, kind, is_paired, address)

    load = load_weights or load_same
    if prefetch is None:
        prefetch = STEP * ELEMENT_BYTES[kind]

    def emit(e: Emitter, rows, w, w_stride, x, x_stride, k, y, y_stride, outputs) -> None:
        b = e.b

        def emit_rows(r: int) -> None:
            wide = _outputs_per_block(r)
            whole = b.mul(b.udiv(outputs, e.const(wide)), e.const(wide))
            for start, stop, width in ((e.const(0), whole, wide), (whole, outputs, 1)):
                with emit_loop(e, start, stop, width) as (n, _):
                    w_start, y_start = b.add(w, b.mul(n, w_stride)), b.add(y, b.mul(n, e.const(4)))
                    _emit_outputs(
                        e, load, prefetch, kind, is_paired, r, width,
                        w_start, w_stride, x, x_stride, k, y_start, y_stride,
                    )  # fmt: skip

        emit_by_count(e, rows, BLOCK_ROWS, emit_rows)

    return void_intrinsic((types.intp,) * 9, emit)


def _emit_outputs(
    e: Emitter,
    load: LoadWeights,
    prefetch: int,
    kind: str,
    is_paired: bool,
    rows: int,
    outputs: int,
    w: ir.Value,
    w_stride: ir.Value,
    x: ir.Value,
    x_stride: ir.Value,
    k: ir.Value,
    y: ir.Value,
    y_stride: ir.Value,
) -> None:
    b, size = e.b, ELEMENT_BYTES[kind]
    w_rows = [b.add(w, b.mul(w_stride, e.const(n))) for n in range(outputs)]
    x_rows = [b.add(x, b.mul(x_stride, e.const(m))) for m in range(rows)]
    ahead = b.mul(w_stride, e.const(outputs))  # the same columns of the next outputs
    sums = {(n, m): cgutils.alloca_once(b, VECTOR) for n in range(outputs) for m in range(rows)}
    for slot in sums.values():
        b.store(e.splat_const(0.0), slot)
    with emit_loop(e, 0, k, STEP) as (i, _):
        offset = b.mul(i, e.const(size))
        x_parts = [_load_step(e, kind, is_paired, b.add(row, offset)) for row in x_rows]
        for n, row in enumerate(w_rows):
            address, w_parts = load(e, row, i, k)
            for line in range(0, prefetch, 64):
                e.prefetch(e.at(b.add(address, ahead), line))
            for m, parts in enumerate(x_parts):
                total = b.load(sums[n, m])
                for w_part, x_part in zip(w_parts, parts):
                    total = e.dot_pairs(total, w_part, x_part) if is_paired else e.fma(w_part, x_part, total)
                b.store(total, sums[n, m])
    totals = e.sum_lanes_of([b.load(slot) for slot in sums.values()])
    for (n, m), total in zip(sums, totals):
        e.store(total, e.at(b.add(y, b.mul(y_stride, e.const(m))), 4 * n))


def _load_step(e: Emitter, kind: str, is_paired: bool, address: ir.Value) -> list[ir.Value]:
    """STEP elements as the vectors that are multiplied, in an order that is the same for x and w."""
    b = e.b
    if kind == "float32":
        return [e.load(address), e.load(e.at(address, 64))]
    if is_paired:
        return [b.bitcast(e.load(address, ir.VectorType(I16, STEP), 2), BF16_PAIRS)]
    pairs = e.load(address, INT_VECTOR, 2)
    even = b.shl(pairs, ir.Constant(INT_VECTOR, [16] * LANES))
    odd = b.and_(pairs, ir.Constant(INT_VECTOR, [-65536] * LANES))
    return [b.bitcast(even, VECTOR), b.bitcast(odd, VECTOR)]


def _make_convert(kind: str) -> Any:
    """convert(source, target): STEP elements of x, from float32 to `kind`."""

    def emit(e: Emitter, source: ir.Value, target: ir.Value) -> None:
        for i in range(0, STEP, LANES):
            e.store_as(e.load(e.at(source, 4 * i)), e.at(target, ELEMENT_BYTES[kind] * i), kind)

    return void_intrinsic((types.intp, types.intp), emit)


def _make_handler(name: str, kind: str, is_paired: bool) -> tuple[Any, Any, Any]:
    size, w_type = ELEMENT_BYTES[kind], F32 if kind == "float32" else BF16
    block, convert = make_block(kind, is_paired), _make_convert(kind)
    is_converted = kind != "float32"

    @named(name)
    def plan(frame):
        k = frames.num_inputs(frame)
        if not frames.has_shapes(frame, w_type, k, STEP):
            return BAD_ARGUMENTS
        x, count = frames.x_data(frame), frames.num_rows(frame) * k
        outputs = frames.num_outputs(frame)
        threads = frames.num_workers(frame, outputs, k * size, _MIN_THREAD_BYTES)
        made = frames.make_plan(outputs, threads, k * size, _ITEM_BYTES, count * size if is_converted else 0)
        if is_converted and frames.is_plan(made):
            target = frames.work_space(made)
            for i in range(0, count, STEP):
                convert(x + 4 * i, target + size * i)
        return made

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), frames.num_outputs(frame)
        x = frames.work_space(plan) if is_converted else frames.x_data(frame)
        first, count = frames.first_output(plan, i), frames.item_outputs(plan, i)
        w, y = frames.w_data(frame) + first * k * size, frames.y_data(frame) + first * 4
        for m in range(0, rows, BLOCK_ROWS):
            block(
                min(BLOCK_ROWS, rows - m), w, k * size, x + m * k * size, k * size, k,
                y + m * outputs * 4, outputs * 4, count,
            )  # fmt: skip

    return frames.parts(plan, body)
