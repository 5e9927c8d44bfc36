"""Products with quantised weights on Hopper GPUs (Pallas Mosaic GPU): codes are read as they are stored.

The product is computed transposed, out^T [N, M] = w [N, K] @ x^T [K, M]: a step has few rows, and wgmma takes its left
side in steps of 64 but its right side in steps of 8. Left sides may come from registers: two warpgroups turn codes into
bfloat16 there, each for its own outputs, while a third copies rows, codes and scales with TMA. With a scale for some
inputs a weight is rounded to bfloat16 as XLA's expansion of it would be; with one per output codes are exact, and the
sum is scaled. The inputs are cut into runs, so that few outputs fill the GPU too, and the runs are summed by XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.matmul.quantized import CODES_PER_WORD, FP8_SCALE, PAD, PlanarWeight
from jaxserve.pallas_kernels.mosaic.hopper import (
    COMPUTING_REGISTERS,
    COPYING_REGISTERS,
    MMA_M,
    MMA_N,
    free_slot,
    launch,
    shift_words,
    swizzled,
)
from jaxserve.pallas_kernels.tuning import default_blocks

COMPUTING = 2
STEP = PAD  # inputs of one step
HALF = STEP // 2  # and of one product
FEW_ROWS = 32
MAX_TILE = 128  # rows of x that one block multiplies at most
# Rows from which on XLA's product of the expanded weight pays for writing and reading it. Modelled, not measured: two
# times 2 bytes a weight at 4.8 TB/s take as long as the products of about 400 rows at 989 Tflop/s.
MAX_ROWS = 256


@dataclasses.dataclass(frozen=True)
class QuantBlocks:
    """Block sizes.

    outputs   of one warpgroup, 64 or 128; twice as many of a block
    stages    steps in flight
    blocks    of the whole grid that cutting the inputs into runs aims at
    min_steps steps of a run at least
    """

    outputs: int = 64
    stages: int = 4
    blocks: int = 264
    min_steps: int = 8


def cut_inputs(padded: tuple[int, int], blocks: QuantBlocks) -> tuple[int, int]:
    """(runs of steps, steps of a run) for a weight of this size; whatever the number of rows, so that it does not
    change a row's result."""
    num_outputs, steps = padded[0], padded[1] // STEP
    runs = max(1, min(blocks.blocks * PAD // num_outputs, steps // blocks.min_steps))
    length = -(-steps // runs)
    return -(-steps // length), length


# A program of its own inside the step: layers that are alike are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def quant_matmul_mosaic(
    x: jax.Array,  # [M, K] float32
    w: PlanarWeight,  # [N, K]
    *,
    blocks: QuantBlocks | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[M, N] float32. x is rounded to bfloat16, sums are float32."""
    num_rows, num_inputs = x.shape
    num_outputs = w.scales.shape[-1]
    tile = min(MAX_TILE, -(-num_rows // MMA_N) * MMA_N)
    # Rows are copied for every block: with many of them a block has more outputs.
    is_many = num_rows > FEW_ROWS and num_outputs % (2 * PAD) == 0
    blocks = blocks or default_blocks(QuantBlocks, "quant_matmul", "many" if is_many else "few")
    if num_outputs % (COMPUTING * blocks.outputs):
        raise ValueError(f"blocks.outputs: got {blocks.outputs}; allowed for {num_outputs} outputs: 64")
    padded = jnp.pad(x, ((0, -num_rows % tile), (0, -num_inputs % PAD))).astype(jnp.bfloat16)
    out = _products(padded, w, tile, blocks, interpret)
    return out.sum(axis=0).T[:num_rows, : w.shape[0]]


def _decode(words: jax.Array, form: str, index: int, *, interpret: bool) -> jax.Array:
    """The code number `index` of each word of 16 bits, exact: in bfloat16, those of float8_e4m3fn in float16 and
    FP8_SCALE too small (their bits with three of the exponent missing)."""
    shift = functools.partial(shift_words, words, interpret=interpret)
    if form == "fp8":
        sign, rest = shift(0 if index else -8), shift(1 if index else -7)
        return lax.bitcast_convert_type((sign & 0x8000) | (rest & 0x3F80), jnp.float16)
    low = shift(16 // CODES_PER_WORD[form] * index)

    def small(mask: int) -> jax.Array:
        # The bits of 128, some of its mantissa and perhaps the lowest of its exponent set.
        return lax.bitcast_convert_type((low & mask) | 0x4300, jnp.bfloat16)

    if form == "int4":
        return small(0x0F) - 128.0
    return small(0x7F) - small(0x80)  # 128 + seven bits, less 128 or, where the sign is set, 256


def _joined(pieces: list[jax.Array]) -> jax.Array:
    return lax.concatenate(pieces, 1) if len(pieces) > 1 else pieces[0]


def _products(x: jax.Array, w: PlanarWeight, tile: int, blocks: QuantBlocks, interpret: Any) -> jax.Array:
    """out^T [runs, N, rows of x] float32, to be summed over runs."""
    num_outputs, num_rows, num_inputs = w.scales.shape[-1], *x.shape
    runs, run_steps = cut_inputs((num_outputs, num_inputs), blocks)
    stages, outputs = blocks.stages, blocks.outputs
    is_wide = outputs > MMA_M  # one block on an SM, which takes all registers
    per_word = CODES_PER_WORD[w.form]
    inputs = STEP // per_word  # that lie in the same place of their words
    code_scale = FP8_SCALE if w.form == "fp8" else 1.0
    groups = STEP // w.group if w.group else 0  # of a step
    planes = [] if not groups else [w.scales] if w.offsets is None else [w.scales, w.offsets]
    layout = plgpu.Layout.WGMMA

    def kernel(x_ref, codes_ref, scales_ref, *rest):
        offsets_ref, rest = (None, rest) if w.offsets is None else (rest[0], rest[1:])
        out_ref, x_smem, codes_smem, *plane_smem, w_smem, ready, free = rest
        plane_refs = (scales_ref, offsets_ref)[: len(planes)]
        block, run, row_tile, warpgroup = (lax.axis_index(name) for name in ("block", "run", "row_tile", "warpgroup"))
        rows = pl.ds(row_tile * tile, tile)
        first = run * run_steps
        steps = jnp.minimum(num_inputs // STEP - first, run_steps)

        @pl.when(warpgroup == COMPUTING)
        def _copy():
            if is_wide:
                plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

            @pl.loop(0, steps)
            def _step(step):
                slot = free_slot(step, stages, free)
                at = first + step
                plgpu.copy_gmem_to_smem(x_ref.at[rows, pl.ds(at * STEP, STEP)], x_smem.at[slot], ready.at[slot])
                for half in range(COMPUTING):
                    part = pl.ds((block * COMPUTING + half) * outputs, outputs)
                    source = codes_ref.at[part, pl.ds(at * inputs, inputs)]
                    plgpu.copy_gmem_to_smem(source, codes_smem.at[slot, half], ready.at[slot])
                    for plane, target in zip(plane_refs, plane_smem):
                        source = plane.at[pl.ds(at * groups, groups), part]
                        plgpu.copy_gmem_to_smem(source, target.at[slot, half], ready.at[slot])

        @pl.when(warpgroup < COMPUTING)
        def _compute():
            if is_wide:
                plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")

            def values_of(words, slot, index):
                """Weights [outputs, inputs] in bfloat16 of code number `index` in each word."""
                codes = _decode(words, w.form, index, interpret=interpret is not None)
                if not groups:
                    return codes.astype(jnp.float32).astype(jnp.bfloat16) if w.form == "fp8" else codes
                pieces = []
                for first_input in range(0, inputs, w.group):
                    piece = codes[:, first_input : first_input + w.group].astype(jnp.float32)
                    group = (index * inputs + first_input) // w.group
                    scale, *offset = (
                        plgpu.load(plane.at[slot, warpgroup, group], layout=layout.reduce(1)).astype(jnp.float32)
                        for plane in plane_smem
                    )
                    piece = piece * lax.broadcast_in_dim(scale * code_scale, piece.shape, [0])
                    if offset:
                        piece = piece + lax.broadcast_in_dim(offset[0], piece.shape, [0])
                    pieces.append(piece.astype(jnp.bfloat16))
                return _joined(pieces)

            def sum_steps(acc_ref):
                @pl.loop(0, steps)
                def _step(step):
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    words = plgpu.load(codes_smem.at[slot, warpgroup], layout=layout)
                    for half in range(2):
                        parts = range(half * per_word // 2, (half + 1) * per_word // 2)
                        left = _joined([values_of(words, slot, index) for index in parts])
                        if interpret is not None:
                            w_smem.at[warpgroup, half][...] = left
                            plgpu.commit_smem()
                            left = w_smem.at[warpgroup, half]
                        right = x_smem.at[slot, :, pl.ds(half * HALF, HALF)].transpose((1, 0))
                        plgpu.wgmma(acc_ref, left, right)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return acc_ref[...]

            acc = pl.run_scoped(sum_steps, plgpu.ACC((outputs, tile), jnp.float32))
            part = pl.ds((block * COMPUTING + warpgroup) * outputs, outputs)
            if not groups:
                scale = plgpu.load(scales_ref.at[0, part], layout=layout.reduce(1), optimized=False)
                acc = acc * lax.broadcast_in_dim(scale * code_scale, acc.shape, [0])
            # Whole 32-byte sectors, not whole cache lines.
            plgpu.store(out_ref.at[run, part, rows], acc, optimized=False)

    # On a GPU weights reach the product through registers: their buffer is for the interpreter.
    w_shape = (1, 8, 64) if interpret is None else (COMPUTING, 2, outputs, HALF)
    return launch(
        kernel,
        "quant_matmul",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((runs, num_outputs, num_rows), jnp.float32),
        grid=(num_outputs // (COMPUTING * outputs), runs, num_rows // tile),
        grid_names=("block", "run", "row_tile"),
        num_threads=COMPUTING + 1,
        scratch_types=[
            swizzled(stages, tile, STEP, dtype=jnp.bfloat16),
            swizzled(stages, COMPUTING, outputs, inputs, dtype=w.codes.dtype),
            *(plgpu.SMEM((stages, COMPUTING, groups, outputs), plane.dtype) for plane in planes),
            swizzled(*w_shape, dtype=jnp.bfloat16),
            plgpu.Barrier(num_arrivals=1 + COMPUTING * (1 + len(planes)), num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
        ],
    )(x, w.codes, w.scales, *([] if w.offsets is None else [w.offsets]))
