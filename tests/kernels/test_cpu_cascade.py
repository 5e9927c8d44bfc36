"""Decode rows that share pages: the same bits as on pages of their own, and right."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec
from ragged_cases import Case, Row, make_case
from test_paged_attention import assert_right, run

pytestmark = needs_cpu_ffi


def give_same_prefix(case: Case, leader: int, row: int, num_pages: int) -> None:
    """Let the first pages of `row`, still its own, hold what those of `leader` hold."""
    table, tokens = np.asarray(case.batch.page_table), num_pages * case.page_size
    case.token_pages[table[row, :num_pages]] = case.token_pages[table[leader, :num_pages]]
    for contents in (case.keys, case.values):
        contents[row][:tokens] = contents[leader][:tokens]


def share(case: Case, groups: list[tuple[int, int, int]]) -> Case:
    """The same step with the first pages of each `row` of (leader, row, pages) given up for those of its leader."""
    table = np.asarray(case.batch.page_table).copy()
    for leader, row, num_pages in groups:
        table[row, :num_pages] = table[leader, :num_pages]
    return dataclasses.replace(case, batch=dataclasses.replace(case.batch, page_table=jnp.asarray(table)))


def check(spec: AttentionSpec, rows: list[Row], groups, page_size: int, kind: str, seed: int = 0) -> None:
    case = make_case(np.random.default_rng(seed), spec, rows, page_size, kind, extra_rows=1, extra_tokens=2)
    for group in groups:
        give_same_prefix(case, *group)
    alone, pages = run(case, "cpu_ffi")
    assert_right(case, alone, pages)
    together, _ = run(share(case, groups), "cpu_ffi")
    np.testing.assert_array_equal(together, alone)


SPECS = {
    "plain": AttentionSpec(6, 2, 32, 0.2),
    "capped": AttentionSpec(4, 1, 64, 0.2, logit_softcap=3.0),
    "sinks": AttentionSpec(9, 3, 64, 0.125, has_sinks=True),
    "window": AttentionSpec(4, 2, 32, 0.2, sliding_window=300),
}


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_common_prompt(spec, kind):
    rows = [Row(1030 + 17 * i, 1) for i in range(6)]
    check(spec, rows, [(0, row, 64) for row in range(1, 6)], 16, kind)


def test_runs_of_two_lengths_and_rows_that_share_nothing():
    rows = [Row(900, 1), Row(300, 1), Row(700, 1), Row(1200, 1), Row(520, 1), Row(800, 1), Row(600, 40)]
    # 2 and 5 follow row 0 for long, 4 for one segment only; 3 and 1 are alone; the chunk shares as well.
    check(SPECS["plain"], rows, [(0, 2, 40), (0, 5, 44), (0, 4, 17), (0, 6, 36)], 16, "float32")


def test_more_rows_than_one_unit_takes():
    rows = [Row(256 + i, 1) for i in range(40)]
    check(AttentionSpec(8, 2, 32, 0.2), rows, [(0, row, 16) for row in range(1, 40)], 16, "float32")


def test_rows_in_the_midst_of_the_last_shared_page():
    # The newest token is the first of a segment, the last of one, and inside the common run's last page.
    rows = [Row(512, 1), Row(511, 1), Row(767, 1), Row(520, 1)]
    check(SPECS["plain"], rows, [(0, 2, 32), (0, 3, 32)], 16, "float32")


@pytest.mark.parametrize("starts", [[0, 1, 100, 101], [-5, -4, 1, 2]])
def test_damaged_starts_do_not_crash_the_process(starts):
    case = make_case(np.random.default_rng(0), SPECS["plain"], [Row(600, 1)] * 3, 16, "bfloat16")
    case = share(case, [(0, 1, 32), (0, 2, 32)])
    batch = dataclasses.replace(case.batch, query_start=jnp.asarray(starts, jnp.int32))
    run(dataclasses.replace(case, batch=batch), "cpu_ffi")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_batch(data):
    page_size = data.draw(st.sampled_from([1, 16, 64]))
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=2, max_size=9))
    rows = [Row(length, data.draw(st.sampled_from([1, 1, 1, 5]))) for length in lengths]
    groups, leaders = [], [0]
    for row in range(1, len(rows)):
        leader = data.draw(st.sampled_from([*leaders, row]))
        if leader == row:
            leaders.append(row)
            continue
        common = min(rows[leader].cached, rows[row].cached) // page_size
        groups.append((leader, row, data.draw(st.integers(0, common))))
    check(SPECS["plain"], rows, groups, page_size, "float32", seed=data.draw(st.integers(0, 99)))
