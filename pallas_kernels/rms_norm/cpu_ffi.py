"""x + y and its RMS norm in one pass over memory: XLA's forms take five.

A row is summed up in one order, 16 lanes side by side, whoever computes it.
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
    arg,
    data,
    dim,
    dtype,
    rank,
    ret,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, named, register_handler
from jaxserve.pallas_kernels.cpu_ffi.row_items import first_row, free_rows, plan_rows
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot
from jaxserve.pallas_kernels.cpu_ffi.vectors import LANES, VECTOR, Emitter, emit_loop, void_intrinsic
from numba import types
from numba.core import cgutils

_TOGETHER = 2  # vectors of a row whose squares are added up side by side: a multiply-add takes four cycles
_STEP = _TOGETHER * LANES
_X, _Y, _WEIGHT, _EPS = range(4)


def fits(x: jax.Array) -> bool:
    """Whether add_rms_norm_cpu takes rows like those of x."""
    return x.ndim == 2 and x.shape[1] > 0 and x.shape[1] % _STEP == 0


def add_rms_norm_cpu(
    x: jax.Array, y: jax.Array, weight: jax.Array, *, eps: float, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """As api.add_rms_norm, for rows that `fits`."""
    rounds = dtype == jnp.bfloat16
    handler = _handler(rounds=rounds)
    outputs = jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct(x.shape, dtype)
    call = jax.ffi.ffi_call(handler, outputs, input_output_aliases={_X: 0})
    return tuple(call(x, y, weight, np.asarray([eps], np.float32)))


@functools.cache
def _handler(*, rounds: bool) -> str:
    if rounds and not has_bf16_dot():
        raise RuntimeError("norms in bfloat16: got a CPU without AVX-512 for it; allowed: float32")
    name = "jaxserve_add_rms_norm" + "_to_bf16" * rounds
    return register_handler(name, lambda: _make_handler(name, rounds))


def _make_row(rounds: bool) -> Any:
    """row(x, y, weight, eps, k, total, out): addresses of one row each; that of one number for eps."""

    def emit(e: Emitter, x, y, weight, eps, k, total, out) -> None:
        b = e.b
        parts = [cgutils.alloca_once(b, VECTOR) for _ in range(_TOGETHER)]
        for part in parts:
            b.store(e.splat_const(0.0), part)
        with emit_loop(e, 0, b.mul(k, e.const(4)), 4 * _STEP) as (offset, _):
            for n, part in enumerate(parts):
                place = e.at(offset, 4 * LANES * n)
                value = b.fadd(e.load(b.add(x, place)), e.load(b.add(y, place)))
                e.store(value, b.add(total, place))
                b.store(e.fma(value, value, b.load(part)), part)
        factor = e.rms_factor(functools.reduce(b.fadd, [b.load(part) for part in parts]), k, eps)
        with emit_loop(e, 0, b.mul(k, e.const(4)), 4 * LANES) as (offset, _):
            value = b.fmul(b.fmul(e.load(b.add(total, offset)), factor), e.load(b.add(weight, offset)))
            if rounds:
                e.store(e.to_bf16(value), b.add(out, b.lshr(offset, e.const(1))), 2)
            else:
                e.store(value, b.add(out, offset))

    return void_intrinsic((types.intp,) * 7, emit)


def _make_handler(name: str, rounds: bool) -> tuple[Any, Any, Any]:
    row, out_type, out_bytes = _make_row(rounds), BF16 if rounds else F32, 2 if rounds else 4

    @named(name)
    def has_shape(buffer, type_, rows, k):
        return dtype(buffer) == type_ and rank(buffer) == 2 and dim(buffer, 0) == rows and dim(buffer, 1) == k

    @named(name)
    def plan(frame):
        x, weight, eps = arg(frame, _X), arg(frame, _WEIGHT), arg(frame, _EPS)
        if rank(x) != 2:
            return BAD_ARGUMENTS
        rows, k = dim(x, 0), dim(x, 1)
        if k == 0 or k % _STEP != 0 or rank(weight) != 1 or dim(weight, 0) != k or dtype(weight) != F32:
            return BAD_ARGUMENTS
        if not has_shape(x, F32, rows, k) or not has_shape(arg(frame, _Y), F32, rows, k):
            return BAD_ARGUMENTS
        if not has_shape(ret(frame, 0), F32, rows, k) or not has_shape(ret(frame, 1), out_type, rows, k):
            return BAD_ARGUMENTS
        if rank(eps) != 1 or dim(eps, 0) != 1 or dtype(eps) != F32:
            return BAD_ARGUMENTS
        return plan_rows(frame, rows, k)

    @named(name)
    def body(frame, plan, i, worker):
        x, y, weight = data(arg(frame, _X)), data(arg(frame, _Y)), data(arg(frame, _WEIGHT))
        k = dim(arg(frame, _X), 1)
        eps, total, out = data(arg(frame, _EPS)), data(ret(frame, 0)), data(ret(frame, 1))
        for r in range(first_row(plan, i), first_row(plan, i + 1)):
            at = r * k * 4
            row(x + at, y + at, weight, eps, k, total + at, out + r * k * out_bytes)

    return plan, body, free_rows
