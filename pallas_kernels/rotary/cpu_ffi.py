"""Heads split, normalised and rotated in one pass over memory: XLA makes one of each step and each kind of head."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import F32, arg, data, dim, dtype, rank, ret
from jaxserve.pallas_kernels.cpu_ffi.parallel import BAD_ARGUMENTS, named, register_handler
from jaxserve.pallas_kernels.cpu_ffi.row_items import first_row, free_rows, plan_rows
from jaxserve.pallas_kernels.cpu_ffi.vectors import LANES, VECTOR, Emitter, emit_loop, void_intrinsic
from llvmlite import ir
from numba import types
from numba.core import cgutils

_QKV, _COS, _SIN, _Q_WEIGHT, _K_WEIGHT, _EPS = range(6)  # arguments, the last three with norms alone
_Q, _K, _V = range(3)  # results


def fits(qkv: jax.Array, cos: jax.Array) -> bool:
    """Whether vectors divide heads [T, H, D] and the part of them that turns, cos [T, R]."""
    return qkv.ndim == 3 and qkv.shape[2] % LANES == 0 and cos.shape[1] % LANES == 0 and cos.shape[1] > 0


def rotate_heads_cpu(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    norm_weights: tuple[jax.Array, jax.Array] | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As api.rotate_heads, for heads that `fits`."""
    num_tokens, heads, head_dim = qkv.shape
    kv_shape = jax.ShapeDtypeStruct((num_tokens, (heads - num_heads) // 2, head_dim), jnp.float32)
    shapes = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), jnp.float32), kv_shape, kv_shape
    norms = () if norm_weights is None else (*norm_weights, np.asarray([eps], np.float32))
    return tuple(jax.ffi.ffi_call(_handler(normalises=norm_weights is not None), shapes)(qkv, cos, sin, *norms))


@functools.cache
def _handler(*, normalises: bool) -> str:
    name = "jaxserve_rotate_heads" + "_normalised" * normalises
    return register_handler(name, lambda: _make_handler(name, normalises))


def _make_rotate(normalises: bool) -> Any:
    """rotate(x, cos, sin, weight, eps, head_dim, half, out): addresses of one head each; that of one number for eps."""

    def emit(e: Emitter, x, cos, sin, weight, eps, head_dim, half, out) -> None:
        b = e.b
        end, middle = b.mul(head_dim, e.const(4)), b.mul(half, e.const(4))
        factor = None
        if normalises:
            squares = cgutils.alloca_once(b, VECTOR)
            b.store(e.splat_const(0.0), squares)
            with emit_loop(e, 0, end, 4 * LANES) as (offset, _):
                value = e.load(b.add(x, offset))
                b.store(e.fma(value, value, b.load(squares)), squares)
            factor = e.rms_factor(b.load(squares), head_dim, eps)

        def value_at(offset: ir.Value) -> ir.Value:
            value = e.load(b.add(x, offset))
            return value if factor is None else b.fmul(b.fmul(value, factor), e.load(b.add(weight, offset)))

        with emit_loop(e, 0, middle, 4 * LANES) as (offset, _):
            above = b.add(offset, middle)
            first, second = value_at(offset), value_at(above)
            cosine, sine = e.load(b.add(cos, offset)), e.load(b.add(sin, offset))
            e.store(b.fsub(b.fmul(first, cosine), b.fmul(second, sine)), b.add(out, offset))
            e.store(b.fadd(b.fmul(second, cosine), b.fmul(first, sine)), b.add(out, above))
        with emit_loop(e, b.mul(middle, e.const(2)), end, 4 * LANES) as (offset, _):
            e.store(value_at(offset), b.add(out, offset))

    return void_intrinsic((types.intp,) * 8, emit)


def _make_copy() -> Any:
    """copy(x, count, out): float32, a multiple of LANES."""

    def emit(e: Emitter, x, count, out) -> None:
        with emit_loop(e, 0, e.b.mul(count, e.const(4)), 4 * LANES) as (offset, _):
            e.store(e.load(e.b.add(x, offset)), e.b.add(out, offset))

    return void_intrinsic((types.intp,) * 3, emit)


def _make_handler(name: str, normalises: bool) -> tuple[Any, Any, Any]:
    rotate, copy = _make_rotate(normalises), _make_copy()

    @named(name)
    def has_heads(buffer, tokens, head_dim):
        if dtype(buffer) != F32 or rank(buffer) != 3:
            return False
        return dim(buffer, 0) == tokens and dim(buffer, 2) == head_dim

    @named(name)
    def has_columns(buffer, rows, columns):
        return dtype(buffer) == F32 and rank(buffer) == 2 and dim(buffer, 0) == rows and dim(buffer, 1) == columns

    @named(name)
    def has_length(buffer, length):
        return dtype(buffer) == F32 and rank(buffer) == 1 and dim(buffer, 0) == length

    @named(name)
    def plan(frame):
        qkv, cos = arg(frame, _QKV), arg(frame, _COS)
        if rank(qkv) != 3 or rank(cos) != 2:
            return BAD_ARGUMENTS
        tokens, heads, head_dim, half = dim(qkv, 0), dim(qkv, 1), dim(qkv, 2), dim(cos, 1)
        if head_dim % LANES != 0 or half % LANES != 0 or 2 * half > head_dim:
            return BAD_ARGUMENTS
        for i in range(3):
            if not has_heads(ret(frame, i), tokens, head_dim):
                return BAD_ARGUMENTS
        kv_heads = dim(ret(frame, _K), 1)
        if dim(ret(frame, _V), 1) != kv_heads or dim(ret(frame, _Q), 1) + 2 * kv_heads != heads:
            return BAD_ARGUMENTS
        if not has_heads(qkv, tokens, head_dim) or not has_columns(cos, tokens, half):
            return BAD_ARGUMENTS
        if not has_columns(arg(frame, _SIN), tokens, half):
            return BAD_ARGUMENTS
        if normalises:
            if not has_length(arg(frame, _Q_WEIGHT), head_dim) or not has_length(arg(frame, _K_WEIGHT), head_dim):
                return BAD_ARGUMENTS
            if not has_length(arg(frame, _EPS), 1):
                return BAD_ARGUMENTS
        return plan_rows(frame, tokens, max(heads * head_dim, 1))

    @named(name)
    def body(frame, plan, i, worker):
        heads, head_dim, half = dim(arg(frame, _QKV), 1), dim(arg(frame, _QKV), 2), dim(arg(frame, _COS), 1)
        q_heads, kv_heads = dim(ret(frame, _Q), 1), dim(ret(frame, _K), 1)
        size = 4 * head_dim
        q_weight = data(arg(frame, _Q_WEIGHT)) if normalises else 0
        k_weight = data(arg(frame, _K_WEIGHT)) if normalises else 0
        eps = data(arg(frame, _EPS)) if normalises else 0
        for token in range(first_row(plan, i), first_row(plan, i + 1)):
            x = data(arg(frame, _QKV)) + token * heads * size
            cos, sin = data(arg(frame, _COS)) + token * half * 4, data(arg(frame, _SIN)) + token * half * 4
            q, k = data(ret(frame, _Q)) + token * q_heads * size, data(ret(frame, _K)) + token * kv_heads * size
            for head in range(q_heads):
                rotate(x + head * size, cos, sin, q_weight, eps, head_dim, half, q + head * size)
            x += q_heads * size
            for head in range(kv_heads):
                rotate(x + head * size, cos, sin, k_weight, eps, head_dim, half, k + head * size)
            x += kv_heads * size
            copy(x, kv_heads * head_dim, data(ret(frame, _V)) + token * kv_heads * size)

    return plan, body, free_rows
