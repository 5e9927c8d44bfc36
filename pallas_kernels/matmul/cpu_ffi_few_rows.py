"""One or two tiles of outputs times a few rows of x, by dot products of pairs: the inner loop of cpu_ffi_tiles where
most lanes of a block of rows would be empty.

The lanes are 16 outputs here: their weights are turned round on the way, STEP values of each at a time, and a pair of a
row of x is taken from memory into all lanes. Every sum is made of the same pairs in the same order as with the rows in
the lanes, so it has the same bits.
"""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import I32
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, STEP
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    BF16_PAIRS,
    INT_VECTOR,
    LOCALITY_SECOND_CACHE,
    VECTOR,
    Emitter,
    emit_by_count,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_products import PAIR, emit_activation
from numba import types
from numba.core import cgutils

# Numbers of rows that there is code for; others repeat their last row. The most is where turning weights round costs as
# much as the empty lanes would.
_ROW_COUNTS = (1, 4, 8, 12)
FEW_ROWS = _ROW_COUNTS[-1]


def make_product_of_few(activation: str = "") -> Any:
    """product(rows, outputs, w, apart, w_stride, x, k, y, y_stride, fetch, fetch_step): one or two tiles of outputs
    times 1 to FEW_ROWS rows of x, which lie there as bfloat16, one behind the other. Arguments and activation as those
    of make_product; each tile's loop fetches its half of fetch_step, or with an activation all of it."""

    def emit(e: Emitter, rows, outputs, w, apart, w_stride, x, k, y, y_stride, fetch, fetch_step) -> None:
        b = e.b
        x_stride, steps = b.mul(k, e.const(2)), b.udiv(k, e.const(STEP))
        share = fetch_step if activation else b.udiv(fetch_step, e.const(PAIR))
        fetch_apart = apart if activation else b.mul(steps, share)

        def emit_rows(num_rows: int) -> None:
            last = b.sub(rows, e.const(1))
            numbers = [b.select(b.icmp_signed("<", e.const(r), last), e.const(r), last) for r in range(num_rows)]
            x_rows = [b.add(x, b.mul(x_stride, number)) for number in numbers]
            y_rows = [b.add(y, b.mul(y_stride, number)) for number in numbers]
            sums = [cgutils.alloca_once(b, VECTOR) for _ in numbers]
            gates = [cgutils.alloca_once(b, VECTOR) for _ in numbers]
            with emit_loop(e, 0, outputs, 1) as (n, _):
                start, lines = b.add(w, b.mul(n, apart)), b.add(fetch, b.mul(n, fetch_apart))
                starts = [b.add(start, b.mul(w_stride, e.const(row))) for row in range(ROWS)]
                for total in sums:
                    b.store(e.splat_const(0.0), total)
                with emit_loop(e, 0, k, STEP) as (i, count):
                    ahead = b.add(lines, b.mul(count, share))
                    with emit_loop(e, 0, share, LINE) as (line, _):
                        e.prefetch(b.add(ahead, line), locality=LOCALITY_SECOND_CACHE)
                    offset = b.mul(i, e.const(2))
                    pairs = e.transpose([e.load(b.add(row, offset), INT_VECTOR) for row in starts])
                    for pair, weights in enumerate(pairs):
                        for x_row, total in zip(x_rows, sums):
                            numbers = e.splat(e.load(e.at(b.add(x_row, offset), 4 * pair), I32))
                            dot = e.dot_pairs(b.load(total), *(b.bitcast(v, BF16_PAIRS) for v in (weights, numbers)))
                            b.store(dot, total)
                if not activation:
                    for y_row, total in zip(y_rows, sums):
                        e.store(b.load(total), b.add(y_row, b.mul(n, e.const(LINE))))
                    return
                with b.if_else(b.icmp_signed("==", n, e.const(0))) as (is_gate, is_factor):
                    with is_gate:
                        for gate, total in zip(gates, sums):
                            b.store(b.load(total), gate)
                    with is_factor:
                        for y_row, gate, total in zip(y_rows, gates, sums):
                            e.store(b.fmul(emit_activation(e, activation, b.load(gate)), b.load(total)), y_row)

        following = b.add(b.udiv(b.add(rows, e.const(3)), e.const(4)), e.const(1))
        place = b.select(b.icmp_signed("==", rows, e.const(1)), e.const(1), following)
        emit_by_count(e, place, len(_ROW_COUNTS), lambda place: emit_rows(_ROW_COUNTS[place - 1]))

    return void_intrinsic((types.intp,) * 11, emit)
