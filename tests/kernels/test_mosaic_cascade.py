"""Which decode rows a GPU computes together: groups found in the page table, against a plain search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.paged_attention.mosaic_cascade import (
    MIN_SAVED_BLOCKS,
    find_runs,
    lay_out_queries,
    max_tiles,
    rows_per_tile,
    tile_queries,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import KEYS
from jaxserve.pallas_kernels.ragged import RaggedBatch

# Fixed sizes, so that nothing is compiled anew for each example.
NUM_ROWS, WIDTH, PAGE_SIZE, GROUP, QUERIES = 14, 40, 32, 12, 64
find = jax.jit(find_runs, static_argnames=("page_size", "group_size", "queries"))


def batch_of(rows: list[tuple[int, int, int, int]]) -> RaggedBatch:
    """rows: (prompt, pages in common with others of that prompt, further pages, new tokens)."""
    table = np.zeros((NUM_ROWS, WIDTH), np.int32)
    length, new, free = np.zeros(NUM_ROWS, int), np.zeros(NUM_ROWS, int), 1000
    for r, (prompt, common, further, count) in enumerate(rows):
        table[r, :common] = prompt * WIDTH + 1 + np.arange(common)
        table[r, common : common + further] = free + np.arange(further)
        free += further
        length[r] = (common + further) * PAGE_SIZE - r % PAGE_SIZE
        new[r] = count
    start = np.concatenate([[0], np.cumsum(new)])
    unused = jnp.zeros(1, jnp.int32)
    return RaggedBatch(
        unused, unused, unused, jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32), jnp.asarray(table),
        jnp.asarray([len(rows)], jnp.int32),
    )  # fmt: skip


rows = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([0, 3, 10, 11, 20]), st.integers(1, 20), st.sampled_from([1, 1, 1, 5])
    ),
    min_size=1,
    max_size=12,
)


def saved_by_search(table: np.ndarray, whole: np.ndarray) -> int:
    """Blocks saved when the rows of one first page share the best run with the longest of them."""
    total = 0
    for page in {int(table[r, 0]) for r in np.flatnonzero(whole)}:
        members = [r for r in np.flatnonzero(whole) if table[r, 0] == page]
        leader = max(members, key=lambda r: whole[r])
        common = []
        for r in members:
            same = np.cumprod(table[r] == table[leader]).sum() * PAGE_SIZE // KEYS
            common += [min(same, whole[r], whole[leader])] if r != leader else []
        best = max((c * sum(other >= c for other in common) for c in common), default=0)
        total += best if best >= MIN_SAVED_BLOCKS else 0
    return total


@settings(max_examples=60, deadline=None)
@given(rows=rows)
def test_groups(rows):
    batch = batch_of(rows)
    runs = jax.tree.map(np.asarray, find(batch, page_size=PAGE_SIZE, group_size=GROUP, queries=QUERIES))
    table, new = np.asarray(batch.page_table), np.diff(np.asarray(batch.query_start))
    whole = np.where(new == 1, np.maximum(np.asarray(batch.seq_len) - 1, 0) // KEYS, 0)
    assert (runs.run <= whole).all()
    count, places = max_tiles(NUM_ROWS), set()
    for r in range(NUM_ROWS):
        tile, column = int(runs.tile[r]), int(runs.column[r])
        if not runs.run[r]:
            assert tile == count
            continue
        assert tile < count and runs.blocks[tile] == runs.run[r]
        pages = -(-int(runs.run[r]) * KEYS // PAGE_SIZE)
        assert (table[r, :pages] == table[runs.leader[tile], :pages]).all()
        assert column % GROUP == 0 and column + 16 <= QUERIES
        assert (tile, column) not in places
        places.add((tile, column))
    used = {tile for tile, _ in places}
    assert set(np.flatnonzero(runs.blocks)) == used
    per_leader = {int(runs.leader[tile]): int(runs.blocks[tile]) for tile in used}
    saved = sum(runs.run) - sum(per_leader.values())
    assert saved == saved_by_search(table, whole)


def test_queries_lie_where_the_runs_say():
    batch = batch_of([(1, 20, 2, 1)] * 6 + [(0, 0, 5, 1)])
    runs = find(batch, page_size=PAGE_SIZE, group_size=GROUP, queries=QUERIES)
    assert np.asarray(runs.run).tolist() == [10] * 6 + [0] * 8
    assert rows_per_tile(GROUP, QUERIES) == 5  # 4 of 12 columns each, and 16 for the last
    q = np.random.default_rng(0).standard_normal((NUM_ROWS, 2, GROUP, 3)).astype(np.float32)
    tiles = np.asarray(lay_out_queries(jnp.asarray(q), runs, QUERIES))
    expected = np.zeros_like(tiles)
    for r in range(6):
        expected[r // 5, :, r % 5 * GROUP : (r % 5 + 1) * GROUP] = q[r]
    assert (tiles == expected).all()


def test_which_groups_have_a_tile():
    assert [rows_per_tile(group, 64) for group in (1, 4, 8, 16, 32, 64)] == [57, 15, 8, 4, 2, 1]
    assert [rows_per_tile(group, 32) for group in (1, 4, 8, 16, 32, 64)] == [25, 7, 4, 2, 1, 0]
    assert [tile_queries(head_dim) for head_dim in (64, 128, 256)] == [64, 64, 32]
