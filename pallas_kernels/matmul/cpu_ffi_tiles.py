"""Products in tiles of 16 outputs x 16 rows, in bfloat16, with weights as stored and any number of rows.

out.T = w @ x.T. Weights in bfloat16 are read where they lie; quantised ones are expanded to bfloat16 a few outputs at a
time, in memory that stays in the cache. x is rounded to bfloat16 and laid out by the first work items of a call (pairs
of values, 16 rows side by side), for which the others wait. Sums are made in the tile registers of newer Intel CPUs
(AMX), or else by dot products of pairs in AVX-512. Either way every sum runs over k in one order, so rows do not depend
on how many there are, nor on the form of the weights. The same frame serves products of x in whole numbers of 8 bits
with the codes of quantised weights (cpu_ffi_byte_tiles); the layout of both and the products differ.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
    PLAN_ITEMS,
    PLAN_THREADS,
    named,
    register_handler,
    wait_for,
)
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot, has_bf16_tiles, has_byte_dot
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, STEP, TILE_BYTES, emit_pairs, emit_row_starts
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import Tiles, configure_tiles, release_tiles
from jaxserve.pallas_kernels.cpu_ffi.vectors import LANES, Emitter, emit_loop, void_intrinsic
from jaxserve.pallas_kernels.matmul import cpu_ffi_byte_dots
from jaxserve.pallas_kernels.matmul import cpu_ffi_byte_tiles as byte_tiles
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from jaxserve.pallas_kernels.matmul.cpu_ffi_few_rows import FEW_ROWS, make_product_of_few
from jaxserve.pallas_kernels.matmul.cpu_ffi_panels import fits_panels, linear_panels
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_products import (
    PAIR,
    SCRATCH_BYTES,
    make_product,
    make_product_of_one,
)
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_weights import make_expand_tile
from jaxserve.pallas_kernels.matmul.quantized import BLOCK, QuantizedWeight, block_bytes
from numba import types

_ITEM_BYTES = 65536  # weights in bfloat16 per work item, at least
_GROUP_BYTES = 393216  # of packed x that all weights of an item are multiplied with before the next: the second cache
_MIN_THREAD_BYTES = 131072  # weights times blocks of rows below which a second thread costs more than it saves

# The plan: its head, then numbers, then the count of packed blocks on a cache line of its own, then packed x,
# then each worker's expanded weights.
_BLOCKS, _EXPANDED, _RAW = frames.CUT_END, frames.CUT_END + 8, frames.CUT_END + 16
_PACKED, _SPACE = 64, 128


def linear_tiles(x: jax.Array, w: jax.Array | QuantizedWeight, *, in_bytes: bool = False) -> jax.Array:
    """x [T, K], rounded to bfloat16, times w [N, K] -> [T, N] float32, for weights that `fits`. in_bytes: x is rounded
    to 8 bits instead, for weights that `fits_bytes`."""
    if not in_bytes and takes_panels(x.shape[0], w):
        return linear_panels(x, w)
    return _call(x, w, w.shape[0], "", in_bytes)


def linear_gated(
    x: jax.Array, w: jax.Array | QuantizedWeight, activation: str, dtype: Any = jnp.float32, *, in_bytes: bool = False
) -> jax.Array:
    """activation(x @ g.T) * (x @ u.T) [T, N] in `dtype`, for w [2 N, K] that `fits_gated`: g, and u below it."""
    if not in_bytes and takes_panels(x.shape[0], w):
        return linear_panels(x, w, activation, dtype)
    return _call(x, w, w.shape[0] // 2, activation, in_bytes).astype(dtype)


def _call(x: jax.Array, w: jax.Array | QuantizedWeight, outputs: int, activation: str, in_bytes: bool) -> jax.Array:
    is_dense = not isinstance(w, QuantizedWeight)
    handler = _handler("bfloat16" if is_dense else w.kind, activation, in_bytes=in_bytes)
    call = jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
    return call(x.astype(jnp.float32), w if is_dense else w.codes)


def takes_panels(num_rows: int, w: jax.Array | QuantizedWeight) -> bool:
    """Whether a product with a weight that `fits` is one of many rows in tile registers."""
    return has_bf16_tiles() and fits_panels(num_rows, w)


def takes_bfloat16(num_rows: int, w: object) -> bool:
    """Whether x may be bfloat16 as well."""
    return isinstance(w, (jax.Array, QuantizedWeight)) and fits(w) and takes_panels(num_rows, w)


def fits_gated(w: object, *, in_bytes: bool = False) -> bool:
    """Whether linear_gated takes a weight: quantised ones in bytes or where there are tile registers, since elsewhere a
    few rows are multiplied by other kernels."""
    if not isinstance(w, (jax.Array, QuantizedWeight)) or len(w.shape) != 2 or w.shape[0] % (2 * ROWS) != 0:
        return False
    if in_bytes:
        return fits_bytes(w)
    return fits(w) and (isinstance(w, jax.Array) or has_bf16_tiles())


def fits(w: jax.Array | QuantizedWeight) -> bool:
    """Whether the CPU multiplies in tiles, and a weight [N, K] is meant for bfloat16 and can be cut into them."""
    dtype = w.expanded if isinstance(w, QuantizedWeight) else w.dtype.name
    return has_bf16_dot() and dtype == "bfloat16" and _is_cut(w)


def fits_bytes(w: object) -> bool:
    """Whether the CPU multiplies bytes, and a weight [N, K] has codes of whole numbers and can be cut into tiles."""
    return isinstance(w, QuantizedWeight) and cpu_ffi_byte_dots.fits(w.kind) and has_byte_dot() and _is_cut(w)


def _is_cut(w: jax.Array | QuantizedWeight) -> bool:
    outputs, inputs = w.shape
    return outputs % ROWS == 0 and inputs % STEP == 0 and outputs > 0 and inputs > 0


@functools.cache
def _handler(kind: str, activation: str = "", *, in_bytes: bool = False) -> str:
    if not (has_byte_dot() if in_bytes else has_bf16_dot()):
        what = "with VNNI" if in_bytes else "for bfloat16"
        raise RuntimeError(f"products in tiles: got a CPU without AVX-512 {what}; allowed: other kernels")
    # Whether there are tile registers also asks for them; without, their instructions end the process.
    form = "bytes" if in_bytes else "tiles" if has_bf16_tiles() else "dots"
    name = f"jaxserve_linear_{kind}_{form}{activation and f'_{activation}'}"
    return register_handler(name, lambda: _make_handler(name, kind, activation, form))


def _make_pack() -> Any:
    """pack(x, x_stride, rows, k, target, space): up to ROWS rows of x as the tiles of all k; missing rows repeat the
    last."""

    def emit(e: Emitter, x, x_stride, rows, k, target, space) -> None:
        b = e.b
        starts = emit_row_starts(e, x, x_stride, rows)
        with emit_loop(e, 0, k, STEP) as (i, _):
            offset = b.mul(i, e.const(4))
            halves = [
                [e.to_bf16(e.load(e.at(b.add(start, offset), 4 * half))) for half in (0, LANES)] for start in starts
            ]
            emit_pairs(e, halves, b.add(target, b.mul(i, e.const(TILE_BYTES // STEP))))

    return void_intrinsic((types.intp,) * 6, emit)


def _make_round() -> Any:
    """round(x, count, target): so many values as bfloat16, a multiple of 16."""

    def emit(e: Emitter, x, count, target) -> None:
        with emit_loop(e, 0, count, LANES) as (i, _):
            value = e.to_bf16(e.load(e.b.add(x, e.b.mul(i, e.const(4)))))
            e.store(value, e.b.add(target, e.b.mul(i, e.const(2))), 2 * LANES)

    return void_intrinsic((types.intp,) * 3, emit)


def _make_expand(kind: str) -> Any:
    """expand(w, w_stride, k, target, space): a tile of outputs, all k, to rows of bfloat16; space has SCALE_BYTES."""
    expand_tile = make_expand_tile(kind)

    def emit(e: Emitter, w, w_stride, k, target, space) -> None:
        b = e.b
        with emit_loop(e, 0, k, STEP) as (i, _):
            expand_tile(e, w, w_stride, i, k, b.add(target, b.mul(i, e.const(2))), b.mul(k, e.const(2)), space)

    return void_intrinsic((types.intp,) * 5, emit)


def _make_fetch() -> Any:
    """fetch(address, num_bytes): into the cache, without waiting."""

    def emit(e: Emitter, address, num_bytes) -> None:
        with emit_loop(e, 0, num_bytes, LINE) as (offset, _):
            e.prefetch(e.b.add(address, offset))

    return void_intrinsic((types.intp,) * 2, emit)


@jit
def _packed_bytes(k):
    return k * (TILE_BYTES // STEP)


class _Arithmetic(NamedTuple):
    """How x is laid out, weights are expanded and sums are made: numba functions."""

    pack: Any  # (x, x_stride, rows, k, target, space of SCRATCH_BYTES): up to ROWS rows of x
    packed_bytes: Any  # (k): what they take,
    read_bytes: Any  # (k): and what of it is read
    expanded_bytes: Any  # (k): what an expanded output takes
    expand: Any  # (w, w_stride, k, target, space): a tile of outputs; None if there is nothing to expand
    product: Any  # of expanded weights
    begin: Any = None  # (rows): before the first product of a work item
    end: Any = None  # (): after the last
    # Of weights as stored: up to PAIR blocks of rows; and one row of x that is not packed.
    product_of_stored: Any = None
    product_of_one: Any = None
    product_of_few: Any = None  # of expanded weights: up to FEW_ROWS rows of x that are not packed


def _make_arithmetic(name: str, kind: str, activation: str, form: str) -> _Arithmetic:
    if form == "bytes":
        row_bytes = byte_tiles.make_expanded_bytes(kind)
        product = make_product(None, in_registers=False, activation=activation, dots=byte_tiles.make_dots(kind))
        return _Arithmetic(
            byte_tiles.make_pack(kind), byte_tiles.packed_bytes, byte_tiles.read_bytes, row_bytes,
            byte_tiles.make_expand(kind), product,
        )  # fmt: skip

    @named(name)
    def expanded_bytes(k):
        return 2 * k

    is_dense = kind == "bfloat16"
    expand = None if is_dense else _make_expand(kind)
    layout = _make_pack(), _packed_bytes, _packed_bytes, expanded_bytes, expand
    if form == "dots":
        product = make_product(None, in_registers=False, activation=activation)
        return _Arithmetic(*layout, product, product_of_few=make_product_of_few(activation))
    expand_tile = None if is_dense else make_expand_tile(kind)
    product = make_product(None, in_registers=True, activation=activation)
    configure_one = void_intrinsic((), lambda e: Tiles(e).configure(1))

    @named(name)
    def begin(rows):
        if rows == 1:
            configure_one()
        else:
            configure_tiles()

    of_stored = product if is_dense else make_product(expand_tile, in_registers=True, activation=activation)
    of_one = make_product_of_one(expand_tile, activation)
    return _Arithmetic(*layout, product, begin, release_tiles, of_stored, of_one)


def _make_handler(name: str, kind: str, activation: str, form: str) -> tuple[Any, Any, Any]:
    round_rows, fetch, is_dense, has_stored = _make_round(), _make_fetch(), kind == "bfloat16", form == "tiles"
    unpacked_rows = {"tiles": 1, "dots": FEW_ROWS}.get(form, 0)  # so many rows of x, or fewer, are only rounded

    def or_nothing(function: Any, count: int) -> Any:  # numba compiles calls that are never made
        return void_intrinsic((types.intp,) * count, lambda *_: None) if function is None else function

    pack, packed_bytes, read_bytes, expanded_bytes, expand, product, *of_stored = _make_arithmetic(
        name, kind, activation, form
    )
    expand = or_nothing(expand, 5)
    begin, end, product_of_stored, product_of_one, product_of_few = map(or_nothing, of_stored, (1, 0, 14, 10, 11))
    # Rows of w for each column of y; those of the second kind lie below all of the first.
    per_output = 2 if activation else 1
    w_type, slab = BF16 if is_dense else U8, PAIR * ROWS // per_output  # outputs computed together
    block_size, stored_bytes = 2 * BLOCK if is_dense else block_bytes(kind), frames.make_stored_bytes(name, kind)

    @named(name)
    def num_outputs(frame):
        return frames.num_outputs(frame) // per_output

    @named(name)
    def plan(frame):
        k, outputs, stored = frames.num_inputs(frame), num_outputs(frame), stored_bytes(frame)
        if not frames.has_shapes(frame, w_type, k if is_dense else stored, STEP, per_output) or outputs % ROWS != 0:
            return BAD_ARGUMENTS
        blocks = (frames.num_rows(frame) + ROWS - 1) // ROWS
        weight_bytes = outputs * per_output * 2 * k
        threads = max(1, min(num_threads(frame), weight_bytes * blocks // _MIN_THREAD_BYTES))
        x_bytes, w_bytes = blocks * packed_bytes(k), 0 if is_dense else PAIR * ROWS * expanded_bytes(k)
        raw = malloc(_SPACE + 64 + x_bytes + threads * w_bytes)
        if raw == 0:
            return NO_MEMORY
        made = (raw + 63) // 64 * 64
        least = _ITEM_BYTES * outputs // weight_bytes
        store_i64(made, PLAN_ITEMS, blocks + frames.cut_outputs(made, outputs, threads, least, slab))
        store_i64(made, _BLOCKS, blocks)
        store_i64(made, _EXPANDED, made + _SPACE + x_bytes)
        store_i64(made, _RAW, raw)
        store_i64(made, _PACKED, 0)
        return made

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), num_outputs(frame)
        blocks, packed, x_stride = load_i64(plan, _BLOCKS), plan + _SPACE, packed_bytes(k)
        scratch = stack(SCRATCH_BYTES)
        if i < blocks:
            source = frames.x_data(frame) + i * ROWS * k * 4
            if rows <= unpacked_rows:
                round_rows(source, rows * k, packed)
            else:
                pack(source, k * 4, min(ROWS, rows - i * ROWS), k, packed + i * x_stride, scratch)
            atomic_add(plan + _PACKED, 1)
            return
        first = frames.first_output(plan, i - blocks)
        last = first + frames.item_outputs(plan, i - blocks)
        # What this thread is likely to take next, if all items are alike.
        following, num_items = i - blocks + load_i64(plan, PLAN_THREADS), load_i64(plan, PLAN_ITEMS) - blocks
        group = blocks if has_stored else max(_GROUP_BYTES // read_bytes(k) // PAIR, 1) * PAIR  # blocks of rows
        turns = (min(group, blocks) + PAIR - 1) // PAIR
        fetch_step = (slab * block_size // turns + LINE - 1) // LINE * LINE
        stored, w, w_stride = stored_bytes(frame), frames.w_data(frame), expanded_bytes(k)
        expanded = load_i64(plan, _EXPANDED) + worker * PAIR * ROWS * w_stride
        fetch(w + first * stored, slab * stored)  # what comes after it is fetched on the way
        if activation:
            fetch(w + (outputs + first) * stored, slab * stored)
        wait_for(plan + _PACKED, blocks)
        begin(rows)
        for above in range(0, blocks, group):
            below = min(above + group, blocks)
            for n in range(first, last, slab):
                tiles, weights, y = min(PAIR, (last - n) // ROWS), w + n * stored, frames.y_data(frame) + n * 4
                apart = ROWS * stored
                if activation:
                    tiles, apart = PAIR, outputs * stored
                following_output = n + slab  # or without any more, what is in the cache already
                if following_output >= last:
                    following_output = frames.first_output(plan, following) if following < num_items else n
                ahead = w + following_output * stored
                if has_stored and rows == 1:
                    product_of_one(tiles, weights, apart, stored, packed, k, y, scratch, ahead, fetch_step)
                    continue
                if has_stored and not is_dense and turns == 1:
                    product_of_stored(
                        tiles, blocks, weights, apart, stored, packed, x_stride, k,
                        y, outputs * 4, rows - (blocks - 1) * ROWS, scratch, ahead, fetch_step,
                    )  # fmt: skip
                    continue
                if not is_dense:
                    for tile in range(tiles):
                        expand(weights + tile * apart, stored, k, expanded + tile * ROWS * w_stride, scratch)
                    weights, apart = expanded, ROWS * w_stride
                if rows <= unpacked_rows:
                    product_of_few(rows, tiles, weights, apart, w_stride, packed, k, y, outputs * 4, ahead, fetch_step)
                    continue
                for m in range(above, below, PAIR):
                    count = min(PAIR, below - m)
                    product(
                        tiles, count, weights, apart, w_stride, packed + m * x_stride, x_stride, k,
                        y + m * ROWS * outputs * 4, outputs * 4, min(ROWS, rows - (m + count - 1) * ROWS), scratch,
                        ahead + (m - above) // PAIR * (k // STEP) * fetch_step, fetch_step,
                    )  # fmt: skip
        end()

    @named(name)
    def finish(frame, plan):
        free(load_i64(plan, _RAW))

    return plan, body, finish
