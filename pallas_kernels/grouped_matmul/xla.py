"""Grouped products by XLA: one dense product per block of rows on CPU, `ragged_dot` elsewhere.

XLA:CPU expands `ragged_dot` into a dense product per group over all rows, so its cost grows with the number of
experts. A loop over the blocks that are there costs what they cost.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight, dequantize

# Rows of a block are multiples of 4: XLA's products then give a row the same bits whatever lies beside it.
_BLOCK_ROWS = (8, 32, 128)

_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul_xla(x: jax.Array, w: jax.Array | QuantizedWeight, group_sizes: jax.Array) -> jax.Array:
    """x [M, K] float32, w [E, N, K], group_sizes [E] -> [M, N] float32."""
    if isinstance(w, QuantizedWeight):
        return _in_blocks(x, w, group_sizes)
    return lax.platform_dependent(x, w, group_sizes, cpu=_in_blocks, default=_ragged_dot)


def _ragged_dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    is_used = (jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None]
    # What a row outside all groups holds must not spread, and what comes out for it is not defined.
    x = jnp.where(is_used, x, 0.0).astype(w.dtype)
    out = lax.ragged_dot_general(x, w, group_sizes, _DIMENSIONS, preferred_element_type=jnp.float32)
    return jnp.where(is_used, out, 0.0)


def _in_blocks(x: jax.Array, w: jax.Array | QuantizedWeight, group_sizes: jax.Array) -> jax.Array:
    """Groups are cut into blocks of rows; a block is multiplied with the one matrix of its group."""
    num_rows, num_groups = x.shape[0], group_sizes.shape[0]
    block = _block_rows(num_rows, num_groups)
    end = jnp.cumsum(group_sizes)
    num_blocks = (group_sizes + block - 1) // block
    block_end = jnp.cumsum(num_blocks)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.minimum(jnp.searchsorted(block_end, i, side="right"), num_groups - 1)
        first = end[group] - group_sizes[group] + (i - (block_end[group] - num_blocks[group])) * block
        row = first + jnp.arange(block)
        is_inside = row < end[group]
        part = jnp.where(is_inside[:, None], x[jnp.minimum(row, num_rows - 1)], 0.0)
        return out.at[jnp.where(is_inside, row, num_rows)].set(_product(part, w, group), mode="drop")

    out_columns = w.shape[-2]
    return lax.fori_loop(0, block_end[-1], body, jnp.zeros((num_rows, out_columns), jnp.float32))


def _product(x: jax.Array, w: jax.Array | QuantizedWeight, group: jax.Array) -> jax.Array:
    if isinstance(w, QuantizedWeight):
        one = dataclasses.replace(w, codes=lax.dynamic_index_in_dim(w.codes, group, keepdims=False))
        matrix = dequantize(one).astype(w.expanded)
    else:
        matrix = _take(w, group)
    dot = functools.partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    return dot(x.astype(matrix.dtype), matrix, preferred_element_type=jnp.float32)


def _take(w: jax.Array, group: jax.Array) -> jax.Array:
    """w[group]. XLA:CPU has no slice of bfloat16 and would widen (or, as bits, copy) the whole stack in front of the
    loop: the barrier ties the conversion to one step of it, where it becomes part of the slice."""
    if w.dtype != jnp.bfloat16:
        return lax.dynamic_index_in_dim(w, group, keepdims=False)
    w, group = lax.optimization_barrier((w, group))
    bits = lax.dynamic_index_in_dim(lax.bitcast_convert_type(w, jnp.uint16), group, keepdims=False)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _block_rows(num_rows: int, num_groups: int) -> int:
    """Near the size of an even group: smaller blocks read a matrix more often, larger ones compute padding."""
    return next((size for size in _BLOCK_ROWS if num_rows <= size * num_groups), _BLOCK_ROWS[-1])
