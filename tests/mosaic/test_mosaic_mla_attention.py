"""Latent attention on Hopper GPUs against a float64 oracle, in the interpreter with race detection on."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from fixed_size import Sizes, assert_close, compiled_call, make_fixed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.mla_attention.mosaic import MLABlocks, mla_attention_mosaic
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params, races_raise
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from ragged_cases import Case, Row

SPEC = MLASpec(num_heads=5, latent_dim=128, rope_dim=64, scale=0.07)
# Few SMs and runs of two blocks at least, so that contexts of a few hundred tokens are split and merged.
BLOCKS = MLABlocks(min_blocks=2, num_sms=4, waves=2)
SIZES = {16: Sizes(16, tokens=24), 64: Sizes(64, tokens=24)}


@functools.cache
def step_of(deterministic: bool):
    def step(q, new, pages, batch):
        interpret = interpreter_params(detect_races=True)
        return mla_attention_mosaic(
            q, new, pages, batch, SPEC, blocks=BLOCKS, deterministic=deterministic, interpret=interpret
        )

    return step


def make(rows: list[Row], seed: int, page_size: int) -> Case:
    as_one_head = AttentionSpec(SPEC.num_heads, 1, SPEC.head_dim, SPEC.scale)
    return make_fixed(as_one_head, SIZES[page_size], rows, seed, "bfloat16")


def run(case: Case, *, deterministic: bool = False) -> tuple[np.ndarray, np.ndarray]:
    with races_raise():
        arguments = (case.q, case.k[:, 0], case.token_pages[:, :, 0, 0], case.batch)
        out, pages = compiled_call(step_of(deterministic), arguments)
        return np.asarray(out), np.asarray(pages)


def assert_right(case: Case, out: np.ndarray, pages: np.ndarray) -> None:
    total = sum(row.new for row in case.rows)
    expected, token = np.zeros(out.shape), 0
    for row, keys in zip(case.rows, case.keys, strict=True):
        for position in range(row.cached, row.cached + row.new):
            seen = keys[: position + 1, 0]
            scores = case.q[token].astype(np.float64) @ seen.T * SPEC.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected[token] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : SPEC.latent_dim]
            token += 1
    assert np.isfinite(out).all()
    assert not out[total:].any()
    assert pages.tobytes() == np.ascontiguousarray(case.written_pages()[:, :, 0, 0]).tobytes()
    if total:
        assert_close(out[:total], expected[:total])


rows_of_a_step = (
    st.lists(
        st.one_of(
            st.builds(Row, cached=st.integers(0, 440), new=st.just(1)),
            st.builds(Row, cached=st.integers(0, 200), new=st.integers(2, 20)),
        ),
        max_size=4,
    )
    .map(lambda rows: sorted(rows, key=lambda row: row.new > 1))
    .filter(lambda rows: sum(row.new for row in rows) <= 24)
)


@pytest.mark.parametrize("page_size", SIZES)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(rows=rows_of_a_step, seed=st.integers(0, 2**32 - 1))
def test_ragged_batches(page_size, rows, seed):
    case = make(rows, seed, page_size)
    assert_right(case, *run(case))


def test_edges_and_split_contexts():
    for rows in ([Row(0, 1), Row(63, 1), Row(64, 1), Row(127, 1)], [Row(447, 1)], [Row(440, 1), Row(60, 9)]):
        case = make(rows, 5, 64)
        assert_right(case, *run(case))


def test_deterministic_does_not_depend_on_other_rows():
    alone = make([Row(300, 1)], 1, 64)
    expected, pages = run(alone, deterministic=True)
    assert_right(alone, expected, pages)
    beside = make([Row(100, 1), Row(300, 1), Row(20, 15)], 2, 64)
    beside.q[1], beside.k[1] = alone.q[0], alone.k[0]
    at = np.arange(300)
    places = [np.asarray(c.batch.page_table)[r][at // 64] * 64 + at % 64 for c, r in ((alone, 0), (beside, 1))]
    flat = [c.token_pages.reshape(-1, *c.token_pages.shape[2:]) for c in (alone, beside)]
    flat[1][places[1]] = flat[0][places[0]]
    out, _ = run(beside, deterministic=True)
    assert out[1].tobytes() == expected[0].tobytes()
