"""What the Mosaic GPU kernels share: buffers, products, constants of Hopper's warpgroup instructions.

The kernels restrict themselves to what JAX's GPU interpreter runs, with three exceptions that live here, all of them
about registers: on a GPU the left operand of a product may come from registers, a product may add to values that are
already in registers, and two words of 16 bits may be shifted at once. The interpreter knows none of these, so
`interpret` chooses an equal form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

LOG2E = math.log2(math.e)
# Starting value of a running maximum: finite, so that no inf - inf can appear. Masked scores are -inf.
LOWEST = -1e30
MMA_M = 64  # wgmma takes M in steps of 64 rows per warpgroup
MMA_N = 8  # and N in steps of 8 columns
ALIGN = 8  # rows of one shared-memory tile: a copy of part of a tiled array starts at a multiple
SMEM_BYTES = 232448  # shared memory one block can have on Hopper
# A block of two computing warpgroups and one that copies starts with 168 registers a thread. What the one gives away
# must be enough for both others, or they wait for it for ever: 40 + 2 x 232 = 3 x 168.
COPYING_REGISTERS, COMPUTING_REGISTERS = 40, 232


def swizzled(*shape: int, dtype: Any) -> Any:
    """A shared-memory buffer in the layout that TMA and wgmma both take; the last axis is 64 bytes or a multiple of
    128."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * itemsize)
    transforms = (plgpu.TilingTransform((ALIGN, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


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


def shift_words(words: jax.Array, count: int, *, interpret: bool) -> jax.Array:
    """uint16 words in layout WGMMA, shifted right by `count` bits (left if it is negative). What comes in is undefined:
    a GPU shifts a register, which holds two words."""
    if not count:
        return words
    if interpret:
        shift = lax.shift_right_logical if count > 0 else lax.shift_left
        return shift(words, jnp.full_like(words, abs(count)))
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=layout))
    def shifted(_, array):
        whole = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        amount = vector.broadcast(whole, arith.constant(whole.element_type, abs(count)))
        registers = np.empty_like(array.registers)
        for at, register in np.ndenumerate(array.registers):
            shift = arith.shrui if count > 0 else arith.shli
            registers[at] = vector.bitcast(register.type, shift(vector.bitcast(whole, register), amount))
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)

    return shifted(words)


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


def dequantize(codes: Any, scales: Any, target: Any) -> None:
    """Codes of 8 bits [64 * n, 64 * m] times a float32 scale per row, into a buffer of 16-bit floats; all in shared
    memory. The caller commits."""
    rows, columns = codes.shape
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    for start in range(0, rows, MMA_M):
        scale = plgpu.load(scales.at[pl.ds(start, MMA_M)], layout=layout.reduce(1))
        # 64 columns at a time: few registers.
        for column in range(0, columns, 64):
            piece = pl.ds(start, MMA_M), pl.ds(column, 64)
            values = plgpu.load(codes.at[piece], layout=layout).astype(jnp.float32)
            target.at[piece][...] = (values * lax.broadcast_in_dim(scale, values.shape, [0])).astype(target.dtype)


def free_slot(step: Any, stages: int, free: Any) -> Any:
    """Where `step` goes in a ring of `stages` buffers, once what it held is read. free: the ring's barriers."""
    slot = lax.rem(step, stages)

    @pl.when(step >= stages)
    def _wait():
        plgpu.barrier_wait(free.at[slot])

    return slot


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
