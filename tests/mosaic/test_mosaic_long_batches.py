"""Steps as large as those that are served, 1 to 64 rows of 1 to 8192 tokens, against a float64 oracle, in the
interpreter with race detection on. Six to eleven minutes each on one core: `pytest -m slow`."""

from __future__ import annotations

import numpy as np
import pytest
from attention_steps import Shape, assert_right, make, run, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged_cases import Row

LONGEST = 8192
CHUNK = 128  # new tokens of all chunks of a step at most
SHAPES = {
    "gqa4": Shape(spec(4, 1, 64), 64, rows=64, tokens=64 + CHUNK, context=LONGEST),
    "gqa4-window-cap-sinks": Shape(
        spec(4, 1, 128, sliding_window=1000, logit_softcap=20.0, has_sinks=True), 32,
        rows=64, tokens=64 + CHUNK, context=LONGEST,
    ),
}  # fmt: skip
OTHERS = {
    "int8": Shape(spec(4, 1, 64), 64, "int8", rows=64, tokens=64 + CHUNK, context=LONGEST),
    "fp8-80-window-sinks": Shape(
        spec(3, 1, 80, sliding_window=1000, has_sinks=True), 64, "fp8",
        rows=64, tokens=64 + CHUNK, context=LONGEST,
    ),
    "f16-96-cap": Shape(
        spec(9, 1, 96, logit_softcap=20.0), 16, "float16", rows=64, tokens=64 + CHUNK, context=LONGEST
    ),
    "256-window": Shape(spec(2, 1, 256, sliding_window=1000), 64, rows=64, tokens=64 + CHUNK, context=LONGEST),
}  # fmt: skip
lengths = st.integers(1, LONGEST)
decodes = st.lists(st.builds(lambda length: Row(length - 1, 1), lengths), min_size=0, max_size=62)
chunks = st.lists(
    st.tuples(lengths, st.integers(2, CHUNK // 2)).map(lambda x: Row(max(0, x[0] - x[1]), min(x))), max_size=2
)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(decodes=decodes, chunks=chunks, seed=st.integers(0, 2**32 - 1))
def test_ragged_batches_of_serving_sizes(name, decodes, chunks, seed):
    shape = SHAPES[name]
    case = make(shape, [*decodes, *chunks], seed)
    assert_right(case, *run(shape, case))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_64_rows_of_8192_tokens():
    shape = SHAPES["gqa4"]
    case = make(shape, [Row(LONGEST - 1, 1)] * 63 + [Row(LONGEST - CHUNK, CHUNK)], 1)
    assert_right(case, *run(shape, case))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", OTHERS)
def test_other_pages_and_head_sizes(name):
    """62 decodes of 1 to 8192 tokens, most of them short, and two chunks."""
    lengths = (LONGEST ** np.random.default_rng(5).random(62)).astype(int)
    rows = [Row(LONGEST - 1, 1), *(Row(int(length) - 1, 1) for length in lengths[1:])]
    case = make(OTHERS[name], [*rows, Row(0, CHUNK // 2), Row(3000, CHUNK // 2)], 6)
    assert_right(case, *run(OTHERS[name], case))
