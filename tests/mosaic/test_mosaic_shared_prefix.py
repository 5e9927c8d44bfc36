"""Decode rows that share pages, on Hopper GPUs: their common run as one tall matrix, against a float64 oracle, in the
interpreter with race detection on."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from attention_steps import SPLIT, Shape, assert_right, make, run, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.paged_attention.mosaic_cascade import find_runs
from ragged_cases import Case, Row
from stored_pages import unwritten

SHAPES = {
    "gqa4": Shape(spec(4, 1, 64), 16, options=SPLIT, tokens=24, rows=6),
    "gqa3-sinks": Shape(spec(6, 2, 64, has_sinks=True), 64, options=SPLIT, tokens=24, rows=6),
    "gqa4-int8": Shape(spec(8, 2, 64), 32, "int8", options=SPLIT, tokens=24, rows=6),
    "gqa9-cap-f16": Shape(spec(9, 1, 128, logit_softcap=5.0), 32, "float16", tokens=24, rows=6),
}


def share(case: Case, rows: list[int], num_pages: int) -> None:
    """The first `num_pages` pages of rows[0] become those of the others; the ones that they had hold NaN."""
    leader, tokens = rows[0], num_pages * case.page_size
    table = np.asarray(case.batch.page_table).copy()
    for row in rows[1:]:
        assert tokens <= min(case.rows[row].cached, case.rows[leader].cached)
        case.token_pages[table[row, :num_pages]] = unwritten((case.spec.head_dim,), case.page_dtype)
        table[row, :num_pages] = table[leader, :num_pages]
        for contents in (case.keys, case.values):
            contents[row][:tokens] = contents[leader][:tokens]
    case.batch = dataclasses.replace(case.batch, page_table=jnp.asarray(table))


@functools.cache
def shared_tokens(shape: Shape):
    return lambda batch: np.asarray(
        find_runs(batch, page_size=shape.page_size, group_size=shape.spec.group_size, queries=64).run * 64
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    lengths=st.lists(st.integers(256, 440), min_size=3, max_size=5), common=st.integers(4, 8),
    chunk=st.sampled_from([0, 2, 19]), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_rows_of_one_prompt(name, lengths, common, chunk, seed):
    shape = SHAPES[name]
    decodes = range(len(lengths))
    rows = [Row(length, 1) for length in lengths] + ([Row(256, chunk)] if chunk else [])
    case = make(shape, rows, seed)
    share(case, list(range(len(rows))), common * 32 // shape.page_size)
    found = shared_tokens(shape)(case.batch)
    if (len(lengths) - 1) * (common // 2) >= 8:
        assert (found[decodes] >= common * 32 // 64 * 64).all()
    assert not found[len(lengths) :].any()
    assert_right(case, *run(shape, case, cascade=True))


@pytest.mark.slow
def test_two_prompts_and_rows_of_none():
    shape = SHAPES["gqa4"]
    case = make(shape, [Row(300, 1), Row(70, 1), Row(447, 1), Row(320, 1), Row(384, 1), Row(311, 1)], 5)
    share(case, [0, 3, 5], 16)
    share(case, [2, 4], 24)
    # Four blocks saved twice pay, six saved once do not.
    assert shared_tokens(shape)(case.batch).tolist() == [256, 0, 0, 256, 0, 256]
    together, pages = run(shape, case, cascade=True)
    assert_right(case, together, pages)
    alone, _ = run(shape, case)
    assert_right(case, alone, pages)
    # Rows outside groups have other runs of blocks too, since the shared ones are taken from the batch: equal within
    # rounding, not to the bit.
    np.testing.assert_allclose(together, alone, atol=4e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_many_tiles(dtype):
    """More rows than one tile of queries holds."""
    shape = Shape(spec(20, 1, 64), 64, dtype, options=SPLIT, tokens=8, rows=6)  # three rows a tile
    case = make(shape, [Row(256 + 7 * r, 1) for r in range(6)], 9)
    share(case, list(range(6)), 3)
    assert (shared_tokens(shape)(case.batch) == 192).all()
    assert_right(case, *run(shape, case, cascade=True))
