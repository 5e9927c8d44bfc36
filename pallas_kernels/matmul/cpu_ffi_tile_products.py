"""One or two tiles of outputs times one or two blocks of 16 rows of x: the inner loops of cpu_ffi_tiles.

Tile registers hold 16 rows of 64 bytes; one instruction multiplies 16 outputs x 32 values of the weights with 32 values
of 16 rows of x and adds to 16 x 16 sums. Without them the 16 rows of x are the lanes of a vector, and an instruction
multiplies their next two values with two of an output's, taken from memory into all lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I1, I32
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, STEP, TILE_BYTES, emit_transposed_sums
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import W_TILES, X_TILES, Tiles
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    BFLOAT,
    LANES,
    LOCALITY_SECOND_CACHE,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_weights import SCALE_BYTES, ExpandTile
from llvmlite import ir
from numba import types
from numba.core import cgutils

PAIR = 2  # tiles computed side by side, of outputs and of rows: four sums, for which eight registers suffice
_BUFFER_BYTES = PAIR * TILE_BYTES  # the expanded weights of one step; two of them
SCRATCH_BYTES = PAIR * PAIR * TILE_BYTES + 2 * _BUFFER_BYTES + SCALE_BYTES


class Dots(NamedTuple):
    """How sums are made without tile registers.

    together    how many vectors of sums: enough to hide the latency of a dot product, few enough for the registers
    emit_step   (emitter, index of the first of STEP values, number of the step, k, starts of the outputs' weights,
                starts of the blocks of x, where the sums [output, block] are, lanes): adds STEP products to all of them
    """

    together: int
    emit_step: Callable[..., None]


def make_product(
    expand_tile: ExpandTile | None, *, in_registers: bool, activation: str = "", dots: Dots | None = None
) -> Any:
    """product(outputs, blocks, w, apart, w_stride, x, x_stride, k, y, y_stride, rows, scratch, fetch, fetch_step): one
    or two tiles of outputs times one or two packed blocks of x; `rows` of the last block of y are written.

    Strides in bytes; x_stride from block to block; the second tile's weights lie `apart` from the first's. scratch has
    SCRATCH_BYTES. fetch_step bytes are fetched ahead per step. With expand_tile w is as stored, which is for tile
    registers alone, else what `dots` takes: bfloat16 if None.

    With an activation, of the first tile, y is it times the second tile, of which there is always one; then fetch_step
    bytes are fetched of what comes behind each.
    """

    def emit(
        e: Emitter, outputs, blocks, w, apart, w_stride, x, x_stride, k, y, y_stride, rows, scratch, fetch, fetch_step
    ) -> None:
        b = e.b
        with emit_loop(e, 0, b.add(b.mul(b.sub(blocks, e.const(1)), e.const(ROWS)), rows), 1) as (row, _):
            for n in range(1 if activation else PAIR):  # else each line written is waited for at the end
                e.prefetch(e.at(b.add(y, b.mul(row, y_stride)), n * LINE), to_write=True)
        done = b.append_basic_block("product.done")
        numbers = (PAIR,) if activation else (1, PAIR)
        cases = {(n, m): b.append_basic_block(f"product.{n}.{m}") for n in numbers for m in (1, PAIR)}
        chosen = b.add(b.mul(outputs, e.const(4)), blocks)
        switch = b.switch(chosen, cases[PAIR, PAIR])
        for (n, m), block in cases.items():
            if (n, m) != (PAIR, PAIR):
                switch.add_case(e.const(4 * n + m), block)
        for (n, m), block in cases.items():
            b.position_at_end(block)
            if in_registers:
                sums = _emit_sums(
                    e, expand_tile, n, m, w, apart, w_stride, x, x_stride, k, scratch, fetch, fetch_step,
                    is_gated=bool(activation),
                )  # fmt: skip
                for (output, row), tile in sums.items():
                    Tiles(e).store(tile, e.at(scratch, (PAIR * output + row) * TILE_BYTES), e.const(LINE))
            else:
                arguments = w, apart, w_stride, x, x_stride, k, scratch, fetch, fetch_step
                is_half = b.icmp_signed("<=", rows, e.const(LANES // 2)) if m == 1 else ir.Constant(I1, 0)
                with b.if_else(is_half) as (half, whole):
                    for lanes, case in ((LANES // 2, half), (LANES, whole)):
                        with case:
                            _emit_dot_sums(e, dots or _PAIRS, n, m, lanes, *arguments, is_gated=bool(activation))
            b.branch(done)
        b.position_at_end(done)
        if activation:
            _emit_gated(e, activation, blocks, scratch)
            outputs = e.const(1)
        _emit_transposed(e, outputs, blocks, y, y_stride, rows, scratch)

    return void_intrinsic((types.intp,) * 14, emit)


def make_product_of_one(expand_tile: ExpandTile | None, activation: str = "") -> Any:
    """product(outputs, w, apart, w_stride, x, k, y, scratch, fetch, fetch_step): as make_product's, for one row of x,
    which lies there as bfloat16, in tiles configured for one column. Neither x nor the sums have to be transposed."""

    def emit(e: Emitter, outputs, w, apart, w_stride, x, k, y, scratch, fetch, fetch_step) -> None:
        b = e.b
        done = b.append_basic_block("product.done")
        cases = {n: b.append_basic_block(f"product.{n}") for n in ((PAIR,) if activation else (1, PAIR))}
        switch = b.switch(outputs, cases[PAIR])
        if not activation:
            switch.add_case(e.const(1), cases[1])
        for n, block in cases.items():
            b.position_at_end(block)
            sums = _emit_sums(
                e, expand_tile, n, 1, w, apart, w_stride, x, None, k, scratch, fetch, fetch_step,
                is_gated=bool(activation),
            )  # fmt: skip
            for (output, _), tile in sums.items():
                Tiles(e).store(tile, e.at(scratch if activation else y, output * LINE), e.const(4))
            if activation:
                gate, factor = (e.load(e.at(scratch, output * LINE)) for output in range(PAIR))
                e.store(b.fmul(emit_activation(e, activation, gate), factor), y)
            b.branch(done)
        b.position_at_end(done)

    return void_intrinsic((types.intp,) * 10, emit)


def _emit_sums(
    e: Emitter,
    expand_tile: ExpandTile | None,
    outputs: int,
    blocks: int,
    w: ir.Value,
    apart: ir.Value,
    w_stride: ir.Value,
    x: ir.Value,
    x_stride: ir.Value | None,
    k: ir.Value,
    scratch: ir.Value,
    fetch: ir.Value,
    fetch_step: ir.Value,
    *,
    is_gated: bool,
) -> dict[tuple[int, int], int]:
    """w @ x.T of `outputs` tiles of weights and `blocks` of x. Returns the register of each tile of sums. Without
    x_stride x is a single row. is_gated: fetch_step bytes are fetched behind each tile of weights, else in all."""
    b, tiles = e.b, Tiles(e)
    sums = {(n, m): PAIR * n + m for n in range(outputs) for m in range(blocks)}
    w_tiles, x_tiles = W_TILES[:outputs], X_TILES[:blocks]
    columns = 1 if x_stride is None else ROWS
    w_starts = [w, b.add(w, apart)][:outputs]
    buffers = e.at(scratch, PAIR * PAIR * TILE_BYTES)
    space = e.at(buffers, 2 * _BUFFER_BYTES)

    def buffer_of(count: ir.Value, n: int) -> ir.Value:
        """Where tile n of a step is expanded: two places in turn; what was just written cannot be loaded at once."""
        place = b.mul(b.and_(count, e.const(1)), e.const(_BUFFER_BYTES))
        return e.at(b.add(buffers, place), n * TILE_BYTES)

    def expand(i: ir.Value, count: ir.Value, n: int) -> None:
        expand_tile(e, w_starts[n], w_stride, i, k, buffer_of(count, n), e.const(LINE), space)

    if expand_tile is not None:
        for n in range(outputs):
            expand(e.const(0), e.const(0), n)
    x_starts = [x] if x_stride is None else [b.add(x, b.mul(x_stride, e.const(m))) for m in range(blocks)]
    for tile in sums.values():
        tiles.zero(tile)
    with emit_loop(e, 0, k, STEP) as (i, count):
        w_offset, x_offset = b.mul(i, e.const(2)), b.mul(i, e.const(2 * columns))
        for tile, start in zip(x_tiles, x_starts):
            tiles.load(tile, b.add(start, x_offset), e.const(4 * columns))
        fetched = b.add(fetch, b.mul(count, fetch_step))
        with emit_loop(e, 0, fetch_step, LINE) as (line, _):
            e.prefetch(b.add(fetched, line))
            if is_gated:
                e.prefetch(b.add(b.add(fetched, apart), line))
        following = b.add(i, e.const(STEP))
        is_more = b.icmp_signed("<", following, k)
        for n, start in enumerate(w_starts):
            if expand_tile is None:
                tiles.load(w_tiles[n], b.add(start, w_offset), w_stride)
            else:
                with b.if_then(is_more):
                    expand(following, b.add(count, e.const(1)), n)
                tiles.load(w_tiles[n], buffer_of(count, n), e.const(LINE))
            for m in range(blocks):
                tiles.multiply_add(sums[n, m], w_tiles[n], x_tiles[m])
    return sums


def _emit_dot_sums(
    e: Emitter,
    dots: Dots,
    outputs: int,
    blocks: int,
    lanes: int,
    w: ir.Value,
    apart: ir.Value,
    w_stride: ir.Value,
    x: ir.Value,
    x_stride: ir.Value,
    k: ir.Value,
    scratch: ir.Value,
    fetch: ir.Value,
    fetch_step: ir.Value,
    *,
    is_gated: bool,
) -> None:
    """As _emit_sums, into scratch, for the first `lanes` rows of each block. Those of half the lanes take half the
    time."""
    b = e.b
    vector = ir.VectorType(FLOAT, lanes)
    together = dots.together // blocks
    turns = outputs * ROWS // together
    x_starts = [b.add(x, b.mul(x_stride, e.const(m))) for m in range(blocks)]
    with emit_loop(e, 0, turns, 1) as (turn, _):
        first = b.mul(turn, e.const(together))
        is_second = b.icmp_signed(">=", first, e.const(ROWS))
        w_start = b.add(w, b.select(is_second, b.sub(apart, b.mul(w_stride, e.const(ROWS))), e.const(0)))
        w_starts = [b.add(w_start, b.mul(w_stride, e.at(first, n))) for n in range(together)]
        # The turns share what there is to fetch, those of each tile where tiles lie apart.
        turns_fetching, fetch_turn, fetch_start = turns, turn, fetch
        if is_gated:
            turns_fetching = turns // PAIR
            fetch_turn = b.and_(turn, e.const(turns_fetching - 1))
            fetch_start = b.add(fetch, b.select(is_second, apart, e.const(0)))
        sums = {(n, m): cgutils.alloca_once(b, vector) for n in range(together) for m in range(blocks)}
        for total in sums.values():
            b.store(ir.Constant(vector, [0.0] * lanes), total)
        with emit_loop(e, 0, k, STEP) as (i, count):
            lines = b.add(fetch_start, b.mul(count, fetch_step))
            with emit_loop(e, b.mul(fetch_turn, e.const(LINE)), fetch_step, turns_fetching * LINE) as (line, _):
                e.prefetch(b.add(lines, line), locality=LOCALITY_SECOND_CACHE)
            dots.emit_step(e, i, count, k, w_starts, x_starts, sums, lanes)
        # Tile by tile, of which a turn has a part.
        output = b.udiv(first, e.const(ROWS))
        tile = b.add(scratch, b.mul(output, e.const(PAIR * TILE_BYTES)))
        line = b.mul(b.sub(first, b.mul(output, e.const(ROWS))), e.const(LINE))
        for (n, m), total in sums.items():
            e.store(b.load(total), e.at(b.add(tile, line), m * TILE_BYTES + n * LINE), LINE)


def _emit_pairs_step(e: Emitter, i, count, k, w_starts, x_starts, sums, lanes) -> None:
    """Of weights in bfloat16, and x as tile_layout has it."""
    b, pairs = e.b, ir.VectorType(BFLOAT, 2 * lanes)
    w_offset, x_offset = b.mul(i, e.const(2)), b.mul(i, e.const(2 * ROWS))
    for pair in range(STEP // 2):
        right = [e.load(e.at(b.add(start, x_offset), pair * LINE), pairs, LINE) for start in x_starts]
        for n, start in enumerate(w_starts):
            numbers = e.splat(e.load(e.at(b.add(start, w_offset), 4 * pair), I32, 4), lanes)
            for m, values in enumerate(right):
                dot = e.dot_pairs(b.load(sums[n, m]), values, b.bitcast(numbers, pairs))
                b.store(dot, sums[n, m])


_PAIRS = Dots(ROWS, _emit_pairs_step)


def emit_activation(e: Emitter, name: str, x: ir.Value) -> ir.Value:
    """silu or gelu_tanh of 16 float32."""
    b, one, half = e.b, e.splat_const(1.0), e.splat_const(0.5)
    if name == "silu":
        # exp takes no more than 87: below -87 the quotient is less than what a float32 holds.
        negative = b.fsub(e.splat_const(0.0), x)
        bounded = b.select(b.fcmp_ordered("<", negative, e.splat_const(87.0)), negative, e.splat_const(87.0))
        return b.fdiv(x, b.fadd(one, e.exp(bounded)))
    # gelu_tanh (Hendrycks & Gimpel, 2016, arXiv:1606.08415)
    cube = b.fmul(b.fmul(x, x), b.fmul(x, e.splat_const(0.044715)))
    inner = b.fmul(e.splat_const(0.7978845608028654), b.fadd(x, cube))
    return b.fmul(b.fmul(half, x), b.fadd(one, e.tanh(inner)))


def _emit_gated(e: Emitter, activation: str, blocks: ir.Value, scratch: ir.Value) -> None:
    """The first tile of outputs in scratch becomes its activation times the second."""
    b = e.b
    with emit_loop(e, 0, b.mul(blocks, e.const(TILE_BYTES)), LINE) as (line, _):
        place = b.add(scratch, line)
        x, factor = e.load(place), e.load(e.at(place, PAIR * TILE_BYTES))
        e.store(b.fmul(emit_activation(e, activation, x), factor), place)


def _emit_transposed(
    e: Emitter,
    outputs: ir.Value,
    blocks: ir.Value,
    y: ir.Value,
    y_stride: ir.Value,
    rows: ir.Value,
    scratch: ir.Value,
) -> None:
    """The sums in scratch, [outputs, rows] tile by tile, to y."""
    b = e.b
    with emit_loop(e, 0, outputs, 1) as (n, _), emit_loop(e, 0, blocks, 1) as (m, _):
        tile = b.add(scratch, b.mul(b.add(b.mul(n, e.const(PAIR)), m), e.const(TILE_BYTES)))
        out = b.add(b.add(y, b.mul(y_stride, b.mul(m, e.const(ROWS)))), b.mul(n, e.const(LINE)))
        is_last = b.icmp_signed("==", b.add(m, e.const(1)), blocks)
        emit_transposed_sums(e, tile, out, y_stride, b.select(is_last, rows, e.const(ROWS)))
