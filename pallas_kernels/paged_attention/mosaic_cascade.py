"""Decode rows that share pages, on a GPU: which of them read which part of their context together.

Rows whose page tables begin with the same pages (a common prompt, forks of one request) need the same keys and values.
The queries of such rows are laid side by side, as one tall matrix, and the common run of pages is walked once for all
of them; each row then merges that with its own suffix (Juravsky et al., 2024, arXiv:2402.05099). The decode kernel
computes both: a tile of queries of several rows is to it one row with a larger group, whose context is the common run.
No key of a run needs a mask: it ends before the newest token of every member.

Groups are found in the page table itself, on the device, in each step: whoever fills the table need not know of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import KEYS, query_lengths
from jaxserve.pallas_kernels.ragged import RaggedBatch

_COLUMNS = 8  # a row's columns are merged in whole runs of as many
# Blocks of 64 keys that a group must save. A part of a row with up to 8 query heads per kv head is [D, 8] float32,
# written once and read once: a quarter of a block of keys and values.
MIN_SAVED_BLOCKS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedRuns:
    """The groups of one step.

    run      [R] int32: blocks of 64 keys that the row attends to with its group; 0: it is in none
    tile     [R] int32: where the row's queries lie; the number of tiles (past the end) for a row in no group
    column   [R] int32: the first of them in that tile
    leader   [n] int32: a row of each tile's group; 0 for an unused tile
    blocks   [n] int32: blocks of each tile's run; 0 for an unused tile
    """

    run: jax.Array
    tile: jax.Array
    column: jax.Array
    leader: jax.Array
    blocks: jax.Array


def tile_queries(head_dim: int) -> int:
    """Queries of one tile, the N of its products: what shared memory and registers hold. head_dim: padded."""
    return 64 if head_dim <= 128 else 32


def rows_per_tile(group_size: int, queries: int) -> int:
    """Rows whose queries one tile holds. Also the last row's runs of columns lie inside."""
    padded = -(-group_size // _COLUMNS) * _COLUMNS
    return max(0, (queries - padded) // group_size + 1)


def max_tiles(num_rows: int) -> int:
    """Tiles that `find_runs` can make: a group has two rows or more, a tile room for two or more."""
    return max(1, 2 * num_rows // 3)


def find_runs(batch: RaggedBatch, *, page_size: int, group_size: int, queries: int) -> SharedRuns:
    """Group the rows that decode: those that share their first page with a row that is no shorter, their leader.

    A group's run is the one that saves most, rows beyond the leader times blocks. A row that shares less than that
    reads all of its context itself.
    """
    table = batch.page_table
    num_rows = table.shape[0]
    row = jnp.arange(num_rows)
    newest = jnp.maximum(batch.seq_len - 1, 0)
    # Blocks that end before the newest token.
    whole = jnp.where(query_lengths(batch) == 1, newest // KEYS, 0)
    candidate = whole > 0
    same_first = candidate[:, None] & candidate & (table[:, :1] == table[:, 0])
    leader = jnp.argmax(jnp.where(same_first, whole, 0), axis=1)  # the longest such row, the first of several
    is_member = candidate & (leader != row)
    pages = lax.cumprod((table == table[leader]).astype(jnp.int32), axis=1).sum(axis=1)
    common = jnp.minimum(jnp.minimum(whole, whole[leader]), pages * page_size // KEYS)
    common = jnp.where(is_member, common, 0)
    # What each row's own length would save as the run of its group.
    fellows = is_member[:, None] & is_member & (leader[:, None] == leader)
    saved = common * (fellows & (common >= common[:, None])).sum(axis=1)
    best = jnp.argmax(jnp.where(fellows, saved, 0), axis=1)  # of a member: the fellow whose length is taken
    taken = jnp.where(is_member & (saved[best] >= MIN_SAVED_BLOCKS), common[best], 0)
    run = jnp.zeros(num_rows, jnp.int32).at[leader].max(taken.astype(jnp.int32))  # of a leader
    run = jnp.where(is_member, jnp.where(common >= taken, taken, 0), run)

    in_group = run > 0
    earlier = in_group & (leader[:, None] == leader) & (row < row[:, None])
    place = (earlier & in_group[:, None]).sum(axis=1)
    size = jnp.zeros(num_rows, jnp.int32).at[leader].add(in_group.astype(jnp.int32))  # of a leader
    per_tile, count = rows_per_tile(group_size, queries), max_tiles(num_rows)
    num_tiles = -(-size // per_tile)
    first_tile = jnp.cumsum(num_tiles) - num_tiles
    tile = jnp.where(in_group, first_tile[leader] + place // per_tile, count).astype(jnp.int32)
    column = jnp.where(in_group, place % per_tile * group_size, 0).astype(jnp.int32)
    return SharedRuns(
        run.astype(jnp.int32), tile, column,
        jnp.zeros(count, jnp.int32).at[tile].set(leader.astype(jnp.int32), mode="drop"),
        jnp.zeros(count, jnp.int32).at[tile].set(run.astype(jnp.int32), mode="drop"),
    )  # fmt: skip


def lay_out_queries(q: jax.Array, runs: SharedRuns, queries: int) -> jax.Array:
    """q [R, KV, G, D] -> [tiles, KV, queries, D], zeros where no row's queries lie."""
    num_rows, kv_heads, group_size, head_dim = q.shape
    column = runs.column[:, None] + jnp.arange(group_size)
    source = jnp.full((runs.leader.shape[0], queries), num_rows * group_size, jnp.int32)
    flat_index = jnp.arange(num_rows * group_size, dtype=jnp.int32).reshape(num_rows, group_size)
    source = source.at[runs.tile[:, None], column].set(flat_index, mode="drop")
    flat = q.swapaxes(1, 2).reshape(num_rows * group_size, kv_heads, head_dim)
    return flat.at[source].get(mode="fill", fill_value=0).swapaxes(1, 2)
