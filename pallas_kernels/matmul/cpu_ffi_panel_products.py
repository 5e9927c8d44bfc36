"""Panels of weights, and two blocks of 16 rows of x times one: the inner loops of cpu_ffi_panels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import I64
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, STEP, TILE_BYTES
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import W_TILES, X_TILES, Tiles
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    INT_VECTOR,
    LANES,
    LOCALITY_SECOND_CACHE,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_products import PAIR, emit_activation
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_weights import SCALE_BYTES, make_expand_tile
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, block_bytes
from llvmlite import ir
from numba import types
from numba.core import cgutils

SUMS_BYTES = PAIR * PAIR * TILE_BYTES  # of what one product makes
SPACE_BYTES = TILE_BYTES + SCALE_BYTES  # work space of laying out


def slab_outputs(activation: str) -> int:
    """How many columns of y a panel makes."""
    return ROWS if activation else PAIR * ROWS


def make_round() -> Any:
    """round(x, x_stride, k, target): ROWS rows of float32 as tiles of bfloat16, one for each STEP values."""

    def emit(e: Emitter, x, x_stride, k, target) -> None:
        b = e.b
        with emit_loop(e, 0, ROWS, 1) as (row, _):
            source, lines = b.add(x, b.mul(row, x_stride)), b.add(target, b.mul(row, e.const(LINE)))
            with emit_loop(e, 0, k, STEP) as (i, _):
                values = b.add(source, b.mul(i, e.const(4)))
                both = e.both_to_bf16(e.load(values), e.load(e.at(values, 4 * LANES)))
                e.store(both, b.add(lines, b.mul(i, e.const(TILE_BYTES // STEP))), LINE)

    return void_intrinsic((types.intp,) * 4, emit)


def _make_emit_panel_tile(kind: str) -> Callable[..., None]:
    """emit(e, w, w_stride, i, k, target, space): the weights of ROWS outputs and STEP inputs, from i on, as a right
    matrix. space has SPACE_BYTES."""
    expand_tile = None if kind == "bfloat16" else make_expand_tile(kind)

    def emit(e: Emitter, w, w_stride, i, k, target, space) -> None:
        b = e.b
        lines, stride = b.add(w, b.mul(i, e.const(2))), w_stride
        if expand_tile is not None:
            lines, stride = space, e.const(LINE)
            expand_tile(e, w, w_stride, i, k, lines, stride, e.at(space, TILE_BYTES))
        starts = [b.add(lines, b.mul(stride, e.const(row))) for row in range(ROWS)]
        for pair, line in enumerate(e.transpose([e.load(start, INT_VECTOR, 2) for start in starts])):
            e.store(line, e.at(target, pair * LINE), LINE)

    return emit


def make_lay_out(kind: str) -> Any:
    """lay_out(w, apart, w_stride, k, steps, panel, space): the panel of two tiles of outputs and the first `steps`
    times STEP inputs, the second's weights `apart` bytes behind the first's."""
    emit_tile = _make_emit_panel_tile(kind)

    def emit(e: Emitter, w, apart, w_stride, k, steps, panel, space) -> None:
        b = e.b
        with emit_loop(e, 0, PAIR, 1) as (n, _), emit_loop(e, 0, steps, 1) as (step, _):
            target = b.add(panel, b.mul(b.add(b.mul(n, steps), step), e.const(TILE_BYTES)))
            emit_tile(e, b.add(w, b.mul(n, apart)), w_stride, b.mul(step, e.const(STEP)), k, target, space)

    return void_intrinsic((types.intp,) * 7, emit)


def make_product(kind: str, activation: str, rounds: bool) -> Any:
    """product(panel, steps, x, x_line, x_step, x_block, waiting, is_first, is_last, y, y_stride, sums, before,
    y_before, apart, w_stride, k, next_w, next_first, next_steps, following, number, count, after_w, after_first,
    space): two blocks of ROWS rows times the weights of a panel, which has `steps` times STEP inputs.

    x_line, x_step, x_block: bytes from row to row, from STEP values to the next and from block to block. Between runs
    of inputs sums are `waiting`; is_first and is_last say which run this is. Behind the last they go to y without an
    activation, else to `sums`; those of another call, `before`, are finished to y_before unless that is 0. Rows of y
    are y_stride apart.

    Meanwhile, of the next panel, `count` tiles from the one with this number on are laid out to `following`, and those
    of the panel after it fetched unless after_w is 0. Of both w is where the first output's weights begin, first the
    first input; the second tile's weights lie `apart` from the first's, those of an output w_stride from the last's.
    """
    emit_tile = _make_emit_panel_tile(kind)
    step_bytes = 2 * STEP if kind == "bfloat16" else block_bytes(kind) * STEP // BLOCK

    def emit(
        e: Emitter, panel, steps, x, x_line, x_step, x_block, waiting, is_first, is_last, y, y_stride, sums, before,
        y_before, apart, w_stride, k, next_w, next_first, next_steps, following, number, count, after_w, after_first,
        space,
    ) -> None:  # fmt: skip
        b, tiles = e.b, Tiles(e)
        totals = {(n, m): PAIR * n + m for n in range(PAIR) for m in range(PAIR)}
        panels = [panel, b.add(panel, b.mul(steps, e.const(TILE_BYTES)))]
        blocks = [x, b.add(x, x_block)]
        num_before = b.select(b.icmp_signed("==", y_before, e.const(0)), e.const(0), e.const(PAIR * ROWS))
        per_step = b.udiv(b.add(steps, e.const(PAIR * ROWS - 1)), steps)
        # A tile is laid out every `gap` steps, the next one in step `due`.
        gap = b.udiv(steps, b.select(b.icmp_signed(">", count, e.const(0)), count, e.const(1)))
        end = b.add(number, count)
        tile_at, due_at = cgutils.alloca_once(b, I64), cgutils.alloca_once(b, I64)
        b.store(number, tile_at)
        b.store(e.const(0), due_at)
        with b.if_else(b.icmp_signed("!=", is_first, e.const(0))) as (begins, goes_on):
            with begins:
                for total in totals.values():
                    tiles.zero(total)
            with goes_on:
                for total in totals.values():
                    tiles.load(total, e.at(waiting, total * TILE_BYTES), e.const(LINE))
        with emit_loop(e, 0, steps, 1) as (step, _):
            x_offset, w_offset = b.mul(step, x_step), b.mul(step, e.const(TILE_BYTES))
            for n in range(PAIR):
                tiles.load(W_TILES[n], b.add(panels[n], w_offset), e.const(LINE))
                tiles.load(X_TILES[n], b.add(blocks[n], x_offset), x_line)
            for (n, m), total in totals.items():
                tiles.multiply_add(total, X_TILES[m], W_TILES[n])
            if activation:
                row, row_end = b.mul(step, per_step), b.mul(b.add(step, e.const(1)), per_step)
                row_end = b.select(b.icmp_signed("<", row_end, num_before), row_end, num_before)
                with emit_loop(e, row, row_end, 1) as (row, _):
                    _emit_gated_row(e, activation, rounds, before, row, y_before, y_stride)
            tile = b.load(tile_at)
            is_due = b.and_(b.icmp_signed("==", step, b.load(due_at)), b.icmp_signed("<", tile, end))
            with b.if_then(is_due):
                is_second = b.icmp_signed(">=", tile, next_steps)
                column = b.select(is_second, apart, e.const(0))
                place = b.sub(tile, b.select(is_second, next_steps, e.const(0)))
                inputs = b.add(next_first, b.mul(place, e.const(STEP)))
                target = b.add(following, b.mul(tile, e.const(TILE_BYTES)))
                emit_tile(e, b.add(next_w, column), w_stride, inputs, k, target, space)
                with b.if_then(b.icmp_signed("!=", after_w, e.const(0))):
                    skipped = b.add(b.udiv(after_first, e.const(STEP)), place)
                    ahead = b.add(b.add(after_w, column), b.mul(skipped, e.const(step_bytes)))
                    for row in range(ROWS):
                        e.prefetch(b.add(ahead, b.mul(w_stride, e.const(row))), locality=LOCALITY_SECOND_CACHE)
                b.store(b.add(tile, e.const(1)), tile_at)
                b.store(b.add(step, gap), due_at)
        with b.if_else(b.icmp_signed("!=", is_last, e.const(0))) as (ends, waits):
            with ends:
                for (n, m), total in totals.items():
                    if activation:
                        tiles.store(total, e.at(sums, total * TILE_BYTES), e.const(LINE))
                    else:
                        rows = b.add(y, b.mul(y_stride, e.const(m * ROWS)))
                        tiles.store(total, e.at(rows, n * LINE), y_stride)
            with waits:
                for total in totals.values():
                    tiles.store(total, e.at(waiting, total * TILE_BYTES), e.const(LINE))

    return void_intrinsic((types.intp,) * 26, emit)


def _emit_gated_row(
    e: Emitter, activation: str, rounds: bool, sums: ir.Value, row: ir.Value, y: ir.Value, y_stride: ir.Value
) -> None:
    """Row `row` of PAIR blocks: the activation of its sums with one tile of outputs times those with the other."""
    b = e.b
    line = b.add(sums, b.mul(row, e.const(LINE)))
    gate, factor = (e.load(e.at(line, n * PAIR * TILE_BYTES), VECTOR, LINE) for n in range(PAIR))
    out, place = b.fmul(emit_activation(e, activation, gate), factor), b.add(y, b.mul(row, y_stride))
    e.store(e.to_bf16(out) if rounds else out, place, 2)


def make_finish(activation: str, rounds: bool) -> Any:
    """finish(sums, y, y_stride): what the last call of product left, if y is not 0."""

    def emit(e: Emitter, sums, y, y_stride) -> None:
        if activation:
            count = e.b.select(e.b.icmp_signed("==", y, e.const(0)), e.const(0), e.const(PAIR * ROWS))
            with emit_loop(e, 0, count, 1) as (row, _):
                _emit_gated_row(e, activation, rounds, sums, row, y, y_stride)

    return void_intrinsic((types.intp,) * 3, emit)
