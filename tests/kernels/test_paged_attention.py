"""Every attention backend against a float64 oracle on random ragged batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.paged_attention.api import (
    AttentionSpec,
    page_array_shape,
    page_bytes,
    paged_attention,
    writes_in_place,
)
from jaxserve.pallas_kernels.paged_attention.quantized_pages import code_kind, quantize
from jaxserve.pallas_kernels.pages import abstract_pages
from ragged_cases import Case, Row, make_case
from stored_pages import from_device, store, to_device

BACKENDS = [
    "reference",
    "xla",
    pytest.param("cpu_ffi", marks=needs_cpu_ffi),
]


@functools.partial(jax.jit, static_argnames=("spec", "page_size", "backend", "deterministic"), donate_argnums=3)
def _step(q, k, v, pages, batch, sinks, *, spec, page_size, backend, deterministic=False):
    return paged_attention(
        q, k, v, pages, batch, spec,
        page_size=page_size, backend=backend, deterministic=deterministic, sinks=sinks,
    )  # fmt: skip


def layout(case: Case, backend: str) -> tuple[int, ...]:
    """Axes of [page, token, 2, KV, D] in the order in which the backend stores them."""
    shape = page_array_shape(case.spec, len(case.token_pages), case.page_size, backend)
    return (0, 1, 2, 3, 4) if shape[1:4] == case.token_pages.shape[1:4] else (0, 3, 2, 1, 4)


def device_pages(case: Case, backend: str) -> Any:
    return to_device(case.token_pages.transpose(layout(case, backend)), case.page_dtype, case.spec.head_dim)


def run(case: Case, backend: str, *, deterministic: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(out, pages as [page, token, 2, KV, D])."""
    sinks = None if case.sinks is None else jnp.asarray(case.sinks)
    out, pages = _step(
        jnp.asarray(case.q), jnp.asarray(case.k), jnp.asarray(case.v), device_pages(case, backend), case.batch, sinks,
        spec=case.spec, page_size=case.page_size, backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return np.asarray(out), from_device(pages, case.spec.head_dim).transpose(layout(case, backend))


def assert_right(case: Case, out: np.ndarray, pages: np.ndarray) -> None:
    """The error is relative to the largest value; the oracle reads the rounded pages, so only sums differ, and for
    pages in bfloat16 queries and weights of two such numbers each."""
    expected = case.oracle()
    total = sum(row.new for row in case.rows)
    assert np.isfinite(out).all()
    assert not out[total:].any()
    error = np.abs(out - expected).max() / max(np.abs(expected).max(), 1e-6)
    assert error <= (5e-5 if case.page_dtype == "bfloat16" else 2e-5), f"relative error {error:.2e}"
    assert pages.tobytes() == case.written_pages().tobytes()


# head_dim and dtype of pages. Few combinations: each compiles one handler.
KINDS = [
    (64, "float32"), (64, "bfloat16"), (80, "bfloat16"), (96, "bfloat16"), (16, "float32"), (64, "int8"), (80, "fp8"),
]  # fmt: skip
row_lists = st.lists(
    st.one_of(
        st.builds(Row, cached=st.integers(0, 400), new=st.just(1)),
        st.builds(Row, cached=st.integers(0, 150), new=st.integers(1, 80)),
    ),
    min_size=0,
    max_size=6,
).map(lambda rows: sorted(rows, key=lambda row: row.new > 1))
specs = st.builds(
    lambda kv, group, dim, window, cap, sinks: AttentionSpec(
        kv * group, kv, dim, dim**-0.5, sliding_window=window, logit_softcap=cap, has_sinks=sinks
    ),
    kv=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 5, 8]),
    dim=st.just(64),
    window=st.sampled_from([0, 0, 1, 7, 64, 130]),
    cap=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    sinks=st.booleans(),
)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("compiled", [False, True])
def test_codes_of_many_values(dtype, compiled):
    """So many that some lie a rounding error from the border of two codes: every program takes the same one."""
    values = np.random.default_rng(0).standard_normal((200_000, 64)).astype(np.float32)
    function = functools.partial(quantize, dtype=dtype)
    codes, scales = (jax.jit(function) if compiled else function)(values)
    stored = np.concatenate([np.asarray(codes).view(np.uint8), np.asarray(scales)[:, None].view(np.uint8)], axis=-1)
    np.testing.assert_array_equal(stored, store(values, code_kind(dtype)))


