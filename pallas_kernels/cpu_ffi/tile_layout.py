"""Tiles of 16 rows of 32 bfloat16, in memory: what products in tile registers and by pairs of vectors have in common.

Of out.T = w @ x.T the left matrix, w, lies as it is. The right one, x, lies in pairs of values, 16 rows of x side by
side: 16 lines of 64 bytes for each STEP values.
"""

from __future__ import annotations

from jaxserve.pallas_kernels.cpu_ffi.call_frame import I32
from jaxserve.pallas_kernels.cpu_ffi.vectors import INT_VECTOR, LANES, VECTOR, Emitter
from llvmlite import ir

ROWS = 16  # rows of a tile
LINE = 64  # bytes of a tile's row
STEP = 32  # values in bfloat16 of a tile's row
TILE_BYTES = ROWS * LINE


def emit_row_starts(e: Emitter, base: ir.Value, stride: ir.Value, count: ir.Value) -> list[ir.Value]:
    """Addresses of ROWS rows, `stride` bytes apart, of which there are `count`: missing ones repeat the last."""
    b = e.b
    last = b.sub(count, e.const(1))
    rows = [b.select(b.icmp_signed("<", e.const(row), last), e.const(row), last) for row in range(ROWS)]
    return [b.add(base, b.mul(row, stride)) for row in rows]


def emit_pairs(e: Emitter, rows: list[tuple[ir.Value, ir.Value]], tile: ir.Value) -> None:
    """ROWS rows of STEP bfloat16 values, in two halves of int16, as the tile of a right matrix: pairs of values, the
    rows side by side."""
    both = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    vectors = [e.b.bitcast(e.b.shuffle_vector(*halves, both), INT_VECTOR) for halves in rows]
    for pair, vector in enumerate(e.transpose(vectors)):
        e.store(vector, e.at(tile, LINE * pair), LINE)


def emit_transposed_sums(e: Emitter, tile: ir.Value, target: ir.Value, stride: ir.Value, count: ir.Value) -> None:
    """A tile of sums in memory, turned round: its first `count` columns as rows of `target`, `stride` bytes apart."""
    columns = e.transpose([e.load(e.at(tile, LINE * row), VECTOR, LINE) for row in range(ROWS)])
    for row, column in enumerate(columns):
        with e.b.if_then(e.b.icmp_signed("<", e.const(row), count)):
            e.store(column, e.b.add(target, e.b.mul(stride, e.const(row))))
