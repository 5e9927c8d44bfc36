"""Sampling when each tensor device holds the logits of its part of the vocabulary. Called under shard_map.

The argmax exchanges one value and one id per row. A draw and log-probabilities look at a whole row: there the devices
trade parts (all-to-all), so that each has some rows with the whole vocabulary and the work is shared; the logits of
all rows are on no device. Both give what sampling.py gives on one device for the same logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.runner import sampling
from jaxserve.sharding.collectives import vocab_offset
from jaxserve.sharding.shape import MeshShape


def mask_padding(logits: jax.Array, vocab_size: int, mesh: MeshShape) -> jax.Array:
    """logits [S, V of this device] with -inf for tokens past the end of the vocabulary."""
    if mesh.tensor == 1:
        return logits
    token = vocab_offset(logits.shape[1], mesh) + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(token < vocab_size, logits, -jnp.inf)


def greedy_tokens(logits: jax.Array, vocab_size: int, mesh: MeshShape) -> jax.Array:
    """logits [S, V of this device] -> [S] int32 on every device, the lowest id among the largest."""
    local = sampling.greedy_tokens(logits)
    if mesh.tensor == 1:
        return local
    value = jnp.take_along_axis(logits, local[:, None], axis=1)[:, 0]
    is_largest = value == lax.pmax(value, "tensor")
    return lax.pmin(jnp.where(is_largest, local + vocab_offset(logits.shape[1], mesh), vocab_size - 1), "tensor")


def draw_tokens(
    logits: jax.Array, inputs: sampling.SampleInputs, vocab_size: int, mesh: MeshShape, *, branch: bool
) -> jax.Array:
    """As sampling.draw_tokens, [S] on every device."""
    if mesh.tensor == 1:
        return sampling.draw_tokens(logits, inputs, branch=branch)
    num_rows = logits.shape[0]
    own = sampling.SampleInputs(*(_own_rows(part, mesh) for part in inputs))
    drawn = sampling.draw_tokens(_whole_rows(logits, vocab_size, mesh), own, branch=branch)
    return _all_rows(drawn, num_rows)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, named: jax.Array, vocab_size: int, mesh: MeshShape
) -> sampling.Logprobs:
    """As sampling.token_logprobs, all of it on every device."""
    if mesh.tensor == 1:
        return sampling.token_logprobs(logits, tokens, named)
    own_named = _own_rows(named.reshape(logits.shape[0], -1), mesh).reshape(-1)
    found = sampling.token_logprobs(_whole_rows(logits, vocab_size, mesh), _own_rows(tokens, mesh), own_named)
    return sampling.Logprobs(*(_all_rows(part, logits.shape[0]) for part in found))


def localize_forbidden(forbidden: jax.Array, num_local: int, mesh: MeshShape) -> jax.Array:
    """Pairs (last token, token not allowed behind it), flat, with the second counted from the start of this device's
    part of the vocabulary; tokens of other devices lie past its end."""
    if mesh.tensor == 1:
        return forbidden
    pairs = forbidden.reshape(-1, 2)
    local = pairs[:, 1] - vocab_offset(num_local, mesh)
    local = jnp.where((local >= 0) & (local < num_local), local, num_local)
    return jnp.stack([pairs[:, 0], local], axis=-1).reshape(-1)


def count_tokens(counts: jax.Array, count_row: jax.Array, tokens: jax.Array, mesh: MeshShape) -> jax.Array:
    """As sampling.count_tokens, for counts [rows, V of this device]."""
    if mesh.tensor == 1:
        return sampling.count_tokens(counts, count_row, tokens)
    num_rows, num_local = counts.shape
    local = tokens - vocab_offset(num_local, mesh)
    is_here = (local >= 0) & (local < num_local)
    # A row past the end is not counted.
    return sampling.count_tokens(counts, jnp.where(is_here, count_row, num_rows), jnp.where(is_here, local, 0))


def _rows_per_device(num_rows: int, mesh: MeshShape) -> int:
    return -(-num_rows // mesh.tensor)


def _whole_rows(logits: jax.Array, vocab_size: int, mesh: MeshShape) -> jax.Array:
    """[S, V of this device] -> [ceil(S / tensor), V]: the rows of this device. The last row fills what is missing."""
    num_rows = logits.shape[0]
    total = _rows_per_device(num_rows, mesh) * mesh.tensor
    if total != num_rows:
        logits = logits[jnp.minimum(jnp.arange(total), num_rows - 1)]
    return lax.all_to_all(logits, "tensor", split_axis=0, concat_axis=1, tiled=True)[:, :vocab_size]


def _own_rows(values: jax.Array, mesh: MeshShape) -> jax.Array:
    """[S, ...] -> [ceil(S / tensor), ...]: those of _whole_rows."""
    size = _rows_per_device(values.shape[0], mesh)
    index = lax.axis_index("tensor") * size + jnp.arange(size)
    return values[jnp.minimum(index, values.shape[0] - 1)]


def _all_rows(values: jax.Array, num_rows: int) -> jax.Array:
    """[ceil(S / tensor), ...] on each device -> [S, ...] on all of them."""
    return lax.all_gather(values, "tensor", tiled=True)[:num_rows]
