"""Every backend of latent attention against a float64 oracle on random ragged batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.mla_attention.api import MLASpec, mla_attention
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.pages import page_array_shape, page_bytes, writes_in_place
from ragged_cases import Case, Row, make_case

BACKENDS = ["reference", "xla"]
SPEC = MLASpec(num_heads=5, latent_dim=32, rope_dim=8, scale=0.2)


@functools.partial(jax.jit, static_argnames=("spec", "page_size", "backend", "deterministic"), donate_argnums=4)
def _step(q_latent, q_rope, latent, k_rope, pages, batch, *, spec, page_size, backend, deterministic=False):
    return mla_attention(
        q_latent, q_rope, latent, k_rope, pages, batch, spec,
        page_size=page_size, backend=backend, deterministic=deterministic,
    )  # fmt: skip


def make(seed: int, rows: list[Row], page_size: int, page_dtype: str = "float32", **padding: int) -> Case:
    """A case of ordinary attention with one head of R + P; its keys are the latent vectors."""
    as_one_head = AttentionSpec(SPEC.num_heads, 1, SPEC.head_dim, SPEC.scale)
    return make_case(np.random.default_rng(seed), as_one_head, rows, page_size, page_dtype, **padding)


def arrays(case: Case) -> tuple[jax.Array, ...]:
    q, new = jnp.asarray(case.q), jnp.asarray(case.k[:, 0])
    at = SPEC.latent_dim
    return q[..., :at], q[..., at:], new[..., :at], new[..., at:], jnp.array(case.token_pages[:, :, 0, 0], copy=True)


def run(case: Case, backend: str, *, deterministic: bool = False) -> tuple[np.ndarray, np.ndarray]:
    parts = arrays(case)
    out, pages = _step(
        *parts, case.batch, spec=SPEC, page_size=case.page_size, backend=backend, deterministic=deterministic
    )
    return np.asarray(out), np.asarray(pages)


def assert_right(case: Case, out: np.ndarray, pages: np.ndarray) -> None:
    expected, token = np.zeros(out.shape), 0
    for row, keys in zip(case.rows, case.keys):
        for position in range(row.cached, row.cached + row.new):
            seen = keys[: position + 1, 0]
            scores = case.q[token].astype(np.float64) @ seen.T * SPEC.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            expected[token] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : SPEC.latent_dim]
            token += 1
    np.testing.assert_allclose(out, expected, atol=2e-5 * max(1.0, np.abs(expected).max()), rtol=0)
    assert pages.tobytes() == np.ascontiguousarray(case.written_pages()[:, :, 0, 0]).tobytes()


row_lists = st.lists(
    st.one_of(
        st.builds(Row, cached=st.integers(0, 300), new=st.just(1)),
        st.builds(Row, cached=st.integers(0, 150), new=st.integers(1, 70)),
    ),
    max_size=5,
).map(lambda rows: sorted(rows, key=lambda row: row.new > 1))


@pytest.mark.parametrize("backend", BACKENDS)
class TestLatentAttention:
    """What every backend must do."""

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(
        rows=row_lists,
        page_size=st.sampled_from([1, 8, 64]),
        page_dtype=st.sampled_from(["float32", "bfloat16"]),
        padding=st.sampled_from([(0, 0, 0), (5, 2, 1)]),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_ragged_batches(self, backend, rows, page_size, page_dtype, padding, seed):
        names = ("extra_tokens", "extra_rows", "extra_pages")
        case = make(seed, rows, page_size, page_dtype, **dict(zip(names, padding)))
        assert_right(case, *run(case, backend))

    def test_wrong_arguments_are_named(self, backend):
        case = make(1, [Row(3, 1)], 16)
        parts = arrays(case)
        call = functools.partial(mla_attention, batch=case.batch, spec=SPEC, page_size=16, backend=backend)
        with pytest.raises(ValueError, match=r"q_rope: got shape \(1, 5, 4\); allowed: \(1, 5, 8\)"):
            call(parts[0], parts[1][..., :4], *parts[2:])
        with pytest.raises(ValueError, match="pages: got shape"):
            call(*parts[:4], parts[4][..., :32])
        with pytest.raises(ValueError, match="pages: got dtype float16"):
            call(*parts[:4], parts[4].astype(jnp.float16))


def test_deterministic():
    """The last tokens of a sequence, as decodes and in chunks beside others, bit for bit the same."""
    whole = make(3, [Row(200, 30)], 16)
    expected, _ = run(whole, "xla", deterministic=True)
    assert_right(whole, *run(whole, "xla", deterministic=True))
    for start, count in ((229, 1), (200, 7), (207, 23)):
        case = make(4, [Row(9, 1), Row(start, count)], 16, extra_tokens=3)
        written = whole.written_pages().reshape(-1, *whole.token_pages.shape[2:])
        at = np.arange(start)
        tables = [np.asarray(c.batch.page_table)[r][at // 16] * 16 + at % 16 for c, r in ((whole, 0), (case, 1))]
        case.token_pages.reshape(-1, *written.shape[1:])[tables[1]] = written[tables[0]]
        for name in ("q", "k"):
            getattr(case, name)[1 : 1 + count] = getattr(whole, name)[start - 200 : start - 200 + count]
        out, _ = run(case, "xla", deterministic=True)
        assert out[1 : 1 + count].tobytes() == expected[start - 200 : start - 200 + count].tobytes(), start


def test_pages_hold_one_latent_vector_per_token_and_stay_in_place():
    spec = MLASpec(num_heads=128, latent_dim=512, rope_dim=64, scale=0.1)
    shape = page_array_shape(spec, 7, 16, "cpu_ffi")
    assert shape == (7, 16, 576)
    for name, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16)):
        assert jnp.zeros(shape, dtype).nbytes == 7 * page_bytes(spec, 16, name)
    assert writes_in_place(spec, 16, "float32", "cpu_ffi", "cpu")
    assert not writes_in_place(spec, 16, "bfloat16", "cpu_ffi", "cpu")

    case = make(5, [Row(20, 1), Row(3, 5)], 16)
    parts = arrays(case)
    pages = jnp.zeros(page_array_shape(SPEC, 4096, 16, "xla"))
    compiled = _step.lower(*parts[:4], pages, case.batch, spec=SPEC, page_size=16, backend="xla").compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes / 4
    address = pages.unsafe_buffer_pointer()
    assert compiled(*parts[:4], pages, case.batch)[1].unsafe_buffer_pointer() == address


def test_spec_refuses_bad_values():
    with pytest.raises(ValueError, match="latent_dim: got 0; allowed: 1 or more"):
        MLASpec(4, 0, 8, 1.0)
    with pytest.raises(ValueError, match="page_size: got 24; allowed: a power of two"):
        page_array_shape(SPEC, 8, 24, "xla")
    with pytest.raises(ValueError, match="page_dtype: got 'int8'"):
        page_bytes(SPEC, 16, "int8")
