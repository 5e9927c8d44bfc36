"""Products in the tile registers of newer Intel CPUs (AMX): weights as stored, any number of rows.

A tile holds 16 rows of 64 bytes. One instruction multiplies 16 outputs x 32 bfloat16 values of the weights with 32
values of 16 rows of x and adds to 16 x 16 float32 sums: out.T = w @ x.T. Weights in bfloat16 are loaded where they lie;
quantised ones are expanded to bfloat16 a few outputs at a time, in memory that stays in the cache. x is rounded to
bfloat16 and laid out by the first work items of a call (pairs of values, 16 rows side by side), for which the others
wait. A single row needs no laying out: its tiles have one column. Every sum runs over k in one order, so rows do not
depend on how many there are, nor on the form of the weights.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    U8,
    atomic_add,
    free,
    jit,
    load_i64,
    malloc,
    num_threads,
    stack,
    store_i64,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import (
    BAD_ARGUMENTS,
    NO_MEMORY,
    PLAN_HEAD,
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
    register_handler,
    wait_for,
)
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_tiles
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import (
    LINE,
    ROWS,
    STEP,
    TILE_BYTES,
    W_TILES,
    X_TILES,
    Tiles,
    configure_tiles,
    emit_pairs,
    emit_row_starts,
    emit_transposed_sums,
    release_tiles,
)
from jaxserve.pallas_kernels.cpu_ffi.vectors import LANES, Emitter, emit_loop, void_intrinsic
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_weights import SCALE_BYTES, ExpandTile, make_expand_tile
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, QuantizedWeight, block_bytes, tail_bytes
from llvmlite import ir
from numba import types

_PAIR = 2  # tiles computed side by side, of outputs and of rows: four sums, for which eight registers suffice
_BUFFER_BYTES = _PAIR * TILE_BYTES  # the expanded weights of one step; two of them
_SCRATCH_BYTES = _PAIR * _PAIR * TILE_BYTES + 2 * _BUFFER_BYTES + SCALE_BYTES
_ITEM_BYTES = 262144  # weights in bfloat16 per work item: what follows is fetched ahead, which ends with an item
_MIN_THREAD_BYTES = 131072  # weights times blocks of rows below which a second thread costs more than it saves

# The plan: its head, then numbers, then the count of packed blocks on a cache line of its own, then packed x,
# then each worker's expanded weights.
_PER_ITEM, _BLOCKS, _EXPANDED, _RAW = PLAN_HEAD, PLAN_HEAD + 8, PLAN_HEAD + 16, PLAN_HEAD + 24
_PACKED, _SPACE = 64, 128


def linear_tiles(x: jax.Array, w: jax.Array | QuantizedWeight) -> jax.Array:
    """x [T, K] float32, rounded to bfloat16, times w [N, K] -> [T, N] float32, for weights that `fits`."""
    is_dense = not isinstance(w, QuantizedWeight)
    handler = _handler("bfloat16" if is_dense else w.kind)
    call = jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32))
    return call(x, w if is_dense else w.codes)


def fits(w: jax.Array | QuantizedWeight) -> bool:
    """Whether a weight [N, K] is computed with in bfloat16 and can be cut into tiles."""
    dtype = w.expanded if isinstance(w, QuantizedWeight) else w.dtype.name
    outputs, inputs = w.shape
    return dtype == "bfloat16" and outputs % ROWS == 0 and inputs % STEP == 0 and outputs > 0 and inputs > 0


@functools.cache
def _handler(kind: str) -> str:
    if not has_bf16_tiles():  # it also asks for the registers, without which these instructions end the process
        raise RuntimeError("products in tiles: got a CPU or system without AMX for bfloat16; allowed: other kernels")
    name = f"jaxserve_linear_{kind}_tiles"
    return register_handler(name, lambda: _make_handler(name, kind))


def _make_pack() -> Any:
    """pack(x, x_stride, rows, k, target): up to ROWS rows of x as the tiles of all k; missing rows repeat the last."""

    def emit(e: Emitter, x, x_stride, rows, k, target) -> None:
        b = e.b
        starts = emit_row_starts(e, x, x_stride, rows)
        with emit_loop(e, 0, k, STEP) as (i, _):
            offset = b.mul(i, e.const(4))
            halves = [
                [e.to_bf16(e.load(e.at(b.add(start, offset), 4 * half))) for half in (0, LANES)] for start in starts
            ]
            emit_pairs(e, halves, b.add(target, b.mul(i, e.const(TILE_BYTES // STEP))))

    return void_intrinsic((types.intp,) * 5, emit)


def _make_round() -> Any:
    """round(x, k, target): one row of x as bfloat16."""

    def emit(e: Emitter, x, k, target) -> None:
        with emit_loop(e, 0, k, LANES) as (i, _):
            value = e.to_bf16(e.load(e.b.add(x, e.b.mul(i, e.const(4)))))
            e.store(value, e.b.add(target, e.b.mul(i, e.const(2))), 2 * LANES)

    return void_intrinsic((types.intp,) * 3, emit)


def _make_product_of_one(expand_tile: ExpandTile | None) -> Any:
    """product(outputs, w, w_stride, x, k, y, scratch, fetch, fetch_step): as _make_product's, for one row of x, which
    lies there as bfloat16, in tiles configured for one column. Neither x nor the sums have to be transposed."""

    def emit(e: Emitter, outputs, w, w_stride, x, k, y, scratch, fetch, fetch_step) -> None:
        b = e.b
        done = b.append_basic_block("product.done")
        cases = {n: b.append_basic_block(f"product.{n}") for n in (1, _PAIR)}
        b.switch(outputs, cases[_PAIR]).add_case(e.const(1), cases[1])
        for n, block in cases.items():
            b.position_at_end(block)
            sums = _emit_sums(e, expand_tile, n, 1, w, w_stride, x, None, k, scratch, fetch, fetch_step)
            for (output, _), tile in sums.items():
                Tiles(e).store(tile, e.at(y, output * LINE), 4)
            b.branch(done)
        b.position_at_end(done)

    return void_intrinsic((types.intp,) * 9, emit)


def _make_product(expand_tile: ExpandTile | None) -> Any:
    """product(outputs, blocks, w, w_stride, x, x_stride, k, y, y_stride, rows, scratch, fetch, fetch_step): one or two
    tiles of outputs times one or two packed blocks of x; `rows` of the last block of y are written.

    Strides in bytes; x_stride from block to block. scratch has _SCRATCH_BYTES. fetch_step bytes are fetched ahead per
    step. With expand_tile w is as stored, else bfloat16.
    """

    def emit(
        e: Emitter, outputs, blocks, w, w_stride, x, x_stride, k, y, y_stride, rows, scratch, fetch, fetch_step
    ) -> None:
        b = e.b
        with emit_loop(e, 0, b.add(b.mul(b.sub(blocks, e.const(1)), e.const(ROWS)), rows), 1) as (row, _):
            for n in range(_PAIR):  # else each line written is waited for at the end
                e.prefetch(e.at(b.add(y, b.mul(row, y_stride)), n * LINE), to_write=True)
        done = b.append_basic_block("product.done")
        cases = {(n, m): b.append_basic_block(f"product.{n}.{m}") for n in (1, _PAIR) for m in (1, _PAIR)}
        chosen = b.add(b.mul(outputs, e.const(4)), blocks)
        switch = b.switch(chosen, cases[_PAIR, _PAIR])
        for (n, m), block in cases.items():
            if (n, m) != (_PAIR, _PAIR):
                switch.add_case(e.const(4 * n + m), block)
        for (n, m), block in cases.items():
            b.position_at_end(block)
            sums = _emit_sums(e, expand_tile, n, m, w, w_stride, x, x_stride, k, scratch, fetch, fetch_step)
            for (output, row), tile in sums.items():
                Tiles(e).store(tile, e.at(scratch, (_PAIR * output + row) * TILE_BYTES), LINE)
            b.branch(done)
        b.position_at_end(done)
        _emit_transposed(e, outputs, blocks, y, y_stride, rows, scratch)

    return void_intrinsic((types.intp,) * 13, emit)


def _emit_sums(
    e: Emitter,
    expand_tile: ExpandTile | None,
    outputs: int,
    blocks: int,
    w: ir.Value,
    w_stride: ir.Value,
    x: ir.Value,
    x_stride: ir.Value | None,
    k: ir.Value,
    scratch: ir.Value,
    fetch: ir.Value,
    fetch_step: ir.Value,
) -> dict[tuple[int, int], int]:
    """w @ x.T of `outputs` tiles of weights and `blocks` of x. Returns the register of each tile of sums. Without
    x_stride x is a single row."""
    b, tiles = e.b, Tiles(e)
    sums = {(n, m): _PAIR * n + m for n in range(outputs) for m in range(blocks)}
    w_tiles, x_tiles = W_TILES[:outputs], X_TILES[:blocks]
    columns = 1 if x_stride is None else ROWS
    w_starts = [b.add(w, b.mul(w_stride, e.const(ROWS * n))) for n in range(outputs)]
    buffers = e.at(scratch, _PAIR * _PAIR * TILE_BYTES)
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
        with emit_loop(e, 0, fetch_step, LINE) as (line, _):
            e.prefetch(b.add(b.add(fetch, b.mul(count, fetch_step)), line))
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
        tile = b.add(scratch, b.mul(b.add(b.mul(n, e.const(_PAIR)), m), e.const(TILE_BYTES)))
        out = b.add(b.add(y, b.mul(y_stride, b.mul(m, e.const(ROWS)))), b.mul(n, e.const(LINE)))
        is_last = b.icmp_signed("==", b.add(m, e.const(1)), blocks)
        emit_transposed_sums(e, tile, out, y_stride, b.select(is_last, rows, e.const(ROWS)))


def _make_expand(kind: str) -> Any:
    """expand(outputs, w, w_stride, k, target, space): one or more tiles of outputs, all k, to rows of bfloat16; space
    has SCALE_BYTES."""
    expand_tile = make_expand_tile(kind)

    def emit(e: Emitter, outputs, w, w_stride, k, target, space) -> None:
        b = e.b
        stride = b.mul(k, e.const(2))
        with emit_loop(e, 0, b.mul(outputs, e.const(ROWS)), ROWS) as (n, _), emit_loop(e, 0, k, STEP) as (i, _):
            start = b.add(b.add(target, b.mul(n, stride)), b.mul(i, e.const(2)))
            expand_tile(e, b.add(w, b.mul(n, w_stride)), w_stride, i, k, start, stride, space)

    return void_intrinsic((types.intp,) * 6, emit)


def _make_fetch() -> Any:
    """fetch(address, num_bytes): into the cache, without waiting."""

    def emit(e: Emitter, address, num_bytes) -> None:
        with emit_loop(e, 0, num_bytes, LINE) as (offset, _):
            e.prefetch(e.b.add(address, offset))

    return void_intrinsic((types.intp,) * 2, emit)


@jit
def _packed_bytes(k):
    return k * (TILE_BYTES // STEP)


def _make_handler(name: str, kind: str) -> tuple[Any, Any, Any]:
    pack, round_one, product, fetch = _make_pack(), _make_round(), _make_product(None), _make_fetch()
    configure_one = void_intrinsic((), lambda e: Tiles(e).configure(1))
    is_dense = kind == "bfloat16"
    w_type, slab = BF16 if is_dense else U8, _PAIR * ROWS  # outputs computed together
    block_size, tail = (2 * BLOCK, 0) if is_dense else (block_bytes(kind), tail_bytes(kind))
    if is_dense:

        @named(name)
        def expand(outputs, w, w_stride, k, target, space):
            pass

        product_of_stored, product_of_one = product, _make_product_of_one(None)
    else:
        expand, expand_tile = _make_expand(kind), make_expand_tile(kind)
        product_of_stored, product_of_one = _make_product(expand_tile), _make_product_of_one(expand_tile)

    @named(name)
    def stored_bytes(frame):
        return frames.num_inputs(frame) // BLOCK * block_size + tail

    @named(name)
    def plan(frame):
        k, outputs, stored = frames.num_inputs(frame), frames.num_outputs(frame), stored_bytes(frame)
        if not frames.has_shapes(frame, w_type, k if is_dense else stored, STEP) or outputs % ROWS != 0:
            return BAD_ARGUMENTS
        blocks = (frames.num_rows(frame) + ROWS - 1) // ROWS
        threads = max(1, min(num_threads(frame), outputs * 2 * k * blocks // _MIN_THREAD_BYTES))
        items = 1
        if threads > 1:  # as many for each thread, if none comes late
            items = (outputs * 2 * k // _ITEM_BYTES + threads) // threads * threads
        per_item = ((outputs + items - 1) // items + slab - 1) // slab * slab
        packed_bytes = blocks * _packed_bytes(k)
        expanded_bytes = 0 if is_dense else threads * slab * 2 * k
        raw = malloc(_SPACE + 64 + packed_bytes + expanded_bytes)
        if raw == 0:
            return NO_MEMORY
        made = (raw + 63) // 64 * 64
        store_i64(made, PLAN_ITEMS, blocks + (outputs + per_item - 1) // per_item)
        store_i64(made, PLAN_THREADS, threads)
        store_i64(made, _PER_ITEM, per_item)
        store_i64(made, _BLOCKS, blocks)
        store_i64(made, _EXPANDED, made + _SPACE + packed_bytes)
        store_i64(made, _RAW, raw)
        store_i64(made, _PACKED, 0)
        return made

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), frames.num_outputs(frame)
        blocks, packed = load_i64(plan, _BLOCKS), plan + _SPACE
        if i < blocks:
            source = frames.x_data(frame) + i * ROWS * k * 4
            if rows == 1:
                round_one(source, k, packed)
            else:
                pack(source, k * 4, min(ROWS, rows - i * ROWS), k, packed + i * _packed_bytes(k))
            atomic_add(plan + _PACKED, 1)
            return
        first = (i - blocks) * load_i64(plan, _PER_ITEM)
        last = min(first + load_i64(plan, _PER_ITEM), outputs)
        turns = (blocks + _PAIR - 1) // _PAIR
        fetch_step = (slab * block_size // turns + LINE - 1) // LINE * LINE
        stored, scratch, w = stored_bytes(frame), stack(_SCRATCH_BYTES), frames.w_data(frame)
        expanded = load_i64(plan, _EXPANDED) + worker * slab * 2 * k
        fetch(w + first * stored, slab * stored)  # what comes after it is fetched on the way
        wait_for(plan + _PACKED, blocks)
        if rows == 1:
            configure_one()
        else:
            configure_tiles()
        for n in range(first, last, slab):
            weights = w + n * stored
            if rows == 1:
                product_of_one(
                    min(_PAIR, (last - n) // ROWS), weights, stored, packed, k, frames.y_data(frame) + n * 4, scratch,
                    weights + slab * stored, fetch_step,
                )  # fmt: skip
                continue
            if not is_dense and turns == 1:
                product_of_stored(
                    min(_PAIR, (last - n) // ROWS), blocks, weights, stored, packed, _packed_bytes(k), k,
                    frames.y_data(frame) + n * 4, outputs * 4, rows - (blocks - 1) * ROWS, scratch,
                    weights + slab * stored, fetch_step,
                )  # fmt: skip
                continue
            if not is_dense:
                expand(min(_PAIR, (last - n) // ROWS), weights, stored, k, expanded, scratch)
                weights = expanded
            for m in range(0, blocks, _PAIR):
                count = min(_PAIR, blocks - m)
                product(
                    min(_PAIR, (last - n) // ROWS), count, weights, 2 * k, packed + m * _packed_bytes(k),
                    _packed_bytes(k), k, frames.y_data(frame) + m * ROWS * outputs * 4 + n * 4, outputs * 4,
                    min(ROWS, rows - (m + count - 1) * ROWS), scratch,
                    w + (n + slab) * stored + m // _PAIR * (k // STEP) * fetch_step, fetch_step,
                )  # fmt: skip
        release_tiles()

    @named(name)
    def finish(frame, plan):
        free(load_i64(plan, _RAW))

    return plan, body, finish
