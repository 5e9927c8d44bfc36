"""What the Mosaic GPU kernels share: buffers, products, constants of Hopper's warpgroup instructions.

The kernels restrict themselves to what JAX's GPU interpreter runs, with two exceptions that live here, both of
them about registers: on a GPU the left operand of a product may come from registers, and a product may add to
values that are already in registers. The interpreter knows neither, so `interpret` chooses an equal form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
# Starting value of a running maximum: finite, so that no inf - inf can appear. Masked scores are -inf.
LOWEST = -1e30
MMA_M = 64  # wgmma takes M in steps of 64 rows per warpgroup
MMA_N = 8  # and N in steps of 8 columns
ALIGN = 8  # rows of one shared-memory tile: a copy of part of a tiled array starts at a multiple
SMEM_BYTES = 232448  # shared memory one block can have on Hopper


def swizzled(*shape: int, dtype: Any) -> Any:
    """A shared-memory buffer in the layout that TMA and wgmma both take; the last axis a multiple of 128 bytes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((ALIGN, columns)), plgpu.SwizzleTransform(128)))


def product(shape: tuple[int, int], a: Any, b: Any) -> jax.Array:
    """a @ b in float32; waits for the result."""

    def body(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def add_product(acc: jax.Array, a: Any, b: Any, *, interpret: bool) -> jax.Array:
    """acc + a @ b, in place in the accumulator's registers on a GPU."""
    if interpret:
        return acc + product(acc.shape, a, b)
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(plgpu.ACC.init(acc))


def soft_cap(scores: jax.Array, scale: float, cap: float) -> jax.Array:
    """cap * tanh(scale * scores / cap), written with exp2: the hardware's tanh has 11 bits only."""
    power = jnp.exp2(scores * (2 * LOG2E * scale / cap))
    return cap - (2 * cap) / (power + 1.0)


def clear_tail(values: Any, first_bad: jax.Array) -> None:
    """Zero the rows of values [64 * n, columns] from `first_bad` on, in shared memory.

    Slots of a page that were never written may hold anything, NaN included, and 0 * NaN is NaN.
    """
    rows, columns = values.shape
    for start in range(0, rows, MMA_M):
        part = values.at[pl.ds(start, MMA_M)]
        # 64 columns at a time: few registers.
        for column in range(0, columns, 64):
            piece = part.at[:, pl.ds(column, 64)]
            loaded = plgpu.layout_cast(piece[...], plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=plgpu.Layout.WGMMA)
            piece[...] = jnp.where(row + start < first_bad, loaded, jnp.zeros_like(loaded))
    plgpu.commit_smem()


def launch(
    body: Callable[..., None], name: str, *, interpret: Any, scratch_bytes: int = 2048, **arguments: Any
) -> Callable[..., Any]:
    """plgpu.kernel with a name that shows up in profiles; interpret: InterpretGPUParams or None; scratch_bytes: shared
    memory for reductions that cross warps."""
    body.__name__ = name  # type: ignore[attr-defined]
    return plgpu.kernel(
        body,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=scratch_bytes),
        interpret=interpret,
        **arguments,
    )
