"""Paged attention on Hopper GPUs against a float64 oracle, in the interpreter with race detection on.

Everything that a kernel must not read or keep is NaN: outputs and shared memory before they are written, pages not
in use, slots of used pages that were never written, queries and keys of padding tokens.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixed_size import Sizes, assert_close, compiled_call, make_fixed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params, races_raise
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, page_array_shape
from jaxserve.pallas_kernels.paged_attention.mosaic import MosaicOptions, default_options, paged_attention_mosaic
from ragged_cases import Case, Row


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static in one program."""

    spec: AttentionSpec
    page_size: int
    dtype: str = "bfloat16"
    tokens: int = 120
    context: int = 448
    options: MosaicOptions | None = None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.page_size, self.tokens, context=self.context)


def spec(heads: int, kv_heads: int, head_dim: int, **fields) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, **fields)


# Runs of two blocks of 64 keys, so that rows of a few hundred tokens are split and merged.
SPLIT = dataclasses.replace(
    default_options(64), decode=dataclasses.replace(default_options(64).decode, min_blocks=2, stages=2)
)
SHAPES = {
    "gqa4": Shape(spec(4, 1, 64), 16, options=SPLIT),
    "mha-window-sinks": Shape(spec(2, 2, 64, sliding_window=70, has_sinks=True), 32, options=SPLIT),
    "gqa8": Shape(spec(16, 2, 128), 64),
    "gqa9-cap": Shape(spec(9, 1, 96, logit_softcap=5.0), 16, options=SPLIT),
    "wide-window": Shape(spec(2, 1, 256, sliding_window=100), 64),
    "f16-everything": Shape(
        spec(5, 1, 80, sliding_window=130, logit_softcap=20.0, has_sinks=True), 128, "float16", options=SPLIT
    ),
}


@functools.cache
def step_of(shape: Shape, deterministic: bool):
    def step(q, k, v, pages, batch, sinks):
        return paged_attention_mosaic(
            q, k, v, pages, batch, shape.spec, deterministic=deterministic, sinks=sinks, options=shape.options,
            interpret=interpreter_params(detect_races=True),
        )  # fmt: skip

    return step


def make(shape: Shape, rows: list[Row], seed: int) -> Case:
    return make_fixed(shape.spec, shape.sizes, rows, seed, shape.dtype)


def run(shape: Shape, case: Case, *, deterministic: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(out, pages as [page, token, 2, KV, D])."""
    pages = case.token_pages.transpose(0, 3, 2, 1, 4)
    wanted = page_array_shape(shape.spec, shape.sizes.num_pages, shape.page_size, "mosaic")
    pages = np.pad(pages, [(0, 0)] * 4 + [(0, wanted[-1] - pages.shape[-1])])
    assert pages.shape == wanted
    with races_raise():
        arguments = (case.q, case.k, case.v, pages, case.batch, case.sinks)
        out, pages = (np.asarray(x) for x in compiled_call(step_of(shape, deterministic), arguments))
    return out, pages[..., : shape.spec.head_dim].transpose(0, 3, 2, 1, 4)


def assert_right(case: Case, out: np.ndarray, pages: np.ndarray) -> None:
    total = sum(row.new for row in case.rows)
    assert np.isfinite(out).all()
    assert not out[total:].any()
    assert pages.tobytes() == case.written_pages().tobytes()
    if total:
        assert_close(out[:total], case.oracle()[:total])


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
