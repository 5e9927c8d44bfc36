"""Grouped products on Hopper GPUs (Pallas Mosaic GPU): every group's rows times its own matrix, nothing else.

XLA expands `ragged_dot` for GPUs into a product of all rows with every matrix, so that its cost grows with the number
of experts. Here the rows of each group are cut into tiles of 64 that never straddle groups, and a block computes some
outputs of one tile. Two warpgroups compute, each its half of the outputs; a third copies rows and weights with TMA.
A group of few rows pays for 64, but so few are bound by reading the weights.
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
from jaxserve.pallas_kernels.mosaic.hopper import ALIGN, MMA_M, add_product, free_slot, launch, swizzled
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import LOAD_ALIGN, cut_tiles
from jaxserve.pallas_kernels.tuning import default_blocks

COMPUTING = 2
ROWS = MMA_M  # of one tile


@dataclasses.dataclass(frozen=True)
class GroupedBlocks:
    """Block sizes.

    outputs  of one warpgroup, a multiple of 8; twice as many of a block
    inputs   of one step of the sum, a multiple of 64
    stages   steps in flight
    """

    outputs: int = 128
    inputs: int = 64
    stages: int = 4


def fits(x_shape: tuple[int, ...], w: jax.Array) -> bool:
    """Whether this kernel takes such a product."""
    _, num_outputs, num_inputs = w.shape
    return x_shape[0] > 0 and w.dtype == jnp.bfloat16 and num_outputs % 128 == 0 and num_inputs % 64 == 0


# A program of its own inside the step: layers that are alike are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def grouped_matmul_mosaic(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [E, N, K] bfloat16
    group_sizes: jax.Array,  # [E] int32
    *,
    blocks: GroupedBlocks | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[M, N] float32; rows behind the last group are zero."""
    num_rows, (num_groups, num_outputs, _) = x.shape[0], w.shape
    widest = "256" if num_outputs % 256 == 0 else "128"
    blocks = blocks or default_blocks(GroupedBlocks, "grouped_matmul", widest)
    end = jnp.cumsum(group_sizes)
    max_tiles = (num_rows + (LOAD_ALIGN - 1 + ROWS - 1) * min(num_groups, num_rows)) // ROWS
    group, begin, first, count = cut_tiles(
        end - group_sizes, group_sizes, tile_tokens=ROWS, max_tiles=max(1, max_tiles)
    )
    tiles = jnp.stack([group, begin // ALIGN, first, count], axis=1).astype(jnp.int32)
    # A tile is loaded whole: the last one may reach past the last row.
    padded = jnp.pad(x, ((0, ROWS + -num_rows % ALIGN), (0, 0))).astype(w.dtype)
    out = _products(padded, w, tiles, blocks, interpret)[:num_rows]
    return jnp.where((jnp.arange(num_rows) < end[-1])[:, None], out, 0.0)


def _products(x: jax.Array, w: jax.Array, tiles: jax.Array, blocks: GroupedBlocks, interpret: Any) -> jax.Array:
    """[rows of x, N] float32; rows of no tile are not written."""
    _, num_outputs, num_inputs = w.shape
    stages, outputs, inputs = blocks.stages, blocks.outputs, blocks.inputs
    steps = num_inputs // inputs

    def kernel(x_ref, w_ref, tiles_ref, out_ref, x_smem, w_smem, out_smem, ready, free):
        tile, block, warpgroup = (lax.axis_index(name) for name in ("tile", "block", "warpgroup"))
        group, load, first, count = (tiles_ref[tile, column] for column in range(4))
        load_row = load * ALIGN

        @pl.when(jnp.logical_and(warpgroup == COMPUTING, count > 0))
        def _copy():
            @pl.loop(0, steps)
            def _step(step):
                slot = free_slot(step, stages, free)
                columns = pl.ds(step * inputs, inputs)
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(load_row, ROWS), columns], x_smem.at[slot], ready.at[slot])
                for half in range(COMPUTING):
                    part = pl.ds((block * COMPUTING + half) * outputs, outputs)
                    plgpu.copy_gmem_to_smem(w_ref.at[group, part, columns], w_smem.at[slot, half], ready.at[slot])

        @pl.when(jnp.logical_and(warpgroup < COMPUTING, count > 0))
        def _compute():
            def step_body(step, acc):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(ready.at[slot])
                weights = w_smem.at[slot, warpgroup].transpose((1, 0))
                acc = add_product(acc, x_smem.at[slot], weights, interpret=interpret is not None)
                plgpu.barrier_arrive(free.at[slot])
                return acc

            acc = plgpu.layout_cast(jnp.zeros((ROWS, outputs), jnp.float32), plgpu.Layout.WGMMA)
            acc = lax.fori_loop(0, steps, step_body, acc)
            result = out_smem.at[warpgroup]
            result[...] = acc
            plgpu.commit_smem()
            columns = pl.ds((block * COMPUTING + warpgroup) * outputs, outputs)

            @pl.when(count == ROWS)
            def _store_tile():
                plgpu.copy_smem_to_gmem(result, out_ref.at[pl.ds(load_row, ROWS), columns])

            # The rows around a short tile belong to other groups: store one by one.
            @pl.when(count < ROWS)
            def _store_rows():
                @pl.loop(first, first + count)
                def _(i):
                    plgpu.copy_smem_to_gmem(result.at[pl.ds(i, 1)], out_ref.at[pl.ds(load_row + i, 1), columns])

            plgpu.wait_smem_to_gmem(0)

    return launch(
        kernel,
        "grouped_matmul",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32),
        grid=(tiles.shape[0], num_outputs // (COMPUTING * outputs)),
        grid_names=("tile", "block"),
        num_threads=COMPUTING + 1,
        scratch_types=[
            swizzled(stages, ROWS, inputs, dtype=w.dtype),
            swizzled(stages, COMPUTING, outputs, inputs, dtype=w.dtype),
            plgpu.SMEM((COMPUTING, ROWS, outputs), jnp.float32),
            plgpu.Barrier(num_arrivals=COMPUTING + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
        ],
    )(x, w, tiles)
