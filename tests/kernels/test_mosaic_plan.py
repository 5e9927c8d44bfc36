"""How attention on a GPU is cut into blocks: every key and every query exactly once, within the sizes promised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import (
    KEYS,
    max_decode_items,
    max_prefill_tiles,
    plan_decode,
    plan_prefill,
)
from jaxserve.pallas_kernels.ragged import RaggedBatch

rows = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([0, 1, 1, 2, 9, 64, 65, 200])), min_size=1, max_size=12)


# Fixed sizes, so that nothing is compiled anew for each example.
NUM_ROWS, NUM_TOKENS = 14, 12 * 200


decode = jax.jit(plan_decode, static_argnames=("window", "target_items", "min_blocks", "max_items"))
prefill = jax.jit(plan_prefill, static_argnames=("num_tokens", "tile_tokens", "min_length"))


def batch_of(rows: list[tuple[int, int]]) -> RaggedBatch:
    unused_rows = [0] * (NUM_ROWS - len(rows))
    new = [count for _, count in rows] + unused_rows
    lengths = [cached + count for cached, count in rows] + unused_rows
    start = np.concatenate([[0], np.cumsum(new)])
    unused = jnp.zeros(1, jnp.int32)
    return RaggedBatch(
        unused, unused, unused, jnp.asarray(start, jnp.int32), jnp.asarray(lengths, jnp.int32), unused, unused
    )


# (window, target_items, min_blocks): few, as each is compiled.
decode_sizes = st.sampled_from([(0, 1, 8), (0, 132, 1), (0, 7, 8), (1, 7, 1), (100, 132, 8), (4096, 7, 8)])


@settings(max_examples=40, deadline=None)
@given(rows=rows, sizes=decode_sizes)
def test_decode_items_cover_every_key_once(rows, sizes):
    batch, (window, target, min_blocks) = batch_of(rows), sizes
    sizes = {"target_items": target, "min_blocks": min_blocks}
    bound = max_decode_items(NUM_ROWS, -(-5001 // KEYS), **sizes)
    assert bound <= target + NUM_ROWS
    # A longer table would show items that do not fit.
    plan = decode(batch, window=window, max_items=bound + 5, **sizes)
    items, first_item, num_items = (np.asarray(x) for x in (plan.items, plan.first_item, plan.num_items))
    assert not items[bound:, 2].any()
    for row, (cached, new) in enumerate(rows):
        first, count = first_item[row], num_items[row]
        blocks = [b for r, start, n in items[first : first + count] for b in range(start, start + n) if r == row]
        length = cached + new
        lower = max(length - window, 0) // KEYS if window else 0
        assert blocks == (list(range(lower, -(-length // KEYS))) if new == 1 else [])
    assert items[:, 2].sum() == sum(
        -(-(c + 1) // KEYS) - (max(c + 1 - window, 0) // KEYS if window else 0) for c, n in rows if n == 1
    )


@settings(max_examples=40, deadline=None)
@given(rows=rows, tile=st.sampled_from([64, 128]), min_length=st.sampled_from([1, 2]))
def test_prefill_tiles_cover_every_query_once(rows, tile, min_length):
    batch = batch_of(rows)
    start = np.asarray(batch.query_start)
    total = int(start[-1])
    tiles = np.asarray(prefill(batch, num_tokens=NUM_TOKENS, tile_tokens=tile, min_length=min_length))
    assert len(tiles) == max_prefill_tiles(NUM_TOKENS, NUM_ROWS, tile)
    seen = np.zeros(total, int)
    ends = tiles[:, 4] + tiles[:, 3]
    assert (np.diff(ends) <= 0).all()
    for row, load, first, count, position in tiles[tiles[:, 3] > 0]:
        token = load * 8 + first
        assert first >= 0 and first + count <= tile
        assert start[row] <= token and token + count <= start[row + 1]
        assert position == rows[row][0] + token - start[row]
        seen[token : token + count] += 1
    for row, (_, new) in enumerate(rows):
        assert (seen[start[row] : start[row + 1]] == (new >= min_length)).all()


@pytest.mark.parametrize(("rows", "lowest", "highest"), [(1, 60, 66), (12, 5, 6)])
def test_few_long_rows_are_split_to_fill_the_gpu(rows, lowest, highest):
    plan = decode(batch_of([(2**16 - 1, 1)] * rows), window=0, target_items=66, min_blocks=8, max_items=80)
    assert lowest <= int(plan.num_items[0]) <= highest
