"""What devices exchange inside a step. Called under shard_map; with one device along the axis nothing is done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxserve.sharding.shape import MeshShape


def sum_over_tensor(x: jax.Array, mesh: MeshShape) -> jax.Array:
    """Partial sums of any shape, one per tensor device -> their sum on each of them."""
    return lax.psum(x, "tensor") if mesh.tensor > 1 else x


def vocab_offset(num_local: int, mesh: MeshShape) -> jax.Array:
    """The first token of this device's part of the vocabulary, of `num_local` tokens."""
    if mesh.tensor == 1:
        return jnp.zeros((), jnp.int32)
    return lax.axis_index("tensor").astype(jnp.int32) * num_local


def lookup_ids(token_ids: jax.Array, num_local: int, mesh: MeshShape) -> tuple[jax.Array, jax.Array]:
    """Row of each token in this device's part of a vocabulary-parallel table, and whether it lies there."""
    local = token_ids - vocab_offset(num_local, mesh)
    is_here = (local >= 0) & (local < num_local)
    return jnp.where(is_here, local, 0), is_here
