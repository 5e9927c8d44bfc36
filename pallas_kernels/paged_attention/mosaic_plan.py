"""How the work of one attention step is cut into blocks of a GPU: computed on the device from the batch.

The tables have fixed sizes that follow from the static shapes; unused entries hold a count of 0 and are skipped.
Layers with the same window share one table: XLA computes equal expressions once.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged import RaggedBatch

KEYS = 64  # keys of one block of the context
LOAD_ALIGN = 8  # a tile is loaded from a multiple of 8 tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """items [n, 3] int32: row, first block of 64 keys, number of blocks; first_item, num_items [R] int32: those of
    each row (0 for a row that does not decode)."""

    items: jax.Array
    first_item: jax.Array
    num_items: jax.Array


def _cdiv(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return (a + b - 1) // b


def query_lengths(batch: RaggedBatch) -> jax.Array:
    """[R] int32: tokens of each row in this step."""
    return jnp.diff(batch.query_start)


def plan_decode(
    batch: RaggedBatch,
    *,
    window: int,
    target_items: int,
    min_blocks: int,
    max_items: int,
    skipped: jax.Array | None = None,  # [R] int32
) -> DecodePlan:
    """Cut the context of every row that decodes into runs of blocks.

    The run length makes about `target_items` runs of the whole batch (the number that fills the GPU, per kv head),
    and is at least `min_blocks`; a row is cut into equal runs. max_items: length of the table, see
    `max_decode_items`. skipped: blocks at the beginning of each row that are computed elsewhere; at least one remains.
    """
    decodes = query_lengths(batch) == 1
    lower = jnp.maximum(batch.seq_len - window, 0) // KEYS if window else jnp.zeros_like(batch.seq_len)
    lower = lower if skipped is None else jnp.maximum(lower, skipped)
    blocks = jnp.where(decodes, _cdiv(batch.seq_len, KEYS) - lower, 0)
    return split_runs(blocks, lower, target_items=target_items, min_blocks=min_blocks, max_items=max_items)


def split_runs(
    blocks: jax.Array,  # [n] int32: blocks of each sequence
    lower: jax.Array,  # [n] int32: the first of them
    *,
    target_items: int,
    min_blocks: int,
    max_items: int,
) -> DecodePlan:
    """Cut sequences of blocks into about `target_items` runs, each sequence into equal ones."""
    count = _cdiv(blocks, jnp.maximum(_cdiv(blocks.sum(), target_items), min_blocks))
    length = _cdiv(blocks, jnp.maximum(count, 1))
    end = jnp.cumsum(count)
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(end, item, side="right"), blocks.shape[0] - 1).astype(jnp.int32)
    length = length[row]
    offset = (item - (end - count)[row]) * length
    taken = jnp.where(item < end[-1], jnp.minimum(length, blocks[row] - offset), 0)
    taken = jnp.maximum(taken, 0)
    first = jnp.where(taken > 0, lower[row] + offset, 0)
    items = jnp.stack([row, first, taken], axis=1).astype(jnp.int32)
    return DecodePlan(items, (end - count).astype(jnp.int32), count.astype(jnp.int32))


def max_decode_items(num_rows: int, max_blocks: int, *, target_items: int, min_blocks: int) -> int:
    """Runs that `plan_decode` can make: every row adds at most one beyond the target, no row more than its length
    allows."""
    return max(1, min(num_rows * -(-max_blocks // min_blocks), target_items + num_rows))


def max_prefill_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Tiles that `plan_prefill` can make."""
    rows = min(num_rows, num_tokens)
    return max(1, (num_tokens + (LOAD_ALIGN - 1 + tile_tokens - 1) * rows) // tile_tokens)


def plan_prefill(batch: RaggedBatch, *, num_tokens: int, tile_tokens: int, min_length: int = 2) -> jax.Array:
    """Cut the queries of every row with at least `min_length` tokens into tiles, longest context first.

    Returns [n, 5] int32: row; where the tile is loaded, in runs of 8 flat tokens; index in the tile of its first
    query; number of queries; absolute position of the first one. A tile spans `tile_tokens` flat tokens; surplus
    queries are computed and dropped.
    """
    num_rows = batch.seq_len.shape[0]
    start, length = batch.query_start[:-1], query_lengths(batch)
    row, begin, first, taken = cut_tiles(
        start,
        jnp.where(length >= min_length, length, 0),
        tile_tokens=tile_tokens,
        max_tiles=max_prefill_tiles(num_tokens, num_rows, tile_tokens),
    )
    position = batch.seq_len[row] - length[row] + begin + first - start[row]
    table = jnp.stack([row, begin // LOAD_ALIGN, first, taken, position], axis=1)
    table = jnp.where((taken > 0)[:, None], table, 0).astype(jnp.int32)
    return table[jnp.argsort(-(table[:, 4] + table[:, 3]))]


def cut_tiles(
    start: jax.Array,  # [n] int32: first of the flat items of each group
    length: jax.Array,  # [n] int32: how many
    *,
    tile_tokens: int,
    max_tiles: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cut groups of flat items into tiles that never straddle groups. Returns, [max_tiles] int32 each: group; where
    the tile begins, a multiple of 8; index in the tile of its first item; number of items (0: unused)."""
    load = start // LOAD_ALIGN * LOAD_ALIGN
    count = jnp.where(length > 0, _cdiv(start + length - load, tile_tokens), 0)
    end = jnp.cumsum(count)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(end, tile, side="right"), start.shape[0] - 1).astype(jnp.int32)
    begin = load[group] + (tile - (end - count)[group]) * tile_tokens
    first = jnp.maximum(start[group] - begin, 0)
    taken = jnp.minimum(begin + tile_tokens, start[group] + length[group]) - begin - first
    return group, begin, first, jnp.where(tile < end[-1], taken, 0)