@pytest.mark.parametrize("backend", BACKENDS)
class TestPagedAttention:
    """What every backend must do."""

    # Each drawn shape is one XLA compilation for the jnp backends, hence few examples.
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(
        spec=specs,
        rows=row_lists,
        page_size=st.sampled_from([1, 4, 16, 64]),
        kind=st.sampled_from(KINDS),
        padding=st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_ragged_batches(self, backend, spec, rows, page_size, kind, padding, seed):
        head_dim, page_dtype = kind
        spec = dataclasses.replace(spec, head_dim=head_dim, scale=head_dim**-0.5)
        case = make_case(
            np.random.default_rng(seed), spec, rows, page_size, page_dtype,
            extra_tokens=padding[0], extra_rows=padding[1], extra_pages=padding[2],
        )  # fmt: skip
        assert_right(case, *run(case, backend))

    @pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8", "fp8"])
    def test_rows_may_share_pages(self, backend, page_dtype):
        spec = AttentionSpec(4, 2, 64, 0.2)
        case = make_case(np.random.default_rng(1), spec, [Row(40, 1), Row(40, 6)], 8, page_dtype)
        table = np.asarray(case.batch.page_table).copy()
        table[1, :4] = table[0, :4]  # the first 32 tokens are one prefix
        for contents in (case.keys, case.values):
            contents[1][:32] = contents[0][:32]
        case = dataclasses.replace(case, batch=dataclasses.replace(case.batch, page_table=jnp.asarray(table)))
        assert_right(case, *run(case, backend))

    @pytest.mark.parametrize("page_dtype", ["int8", "fp8"])
    def test_codes_of_any_magnitude(self, backend, page_dtype):
        """Vectors of zeros, of tiny and of huge values, and of all magnitudes at once are rounded as numpy does."""
        rng = np.random.default_rng(6)
        case = make_case(rng, AttentionSpec(2, 2, 64, 0.125), [Row(0, 90)], 16, page_dtype)
        for new in (case.k, case.v):
            new[:70] *= np.exp2(rng.integers(-16, 8, new[:70].shape)).astype(np.float32)
            new[70:80] *= np.exp2(rng.integers(-60, 60, (10, 2, 1))).astype(np.float32)
            new[80:85] = 0
        _, pages = run(case, backend)
        assert pages.tobytes() == case.written_pages().tobytes()

    def test_a_prefix_written_in_the_same_step_is_read(self, backend):
        """Row 1 reads a page that row 0 fills in this very step."""
        spec = AttentionSpec(3, 3, 16, 0.25)
        case = make_case(np.random.default_rng(2), spec, [Row(0, 16), Row(16, 4)], 16)
        table = np.asarray(case.batch.page_table).copy()
        table[1, 0] = table[0, 0]
        for contents in (case.keys, case.values):
            contents[1][:16] = contents[0]
        case = dataclasses.replace(case, batch=dataclasses.replace(case.batch, page_table=jnp.asarray(table)))
        assert_right(case, *run(case, backend))

    @pytest.mark.parametrize(("page_dtype", "window"), [("float32", 0), ("bfloat16", 100), ("int8", 0)])
    def test_deterministic(self, backend, page_dtype, window):
        """The last 40 tokens of a sequence of 300: as decode rows, in chunks of several sizes and starts, with
        other rows before and after: every token's result is bitwise the same."""
        if backend == "reference":
            pytest.skip("the reference promises no bitwise equality")
        spec = AttentionSpec(6, 2, 64, 0.125, sliding_window=window, logit_softcap=20.0, has_sinks=True)
        rng = np.random.default_rng(3)
        whole = make_case(rng, spec, [Row(260, 40)], 16, page_dtype)
        expected, _ = run(whole, backend, deterministic=True)
        assert_right(whole, *run(whole, backend, deterministic=True))
        for start, count, before, after, padding in (
            (299, 1, [], [], 0), (260, 1, [Row(5, 1)], [], 3), (260, 7, [Row(90, 1)] * 3, [Row(20, 33)], 5),
            (267, 33, [], [Row(0, 2)], 1), (281, 2, [Row(511, 1)] * 9, [], 0),
        ):  # fmt: skip
            rows = [*before, Row(start, count), *after]
            case = make_case(rng, spec, rows, 16, page_dtype, extra_tokens=padding, extra_pages=2)
            _transplant(whole, case, len(before), start, count)
            out, _ = run(case, backend, deterministic=True)
            first = sum(row.new for row in before)
            got, want = out[first : first + count], expected[start - 260 : start - 260 + count]
            assert got.tobytes() == want.tobytes(), (start, count)

    def test_pages_stay_in_place(self, backend):
        spec = AttentionSpec(4, 2, 64, 0.125)
        case = make_case(np.random.default_rng(4), spec, [Row(20, 1), Row(3, 5)], 16)
        for page_dtype in ("float32", "bfloat16", "int8", "fp8"):
            if not writes_in_place(spec, 16, page_dtype, backend, "cpu"):
                continue
            pages = jax.tree.map(
                lambda part: jnp.zeros(part.shape, part.dtype), abstract_pages(spec, 4096, 16, page_dtype, backend)
            )
            size = sum(part.nbytes for part in jax.tree.leaves(pages))
            arrays = [jnp.asarray(x) for x in (case.q, case.k, case.v)]
            step = _step.lower(*arrays, pages, case.batch, None, spec=spec, page_size=16, backend=backend)
            compiled = step.compile()
            assert compiled.memory_analysis().temp_size_in_bytes < size / 4
            addresses = [part.unsafe_buffer_pointer() for part in jax.tree.leaves(pages)]
            _, pages = compiled(*arrays, pages, case.batch, None)
            assert [part.unsafe_buffer_pointer() for part in jax.tree.leaves(pages)] == addresses

    def test_wrong_arguments_are_named(self, backend):
        spec = AttentionSpec(4, 2, 64, 0.125)
        case = make_case(np.random.default_rng(5), spec, [Row(3, 1)], 16)
        pages = device_pages(case, backend)
        q, k, v = (jnp.asarray(x) for x in (case.q, case.k, case.v))
        call = functools.partial(paged_attention, batch=case.batch, page_size=16, backend=backend)
        with pytest.raises(ValueError, match=r"q: got shape \(1, 4, 32\); allowed: \[tokens, 4, 64\]"):
            call(q[..., :32], k, v, pages, spec=spec)
        with pytest.raises(ValueError, match=r"pages: got shape"):
            call(q, k, v, pages[..., :32], spec=spec)
        with pytest.raises(ValueError, match="pages: got dtype float16"):
            call(q, k, v, pages.astype(jnp.float16), spec=spec)
        with pytest.raises(ValueError, match="pages: got an array of int8; allowed: QuantizedPages"):
            call(q, k, v, pages.astype(jnp.int8), spec=spec)
        with pytest.raises(ValueError, match="sinks: got none with has_sinks=True"):
            call(q, k, v, pages, spec=dataclasses.replace(spec, has_sinks=True))


def _transplant(whole: Case, case: Case, row: int, start: int, count: int) -> None:
    """Give `row` of `case` the contents of tokens start : start + count of the one row of `whole`."""
    page_size, offset = whole.page_size, int(np.asarray(whole.batch.seq_len)[0]) - whole.rows[0].new
    written = whole.written_pages().reshape(-1, *whole.token_pages.shape[2:])
    flat = case.token_pages.reshape(-1, *case.token_pages.shape[2:])
    at = np.arange(start)
    source, target = (
        np.asarray(c.batch.page_table)[r][at // page_size] * page_size + at % page_size
        for c, r in ((whole, 0), (case, row))
    )
    flat[target] = written[source]
    first = int(np.asarray(case.batch.query_start)[row])
    for name in ("q", "k", "v"):
        getattr(case, name)[first : first + count] = getattr(whole, name)[start - offset : start - offset + count]
    case.sinks = whole.sinks


def test_spec_refuses_bad_values():
    with pytest.raises(ValueError, match="num_heads: got 5 with num_kv_heads 2"):
        AttentionSpec(5, 2, 64, 1.0)
    with pytest.raises(ValueError, match="page_size: got 24; allowed: a power of two"):
        page_array_shape(AttentionSpec(4, 2, 64, 1.0), 8, 24, "xla")
    with pytest.raises(ValueError, match="page_dtype: got 'int4'"):
        page_bytes(AttentionSpec(4, 2, 64, 1.0), 16, "int4")
    with pytest.raises(ValueError, match="attention backend: got 'cuda'"):
        page_array_shape(AttentionSpec(4, 2, 64, 1.0), 8, 16, "cuda")


def test_page_bytes_agree_with_the_array():
    for backend in ("xla", "reference"):
        spec = AttentionSpec(6, 3, 64, 0.1)
        for page_dtype in ("float32", "bfloat16", "int8", "fp8"):
            arrays = jax.tree.leaves(abstract_pages(spec, 5, 16, page_dtype, backend))
            assert sum(array.size * array.dtype.itemsize for array in arrays) == 5 * page_bytes(spec, 16, page_dtype)
