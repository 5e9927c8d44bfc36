"""Matrix products of CPU paged attention in vectors: scores, and weighted sums of values.

Every element is summed in the order of the inner index, whatever the number of rows and columns computed with it: by a
chain of fused multiply-adds in float32, or of dot products of pairs in bfloat16 (support.has_bf16_dot). In pairs the
right matrix has two numbers, one below the other, in each lane, and the left one two that are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I32, I64
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    BF16_PAIRS,
    LANES,
    LOCALITY_SECOND_CACHE,
    VECTOR,
    Emitter,
    emit_by_count,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import MAX_BLOCK_ROWS, TILE, emit_values
from llvmlite import ir
from numba import types
from numba.core import cgutils

LINE = 64  # bytes of the cache's
_INT = types.intp
LoadRow = Callable[[ir.Value, ir.Value, int], list[ir.Value]]  # (row, column, vectors): those of a matrix


def make_product(
    vectors: int,
    block_vectors: int,
    row_bytes: int,
    inner: int,
    *,
    parts: tuple[int, ...] = (),
    tokens_together: int = 1,
) -> Any:
    """product(rows, a, a_stride, b, b_stride, c, c_stride, first, last, add, ahead, offset):
    c[rows, 16 * vectors] = (add ? c : 0) + a[rows, first:last] @ b[first:last, 16 * vectors]

    rows is 1 to MAX_BLOCK_ROWS; strides are in bytes. Columns are taken block_vectors at a time. With `parts` the inner
    index counts pairs of bfloat16, and each number of a is a sum of as many, which lie so many bytes from a.

    ahead: addresses of a TILE of tokens, of which tokens_together lie together, or 0. What lies `offset` bytes from
    them, row_bytes for each token, is fetched meanwhile, a part for each of `inner` steps: many at once would be waited
    for by what comes next.
    """
    lines, num_addresses = tokens_together * -(-row_bytes // LINE), TILE // tokens_together
    per_step = -(-num_addresses * lines // (inner * -(-vectors // block_vectors)))

    def emit(e: Emitter, rows, a, a_stride, b_, b_stride, c, c_stride, first, last, add, ahead, offset) -> None:
        b = e.b

        def fetch(i: ir.Value, column: ir.Value) -> None:
            with b.if_then(b.icmp_unsigned("!=", ahead, e.const(0))):
                step = b.add(b.mul(b.udiv(column, e.const(LANES * block_vectors)), e.const(inner)), i)
                for n in range(per_step):
                    line = e.at(b.mul(step, e.const(per_step)), n)
                    place = b.udiv(line, e.const(lines))
                    within = b.mul(b.sub(line, b.mul(place, e.const(lines))), e.const(LINE))
                    last_place = e.const(num_addresses - 1)
                    place = b.select(b.icmp_unsigned("<", place, last_place), place, last_place)
                    row = e.load(b.add(ahead, b.mul(place, e.const(8))), I64, 8)
                    e.prefetch(b.add(b.add(row, offset), within), locality=LOCALITY_SECOND_CACHE)

        def load(i: ir.Value, column: ir.Value, width: int) -> list[ir.Value]:
            row = e.b.add(e.b.add(b_, e.b.mul(i, b_stride)), e.b.mul(column, e.const(4)))
            return [e.load(e.at(row, 64 * n)) for n in range(width)]

        _emit_product(e, vectors, block_vectors, load, fetch, parts, rows, a, a_stride, c, c_stride, first, last, add)

    return void_intrinsic((_INT,) * 12, emit)


def make_value_product(head_dim: int, kind: str, block_vectors: int) -> Any:
    """value_product(rows, weights, addresses, ahead, page_size, pages, scales, sums, first, last):
    sums[rows, head_dim] += weights[rows, first:last] @ V[first:last], read where it lies in its pages.

    For rows that one block holds: V needs no tile then, which would be written and read once. Every element is summed
    as make_product does it. Arguments are those of make_load_values and make_product.
    """

    def emit(e: Emitter, rows, weights, addresses, ahead, page_size, pages, scales, sums, first, last) -> None:
        def load(i: ir.Value, column: ir.Value, width: int) -> list[ir.Value]:
            return emit_values(e, head_dim, kind, column, width, addresses, ahead, page_size, pages, scales, i)

        def fetch(i: ir.Value, column: ir.Value) -> None:
            pass  # load does

        _emit_product(
            e, head_dim // LANES, block_vectors, load, fetch, (),
            rows, weights, e.const(4 * TILE), sums, e.const(4 * head_dim), first, last, e.const(1),
        )  # fmt: skip

    return void_intrinsic((_INT,) * 10, emit)


def _emit_product(
    e: Emitter,
    vectors: int,
    block_vectors: int,
    load: LoadRow,
    fetch: Callable[[ir.Value, ir.Value], None],
    parts: tuple[int, ...],
    rows: ir.Value,
    a: ir.Value,
    a_stride: ir.Value,
    c: ir.Value,
    c_stride: ir.Value,
    first: ir.Value,
    last: ir.Value,
    add: ir.Value,
) -> None:
    """make_product, with the right matrix as load makes it; fetch(row, column) is called beside it."""
    b = e.b

    def emit_block(num_rows: int, width: int, column: ir.Value) -> None:
        """One register block: num_rows times `width` vectors from `column` on."""
        target = b.add(c, b.mul(column, e.const(4)))
        a_rows = [b.add(a, b.mul(a_stride, e.const(r))) for r in range(num_rows)]
        c_rows = [b.add(target, b.mul(c_stride, e.const(r))) for r in range(num_rows)]
        sums = {(r, j): cgutils.alloca_once(b, VECTOR) for r in range(num_rows) for j in range(width)}
        with b.if_else(b.icmp_signed("!=", add, e.const(0))) as (has_start, from_zero):
            with has_start:
                for (r, j), slot in sums.items():
                    b.store(e.load(e.at(c_rows[r], 64 * j)), slot)
            with from_zero:
                for slot in sums.values():
                    b.store(e.splat_const(0.0), slot)
        with emit_loop(e, first, last, 1) as (i, _):
            right = load(i, column, width)
            fetch(i, column)
            for r, a_row in enumerate(a_rows):
                place = b.add(a_row, b.mul(i, e.const(4)))
                if not parts:
                    factor = e.splat(e.load(place, FLOAT))
                    for j in range(width):
                        b.store(e.fma(factor, right[j], b.load(sums[r, j])), sums[r, j])
                for part in parts:
                    pair = b.bitcast(e.splat(e.load(e.at(place, part), I32)), BF16_PAIRS)
                    for j in range(width):
                        total = e.dot_pairs(b.load(sums[r, j]), b.bitcast(right[j], BF16_PAIRS), pair)
                        b.store(total, sums[r, j])
        for (r, j), slot in sums.items():
            e.store(b.load(slot), e.at(c_rows[r], 64 * j))

    full = vectors // block_vectors
    for start, count, width in ((0, full, block_vectors), (full * block_vectors, 1, vectors % block_vectors)):
        if width == 0 or count == 0:
            continue

        def emit_rows(num_rows: int, start: int = start, count: int = count, width: int = width) -> None:
            begin = LANES * start
            with emit_loop(e, begin, begin + LANES * width * count, LANES * width) as (column, _):
                emit_block(num_rows, width, column)

        emit_by_count(e, rows, MAX_BLOCK_ROWS, emit_rows)
