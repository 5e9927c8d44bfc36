"""Paged attention on Hopper GPUs against a float64 oracle, in the interpreter with race detection on.

Everything that a kernel must not read or keep is NaN: outputs and shared memory before they are written, pages not
in use, slots of used pages that were never written, queries and keys of padding tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_steps import SPLIT, Shape, assert_right, make, run, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params, races_raise
from ragged_cases import Case, Row

SHAPES = {
    "gqa4": Shape(spec(4, 1, 64), 16, options=SPLIT),
    "mha-window-sinks": Shape(spec(2, 2, 64, sliding_window=70, has_sinks=True), 32, options=SPLIT),
    "gqa8": Shape(spec(16, 2, 128), 64),
    "gqa9-cap": Shape(spec(9, 1, 96, logit_softcap=5.0), 16, options=SPLIT),
    "wide-window": Shape(spec(2, 1, 256, sliding_window=100), 64),
    "gqa4-int8": Shape(spec(8, 2, 64), 32, "int8", options=SPLIT),
    "gqa3-window-sinks-fp8": Shape(spec(3, 1, 80, sliding_window=100, has_sinks=True), 64, "fp8", options=SPLIT),
    "f16-everything": Shape(
        spec(5, 1, 80, sliding_window=130, logit_softcap=20.0, has_sinks=True), 128, "float16", options=SPLIT
    ),
}
rows_of_a_step = (
    st.lists(
        st.one_of(
            st.builds(Row, cached=st.integers(0, 400), new=st.just(1)),
            st.builds(Row, cached=st.integers(0, 200), new=st.integers(2, 90)),
        ),
        max_size=4,
    )
    .map(lambda rows: sorted(rows, key=lambda row: row.new > 1))
    .filter(lambda rows: sum(row.new for row in rows) <= 120)
)


class TestPagedAttention:
    @pytest.mark.parametrize("name", SHAPES)
    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(rows=rows_of_a_step, seed=st.integers(0, 2**32 - 1))
    def test_ragged_batches(self, name, rows, seed):
        shape = SHAPES[name]
        case = make(shape, rows, seed)
        assert_right(case, *run(shape, case))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", SHAPES)
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(rows=rows_of_a_step, seed=st.integers(0, 2**32 - 1))
    def test_many_ragged_batches(self, name, rows, seed):
        shape = SHAPES[name]
        case = make(shape, rows, seed)
        assert_right(case, *run(shape, case))

    @pytest.mark.parametrize("name", ["gqa4", "mha-window-sinks"])
    def test_edges(self, name):
        """Lengths around blocks and pages, a chunk without and one with a prefix, tiles that end on a boundary."""
        shape = SHAPES[name]
        for rows in (
            [Row(0, 1), Row(63, 1), Row(127, 1), Row(0, 117)],
            [Row(64, 1), Row(64, 64), Row(0, 2), Row(127, 53)],
        ):
            case = make(shape, rows, 7)
            assert_right(case, *run(shape, case))

    def test_deterministic(self):
        """The last 20 tokens of a sequence in one chunk, in parts, and one at a time: bitwise the same."""
        shape = dataclasses.replace(SHAPES["gqa4"], spec=spec(2, 1, 64, sliding_window=90), tokens=72, context=192)
        whole = make(shape, [Row(140, 20)], 3)
        expected, pages = run(shape, whole, deterministic=True)
        assert_right(whole, expected, pages)
        for start, count, before in ((140, 7, [Row(30, 1)] * 2), (159, 1, []), (147, 13, [Row(9, 1), Row(3, 40)])):
            case = make(shape, [*before, Row(start, count)], 4)
            first = sum(row.new for row in before)
            span, source = slice(first, first + count), slice(start - 140, start - 140 + count)
            for name in ("q", "k", "v"):
                getattr(case, name)[span] = getattr(whole, name)[source]
            _copy_context(whole, case, len(before), start)
            out, _ = run(shape, case, deterministic=True)
            assert out[span].tobytes() == expected[source].tobytes()

    def test_pages_of_another_request_are_not_read(self):
        """The dummy page, which unused table entries name, may hold anything."""
        shape = SHAPES["gqa4"]
        case = make(shape, [Row(5, 1), Row(20, 30)], 11)
        case.token_pages[0] = np.inf
        assert_right(case, *run(shape, case))


def _copy_context(source: Case, target: Case, row: int, length: int) -> None:
    """The first `length` cached tokens of source's only row become those of target's row."""

    def slots(case: Case, row: int) -> np.ndarray:
        at = np.arange(length)
        return np.asarray(case.batch.page_table)[row, at // case.page_size] * case.page_size + at % case.page_size

    contents = source.written_pages().reshape(-1, *source.token_pages.shape[2:])[slots(source, 0)]
    target.token_pages.reshape(-1, *target.token_pages.shape[2:])[slots(target, row)] = contents


def test_race_detection_is_on():
    """Two warpgroups write the same shared memory without a barrier."""

    def kernel(out_ref, smem):
        smem[...] = jnp.full(smem.shape, jax.lax.axis_index("warpgroup"), jnp.int32)

        @pl.when(jax.lax.axis_index("warpgroup") == 0)
        def _store():
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, out_ref)
            plgpu.wait_smem_to_gmem(0)

    racing = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        scratch_types=[plgpu.SMEM((128,), jnp.int32)],
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpreter_params(detect_races=True),
    )
    with pytest.raises(Exception, match="race"), races_raise():
        jax.block_until_ready(jax.jit(racing)())
