"""Products of many rows in tile registers (AMX): weights are turned round once for all rows.

out = x @ w.T. cpu_ffi_tiles multiplies the weights as they lie, which is right for few rows, and turns every sum round
on its way to y. Here x is the left matrix, as it lies; the weights of 32 outputs and some hundred inputs, a panel, are
laid out in pairs, 16 outputs side by side, beside the products with the panel before; the sums of a tile are stored
where they belong. A sum is made of the same products in the same order, so it has the same bits.

Inputs are cut into runs so short that a panel stays in the first cache while rows pass by, and all rows of a run in the
second while panels do; sums wait in memory from run to run (Goto & van de Geijn, 2008, "Anatomy of high-performance
matrix multiplication").

With an activation a pair of tiles is gate and factor, whose sums go through memory: those of one pair of blocks are
finished beside the products of the next, which leave the vector units idle. Such a result may be bfloat16, as may x:
what is rounded there would be rounded for the next product anyway, and takes half the way through the caches.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    BF16,
    F32,
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
from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_tiles
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS, STEP, TILE_BYTES
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import configure_tiles, release_tiles
from jaxserve.pallas_kernels.matmul import cpu_ffi_frame as frames
from jaxserve.pallas_kernels.matmul.cpu_ffi_panel_products import (
    SPACE_BYTES,
    SUMS_BYTES,
    make_finish,
    make_lay_out,
    make_product,
    make_round,
    slab_outputs,
)
from jaxserve.pallas_kernels.matmul.cpu_ffi_tile_products import PAIR
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight

# From which on turning the weights round costs less than turning the sums. Three pairs of blocks at least: with fewer a
# product would have to lay out more tiles of the next panel than it has steps.
MIN_ROWS = 96
ROW_MULTIPLE = PAIR * ROWS
OUTPUT_MULTIPLE = PAIR * ROWS  # of the weight's rows, gate and factor counted apart
_ITEM_BYTES = 65536  # weights in bfloat16 per work item, at least
_MAX_STEPS, _RUN_STEPS = 24, 18  # inputs, in STEPs, up to which there is one run, else runs of about so many
_WAITING_BYTES = 524288  # of sums that wait from one run of inputs to the next: half of the second cache, or less
_BOTH_SUMS_BYTES = 2 * SUMS_BYTES

# The plan: its head, then numbers, then the count of rounded blocks on a cache line of its own, then the rows of x as
# tiles, if they come as float32, and each worker's two panels and waiting sums.
_BLOCKS, _RAW, _WORK, _WORK_BYTES = (frames.CUT_END + 8 * i for i in range(4))
_ROUNDED, _SPACE = 128, 192


def fits_panels(num_rows: int, w: jax.Array | QuantizedWeight) -> bool:
    """Whether a product in tile registers, with weights that cpu_ffi_tiles takes, is one for this file."""
    return num_rows >= MIN_ROWS and num_rows % ROW_MULTIPLE == 0 and w.shape[0] % OUTPUT_MULTIPLE == 0


def linear_panels(
    x: jax.Array, w: jax.Array | QuantizedWeight, activation: str = "", dtype: Any = jnp.float32
) -> jax.Array:
    """x [T, K], rounded to bfloat16 unless it has that type, times w [N, K] -> [T, N] float32. With an activation it is
    that of the product with the upper half of w times that with the lower: [T, N / 2] float32 or bfloat16.

    Raises ValueError for another `dtype`.
    """
    allowed = (jnp.float32, jnp.bfloat16) if activation else (jnp.float32,)
    if dtype not in allowed:
        names = " or ".join(np.dtype(each).name for each in allowed)
        raise ValueError(f"result of a product: got {np.dtype(dtype).name}; allowed: {names}")
    if x.dtype != jnp.bfloat16:
        x = x.astype(jnp.float32)
    is_dense = not isinstance(w, QuantizedWeight)
    handler = _handler("bfloat16" if is_dense else w.kind, activation, rounds=dtype == jnp.bfloat16)
    outputs = w.shape[0] // 2 if activation else w.shape[0]
    call = jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct((x.shape[0], outputs), dtype))
    return call(x, w if is_dense else w.codes)


@functools.cache
def _handler(kind: str, activation: str, *, rounds: bool) -> str:
    # Whether there are tile registers also asks for them; without, their instructions end the process.
    if not has_bf16_tiles():
        raise RuntimeError("products of panels: got a CPU without tile registers for bfloat16; allowed: other kernels")
    parts = "jaxserve_linear", kind, "panels", activation, "to_bf16" * rounds
    name = "_".join(part for part in parts if part)
    return register_handler(name, lambda: _make_handler(name, kind, activation, rounds))


def _make_handler(name: str, kind: str, activation: str, rounds: bool) -> tuple[Any, Any, Any]:
    round_rows, lay_out = make_round(), make_lay_out(kind)
    product, finish_sums = make_product(kind, activation, rounds), make_finish(activation, rounds)
    is_dense = kind == "bfloat16"
    w_type, y_type = BF16 if is_dense else U8, BF16 if rounds else F32
    stored_bytes = frames.make_stored_bytes(name, kind)
    per_output, y_bytes = 2 if activation else 1, 2 if rounds else 4
    slab = slab_outputs(activation)

    @named(name)
    def num_outputs(frame):
        return frames.num_outputs(frame) // per_output

    @named(name)
    def num_runs(k):
        steps = k // STEP
        return 1 if steps <= _MAX_STEPS else (steps + _RUN_STEPS - 1) // _RUN_STEPS

    @named(name)
    def run_start(k, run):
        """The first input of a run, or where the last one ends; runs differ by one step at most."""
        return k // STEP * run // num_runs(k) * STEP

    @named(name)
    def panel_bytes(k):
        return PAIR * (k // STEP // num_runs(k) + 1) * TILE_BYTES

    @named(name)
    def slabs_waiting(rows):
        """So many slabs of outputs go through one run of inputs before the next."""
        return max(_WAITING_BYTES // (rows // ROWS * PAIR * TILE_BYTES), 1)

    @named(name)
    def is_rounded(frame):
        return dtype(arg(frame, 0)) == BF16

    @named(name)
    def plan(frame):
        rows, k, outputs, stored = (
            frames.num_rows(frame), frames.num_inputs(frame), num_outputs(frame), stored_bytes(frame),
        )  # fmt: skip
        x, w, y = arg(frame, 0), arg(frame, 1), ret(frame, 0)
        if rank(x) != 2 or rank(w) != 2 or rank(y) != 2 or dtype(w) != w_type:
            return BAD_ARGUMENTS
        if dtype(x) != F32 and not is_rounded(frame):
            return BAD_ARGUMENTS
        if dtype(y) != y_type or dim(y, 0) != rows or dim(y, 1) != outputs or outputs * per_output != dim(w, 0):
            return BAD_ARGUMENTS
        if k <= 0 or k % STEP != 0 or dim(w, 1) != (k if is_dense else stored):
            return BAD_ARGUMENTS
        if rows < MIN_ROWS or rows % ROW_MULTIPLE != 0 or outputs % slab != 0 or outputs <= 0:
            return BAD_ARGUMENTS
        blocks = 0 if is_rounded(frame) else rows // ROWS
        threads = num_threads(frame)
        work_bytes = 2 * panel_bytes(k)
        if num_runs(k) > 1:
            work_bytes += slabs_waiting(rows) * rows // ROWS * PAIR * TILE_BYTES
        raw = malloc(_SPACE + 64 + blocks * ROWS * 2 * k + threads * work_bytes)
        if raw == 0:
            return NO_MEMORY
        made = (raw + 63) // 64 * 64
        least = _ITEM_BYTES // (per_output * 2 * k)
        store_i64(made, PLAN_ITEMS, blocks + frames.cut_outputs(made, outputs, threads, least, slab))
        store_i64(made, _BLOCKS, blocks)
        store_i64(made, _WORK, made + _SPACE + blocks * ROWS * 2 * k)
        store_i64(made, _WORK_BYTES, work_bytes)
        store_i64(made, _RAW, raw)
        store_i64(made, _ROUNDED, 0)
        return made

    @named(name)
    def panel_at(p, slabs, runs, together):
        """(slab, run of inputs) of the p-th panel of an item."""
        begin = p // (together * runs) * together
        size = max(min(together, slabs - begin), 1)
        place = p - begin * runs
        return begin + place % size, place // size

    @named(name)
    def body(frame, plan, i, worker):
        rows, k, outputs = frames.num_rows(frame), frames.num_inputs(frame), num_outputs(frame)
        blocks = load_i64(plan, _BLOCKS)
        if i < blocks:
            round_rows(frames.x_data(frame) + i * ROWS * k * 4, k * 4, k, plan + _SPACE + i * ROWS * k * 2)
            atomic_add(plan + _ROUNDED, 1)
            return
        x, x_line, x_step = plan + _SPACE, LINE, TILE_BYTES
        if is_rounded(frame):
            x, x_line, x_step = frames.x_data(frame), 2 * k, 2 * STEP
        first = frames.first_output(plan, i - blocks)
        last = first + frames.item_outputs(plan, i - blocks)
        stored, x_block, turns = stored_bytes(frame), ROWS * 2 * k, rows // (PAIR * ROWS)
        work = load_i64(plan, _WORK) + worker * load_i64(plan, _WORK_BYTES)
        waiting = work + 2 * panel_bytes(k)
        space, sums = stack(SPACE_BYTES), stack(_BOTH_SUMS_BYTES)
        apart = (outputs if activation else ROWS) * stored  # between the two tiles of a panel
        w, y, y_stride = frames.w_data(frame) + first * stored, data(ret(frame, 0)), outputs * y_bytes
        runs, slabs, together = num_runs(k), (last - first) // slab, slabs_waiting(rows)
        num_panels = slabs * runs
        lay_out(w, apart, stored, k, run_start(k, 1) // STEP, work, space)
        wait_for(plan + _ROUNDED, blocks)
        configure_tiles()
        turn, y_before = 0, 0
        for p in range(num_panels):
            this, run = panel_at(p, slabs, runs, together)
            following, next_run = panel_at(p + 1, slabs, runs, together)
            after, after_run = panel_at(p + 2, slabs, runs, together)
            start, is_last = run_start(k, run), run + 1 == runs
            next_start, after_start = run_start(k, next_run), run_start(k, after_run)
            next_steps = (run_start(k, next_run + 1) - next_start) // STEP if p + 1 < num_panels else 0
            after_w = w + after * slab * stored if p + 2 < num_panels else 0
            per_turn = (PAIR * next_steps + turns - 1) // turns  # tiles of the next panel for each pair of blocks
            for m in range(turns):
                target = y + m * PAIR * ROWS * y_stride + (first + this * slab) * y_bytes
                number = min(m * per_turn, PAIR * next_steps)
                product(
                    work + p % 2 * panel_bytes(k), (run_start(k, run + 1) - start) // STEP,
                    x + m * PAIR * x_block + start // STEP * x_step, x_line, x_step, x_block,
                    waiting + (this % together * turns + m) * SUMS_BYTES, 1 - min(run, 1), 1 if is_last else 0,
                    target, y_stride, sums + turn * SUMS_BYTES, sums + (1 - turn) * SUMS_BYTES, y_before,
                    apart, stored, k, w + following * slab * stored, next_start, next_steps,
                    work + (p + 1) % 2 * panel_bytes(k), number, min(per_turn, PAIR * next_steps - number),
                    after_w, after_start, space,
                )  # fmt: skip
                y_before = 0
                if is_last:
                    turn, y_before = 1 - turn, target
        finish_sums(sums + (1 - turn) * SUMS_BYTES, y_before, y_stride)
        release_tiles()

    @named(name)
    def finish(frame, plan):
        free(load_i64(plan, _RAW))

    return plan, body, finish
