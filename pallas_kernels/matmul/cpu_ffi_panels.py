"""Products of many rows in tile registers (AMX): weights are turned round once for all rows.

out = x @ w.T. cpu_ffi_tiles multiplies the weights as they lie, which is right for few rows, and turns every sum round
on its way to y. Here x is the left matrix, as it lies; the weights are laid out in pairs, 16 outputs side by side, a
panel of some 32 outputs at a time that stays in the second cache, and the sums of a tile are stored where they belong.
A sum is made of the same products in the same order, so it has the same bits.

With an activation a pair of tiles is gate and factor, whose sums go through memory: those of one pair of blocks are
finished beside the products of the next, which leave the vector units idle. Such a result may be bfloat16, as may x:
what is rounded there would be rounded for the next product anyway, and takes half the way through the caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    F32,
    I64,
    U8,
    arg,
    atomic_add,
    data,
    dim,
    dtype,
    free,
    load_i64,
    malloc,
    num_threads,
    rank,
    ret,
    stack,
    store_i64,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    BAD_ARGUMENTS,
    NO_MEMORY,
    PLAN_ITEMS,
    named,
    register_handler,
    wait_for,
)
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, STEP, TILE_BYTES, emit_pairs
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import W_TILES, X_TILES, Tiles, configure_tiles, release_tiles
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    LANES,
    LOCALITY_SECOND_CACHE,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_products import PAIR, emit_activation
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_weights import SCALE_BYTES, make_expand_tile
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, QuantizedWeight, block_bytes, tail_bytes
from llvmlite import ir
from numba import types
from numba.core import cgutils

MIN_ROWS = 96  # from which on turning the weights round costs less than turning the sums
ROW_MULTIPLE = PAIR * ROWS
OUTPUT_MULTIPLE = PAIR * ROWS  # of the weight's rows, gate and factor counted apart
_ITEM_BYTES = 65536  # weights in bfloat16 per work item, at least
_SUMS_BYTES = PAIR * PAIR * TILE_BYTES
_SPACE_BYTES, _BOTH_SUMS_BYTES = TILE_BYTES + SCALE_BYTES, 2 * _SUMS_BYTES

# The plan: its head, then numbers, then the count of rounded blocks on a cache line of its own, then the rows of x as
# tiles, if they come as float32, and each worker's panel.
_BLOCKS, _PANELS, _RAW = frames.CUT_END, frames.CUT_END + 8, frames.CUT_END + 16
_ROUNDED, _SPACE = 64, 128


def fits_panels(num_rows: int, w: jax.Array | QuantizedWeight) -> bool:
    """Whether a product in tile registers, with weights that cpu_ffi_tiles takes, is one for this file."""
    return num_rows >= MIN_ROWS and num_rows % ROW_MULTIPLE == 0 and w.shape[0] % OUTPUT_MULTIPLE == 0


def linear_panels(
    x: jax.Array, w: jax.Array | QuantizedWeight, activation: str = "", dtype: Any = jnp.float32
) -> jax.Array:
    """x [T, K] float32 (rounded) or bfloat16 times w [N, K] -> [T, N] float32. With an activation it is that of
    the product with the upper half of w times that with the lower: [T, N / 2] float32 or bfloat16."""
    is_dense = not isinstance(w, QuantizedWeight)
    is_rounded, rounds = x.dtype == jnp.bfloat16, dtype == jnp.bfloat16
    handler = _handler("bfloat16" if is_dense else w.kind, activation, is_rounded=is_rounded, rounds=rounds)
    outputs = w.shape[0] // 2 if activation else w.shape[0]
    call = jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct((x.shape[0], outputs), dtype))
    return call(x, w if is_dense else w.codes)


@functools.cache
def _handler(kind: str, activation: str, *, is_rounded: bool, rounds: bool) -> str:
    parts = "jaxserve_linear", kind, "panels", activation, "of_bf16" * is_rounded, "to_bf16" * rounds
    name = "_".join(part for part in parts if part)
    return register_handler(name, lambda: _make_handler(name, kind, activation, is_rounded, rounds))


def _slab(activation: str) -> int:
    """How many columns of y a panel makes."""
    return ROWS if activation else PAIR * ROWS


def _make_round() -> Any:
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
    matrix. space has _SPACE_BYTES."""
    expand_tile = None if kind == "bfloat16" else make_expand_tile(kind)
    halves = ir.VectorType(ir.IntType(16), LANES)

    def emit(e: Emitter, w, w_stride, i, k, target, space) -> None:
        b = e.b
        lines, stride = b.add(w, b.mul(i, e.const(2))), w_stride
        if expand_tile is not None:
            lines, stride = space, e.const(LINE)
            expand_tile(e, w, w_stride, i, k, lines, stride, e.at(space, TILE_BYTES))
        starts = [b.add(lines, b.mul(stride, e.const(row))) for row in range(ROWS)]
        rows = [(e.load(start, halves, 2), e.load(e.at(start, LINE // 2), halves, 2)) for start in starts]
        emit_pairs(e, rows, target)

    return emit


def _make_lay_out(kind: str) -> Any:
    """lay_out(w, apart, w_stride, k, panel, space): the panel of two tiles of outputs, the second's weights `apart`
    bytes behind the first's."""
    emit_tile = _make_emit_panel_tile(kind)

    def emit(e: Emitter, w, apart, w_stride, k, panel, space) -> None:
        b = e.b
        column = b.mul(k, e.const(TILE_BYTES // STEP))
        with emit_loop(e, 0, PAIR, 1) as (n, _), emit_loop(e, 0, k, STEP) as (i, _):
            target = b.add(b.add(panel, b.mul(n, column)), b.mul(i, e.const(TILE_BYTES // STEP)))
            emit_tile(e, b.add(w, b.mul(n, apart)), w_stride, i, k, target, space)

    return void_intrinsic((types.intp,) * 6, emit)


def _make_product(kind: str, activation: str, rounds: bool) -> Any:
    """product(panel, k, x, x_line, x_step, x_block, y, y_stride, sums, before, y_before, w, apart, w_stride, following,
    first, count, fetch, space): two blocks of ROWS rows times the weights of a panel.

    x_line, x_step, x_block: bytes from row to row, from STEP values to the next and from block to block. Without an
    activation sums go to y, else to `sums`, and those of another call, `before`, are finished to y_before unless that
    is 0. Rows of y are y_stride apart. Of the panel `following`, of weights w, `count` tiles from the one numbered
    `first` are laid out, and `fetch` bytes behind each of its two tiles of outputs are fetched for each.
    """
    emit_tile, slab = _make_emit_panel_tile(kind), _slab(activation)

    def emit(
        e: Emitter, panel, k, x, x_line, x_step, x_block, y, y_stride, sums, before, y_before,
        w, apart, w_stride, following, first, count, fetch, space,
    ) -> None:  # fmt: skip
        b, tiles = e.b, Tiles(e)
        totals = {(n, m): PAIR * n + m for n in range(PAIR) for m in range(PAIR)}
        panels = [panel, b.add(panel, b.mul(k, e.const(TILE_BYTES // STEP)))]
        blocks = [x, b.add(x, x_block)]
        steps = b.udiv(k, e.const(STEP))
        num_before = b.select(b.icmp_signed("==", y_before, e.const(0)), e.const(0), e.const(PAIR * ROWS))
        per_step = b.udiv(b.add(steps, e.const(PAIR * ROWS - 1)), steps)
        # A tile is laid out every `gap` steps, the next one in step `due`.
        at_least_one = b.select(b.icmp_signed(">", count, e.const(0)), count, e.const(1))
        gap = b.udiv(steps, at_least_one)
        end = b.add(first, count)
        number, due = cgutils.alloca_once(b, I64), cgutils.alloca_once(b, I64)
        b.store(first, number)
        b.store(e.const(0), due)
        for total in totals.values():
            tiles.zero(total)
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
            tile = b.load(number)
            is_due = b.and_(b.icmp_signed("==", step, b.load(due)), b.icmp_signed("<", tile, end))
            with b.if_then(is_due):
                is_second = b.icmp_signed(">=", tile, steps)
                column = b.add(w, b.select(is_second, apart, e.const(0)))
                place = b.sub(tile, b.select(is_second, steps, e.const(0)))
                target = b.add(following, b.mul(tile, e.const(TILE_BYTES)))
                emit_tile(e, column, w_stride, b.mul(place, e.const(STEP)), k, target, space)
                behind = b.add(b.add(column, b.mul(w_stride, e.const(slab))), b.mul(place, fetch))
                with emit_loop(e, 0, fetch, LINE) as (line, _):
                    e.prefetch(b.add(behind, line), locality=LOCALITY_SECOND_CACHE)
                b.store(b.add(tile, e.const(1)), number)
                b.store(b.add(step, gap), due)
        for (n, m), total in totals.items():
            if activation:
                tiles.store(total, e.at(sums, (PAIR * n + m) * TILE_BYTES), e.const(LINE))
            else:
                rows = b.add(y, b.mul(y_stride, e.const(m * ROWS)))
                tiles.store(total, e.at(rows, n * LINE), y_stride)

    return void_intrinsic((types.intp,) * 19, emit)


def _emit_gated_row(
    e: Emitter, activation: str, rounds: bool, sums: ir.Value, row: ir.Value, y: ir.Value, y_stride: ir.Value
) -> None:
    """Row `row` of PAIR blocks: the activation of its sums with one tile of outputs times those with the other."""
    b = e.b
    line = b.add(sums, b.mul(row, e.const(LINE)))
    gate, factor = (e.load(e.at(line, n * PAIR * TILE_BYTES), VECTOR, LINE) for n in range(PAIR))
    out, place = b.fmul(emit_activation(e, activation, gate), factor), b.add(y, b.mul(row, y_stride))
    e.store(e.to_bf16(out) if rounds else out, place, 2)


def _make_finish(activation: str, rounds: bool) -> Any:
    """finish(sums, y, y_stride): what the last call of product left, if y is not 0."""

    def emit(e: Emitter, sums, y, y_stride) -> None:
        if activation:
            count = e.b.select(e.b.icmp_signed("==", y, e.const(0)), e.const(0), e.const(PAIR * ROWS))
            with emit_loop(e, 0, count, 1) as (row, _):
                _emit_gated_row(e, activation, rounds, sums, row, y, y_stride)

    return void_intrinsic((types.intp,) * 3, emit)


def _make_handler(name: str, kind: str, activation: str, is_rounded: bool, rounds: bool) -> tuple[Any, Any, Any]:
    round_rows, lay_out = _make_round(), _make_lay_out(kind)
    product, finish_sums = _make_product(kind, activation, rounds), _make_finish(activation, rounds)
    is_dense = kind == "bfloat16"
    w_type, x_type, y_type = BF16 if is_dense else U8, BF16 if is_rounded else F32, BF16 if rounds else F32
    block_size, tail = (2 * BLOCK, 0) if is_dense else (block_bytes(kind), tail_bytes(kind))
    per_output, y_bytes = 2 if activation else 1, 2 if rounds else 4
    slab = _slab(activation)

    @named(name)
    def stored_bytes(frame):
        return frames.num_inputs(frame) // BLOCK * block_size + tail

    @named(name)
    def num_outputs(frame):
        return frames.num_outputs(frame) // per_output

    @named(name)
    def plan(frame):
        rows, k, outputs, stored = (
            frames.num_rows(frame),
            frames.num_inputs(frame),
            num_outputs(frame),
            stored_bytes(frame),
        )
        x, w, y = arg(frame, 0), arg(frame, 1), ret(frame, 0)
        if rank(x) != 2 or rank(w) != 2 or rank(y) != 2 or dtype(x) != x_type or dtype(w) != w_type:
            return BAD_ARGUMENTS
        if dtype(y) != y_type or dim(y, 0) != rows or dim(y, 1) != outputs or outputs * per_output != dim(w, 0):
            return BAD_ARGUMENTS
        if k <= 0 or k % STEP != 0 or dim(w, 1) != (k if is_dense else stored):
            return BAD_ARGUMENTS
        if rows <= 0 or rows % (PAIR * ROWS) != 0 or outputs % slab != 0 or outputs <= 0:
            return BAD_ARGUMENTS
        blocks = 0 if is_rounded else rows // ROWS
        threads = num_threads(frame)
        raw = malloc(_SPACE + 64 + blocks * ROWS * 2 * k + threads * 2 * PAIR * ROWS * 2 * k)
        if raw == 0:
            return NO_MEMORY
        made = (raw + 63) // 64 * 64
        least = _ITEM_BYTES // (per_output * 2 * k)
        store_i64(made, PLAN_ITEMS, blocks + frames.cut_outputs(made, outputs, threads, least, slab))
        store_i64(made, _BLOCKS, blocks)
        store_i64(made, _PANELS, made + _SPACE + blocks * ROWS * 2 * k)
        store_i64(made, _RAW, raw)
        store_i64(made, _ROUNDED, 0)
        return made

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), num_outputs(frame)
        blocks = load_i64(plan, _BLOCKS)
        if i < blocks:
            round_rows(frames.x_data(frame) + i * ROWS * k * 4, k * 4, k, plan + _SPACE + i * ROWS * k * 2)
            atomic_add(plan + _ROUNDED, 1)
            return
        x, x_line, x_step = plan + _SPACE, LINE, TILE_BYTES
        if is_rounded:
            x, x_line, x_step = frames.x_data(frame), 2 * k, 2 * STEP
        first = frames.first_output(plan, i - blocks)
        last = first + frames.item_outputs(plan, i - blocks)
        stored, x_block, panel_bytes = stored_bytes(frame), ROWS * 2 * k, PAIR * ROWS * 2 * k
        panels = load_i64(plan, _PANELS) + worker * 2 * panel_bytes
        space, sums = stack(_SPACE_BYTES), stack(_BOTH_SUMS_BYTES)
        apart = (outputs if activation else ROWS) * stored  # between the two tiles of a panel
        y, y_stride = data(ret(frame, 0)), outputs * y_bytes
        turns, num_tiles = rows // (PAIR * ROWS), PAIR * (k // STEP)
        per_turn = (num_tiles + turns - 1) // turns  # tiles of the next panel for each pair of blocks
        lay_out(frames.w_data(frame) + first * stored, apart, stored, k, panels, space)
        wait_for(plan + _ROUNDED, blocks)
        configure_tiles()
        turn, y_before = 0, 0
        for n in range(first, last, slab):
            is_odd = (n - first) // slab % 2
            panel, following = panels + is_odd * panel_bytes, panels + (1 - is_odd) * panel_bytes
            w = frames.w_data(frame) + (n + slab) * stored
            fetch = ROWS * stored // (k // STEP) if n + 2 * slab < last else 0
            for m in range(turns):
                tile = min(m * per_turn, num_tiles) if n + slab < last else num_tiles
                target = y + m * PAIR * ROWS * y_stride + n * y_bytes
                product(
                    panel, k, x + m * PAIR * x_block, x_line, x_step, x_block,
                    target, y_stride, sums + turn * _SUMS_BYTES, sums + (1 - turn) * _SUMS_BYTES, y_before,
                    w, apart, stored, following, tile, min(per_turn, num_tiles - tile), fetch, space,
                )  # fmt: skip
                turn, y_before = 1 - turn, target
        finish_sums(sums + (1 - turn) * _SUMS_BYTES, y_before, y_stride)
        release_tiles()

    @named(name)
    def finish(frame, plan):
        free(load_i64(plan, _RAW))

    return plan, body, finish
