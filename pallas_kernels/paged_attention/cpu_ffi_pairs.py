"""Tiles of CPU paged attention in pairs of bfloat16, from pages in that type: K and V go into them as they are.

Sixteen tokens lie together in a page, so one address is enough for all of them. Tiles are as cpu_ffi_vectors has them,
with two numbers in a lane: two dims of a key, or one dim of two tokens' values.

Only where support.has_bf16_dot(), for head_dim a multiple of 32 and pages of a multiple of 16 tokens.
"""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import I16, I32
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    INT_VECTOR,
    LANES,
    LOCALITY_SECOND_CACHE,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import TILE, widen
from llvmlite import ir
from numba import types

GROUPS = TILE // LANES  # of tokens that lie together, in a tile
_INT = types.intp


def make_split_row(head_dim: int) -> Any:
    """split_row(row): head_dim float32 as the sum of two bfloat16 each, in their place: all first ones, of the numbers
    rounded, and then of what rounding left."""

    def emit(e: Emitter, row: ir.Value) -> None:
        b = e.b
        values = [e.load(e.at(row, 4 * d)) for d in range(0, head_dim, LANES)]
        for part in range(2):
            narrow = [e.to_bf16(value) for value in values]
            for i, value in enumerate(narrow):
                e.store(value, e.at(row, 2 * (part * head_dim + i * LANES)), 2)
            values = [b.fsub(value, widen(e, short)) for value, short in zip(values, narrow)]

    return void_intrinsic((_INT,), emit)


def make_load_keys(head_dim: int) -> Any:
    """load_keys(rows, ahead, keys): K of 16 tokens, from `rows` on, into a tile, transposed; as many bytes from `ahead`
    on are fetched meanwhile. keys: column of the tile where the tokens start."""
    row_bytes = 2 * head_dim

    def emit(e: Emitter, rows, ahead, keys) -> None:
        b = e.b
        with emit_loop(e, 0, row_bytes, 4 * LANES) as (offset, _):
            start, fetched = b.add(rows, offset), b.add(ahead, offset)
            for i in range(LANES):
                e.prefetch(e.at(fetched, i * row_bytes), locality=LOCALITY_SECOND_CACHE)
            columns = e.transpose([e.load(e.at(start, i * row_bytes), INT_VECTOR, 4) for i in range(LANES)])
            target = b.add(keys, b.mul(offset, e.const(TILE)))
            for i, column in enumerate(columns):
                e.store(column, e.at(target, 4 * i * TILE))

    return void_intrinsic((_INT,) * 3, emit)


def make_load_values(head_dim: int) -> Any:
    """load_values(rows, low, high, values): V of 16 tokens, from `rows` on, into a tile, two tokens in a row of it; 0
    for those outside low : high, whose slots may never have been written."""
    shorts = ir.VectorType(I16, 2 * LANES)
    by_dim = [lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)]
    orders = [ir.Constant(ir.VectorType(I32, 2 * LANES), [lane + half for lane in by_dim]) for half in (0, LANES)]

    def emit(e: Emitter, rows, low, high, values) -> None:
        b = e.b

        def emit_pairs(*, is_whole: bool) -> None:
            with emit_loop(e, 0, LANES, 2) as (token, pair):
                row = b.add(rows, b.mul(token, e.const(2 * head_dim)))
                target = b.add(values, b.mul(pair, e.const(4 * head_dim)))
                for d in range(0, head_dim, 2 * LANES):
                    both = [e.load(e.at(row, 2 * (d + i * head_dim)), shorts, 2) for i in range(2)]
                    if not is_whole:
                        for i in range(2):
                            place = e.at(token, i)
                            inside = b.and_(b.icmp_signed(">=", place, low), b.icmp_signed("<", place, high))
                            both[i] = b.select(inside, both[i], ir.Constant(shorts, [0] * 2 * LANES))
                    for i, order in enumerate(orders):
                        e.store(b.shuffle_vector(*both, order), e.at(target, 4 * (d + i * LANES)))

        is_whole = b.and_(b.icmp_signed("<=", low, e.const(0)), b.icmp_signed(">=", high, e.const(LANES)))
        with b.if_else(is_whole) as (whole, part):
            with whole:
                emit_pairs(is_whole=True)
            with part:
                emit_pairs(is_whole=False)

    return void_intrinsic((_INT,) * 4, emit)
