"""Residual sums and norms of every backend against float64; a row does not depend on how many there are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi, needs_cpu_tiles
from jaxserve.pallas_kernels.rms_norm.api import add_rms_norm
from jaxserve.pallas_kernels.rms_norm.reference import mean_square

BACKENDS = ["xla", pytest.param("cpu_ffi", marks=needs_cpu_ffi)]
SIZES = [32, 64, 576, 640, 2048, 5120]


def _arrays(rows: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows * 7919 + size)
    x, y = (rng.standard_normal((rows, size), np.float32) * rng.uniform(0.01, 30, (rows, 1)) for _ in range(2))
    return x.astype(np.float32), y.astype(np.float32), rng.standard_normal(size, np.float32)


def _compiled(backend: str, dtype: object = jnp.float32, eps: float = 1e-5):
    return jax.jit(functools.partial(add_rms_norm, eps=eps, backend=backend, dtype=dtype))


def _expected(x: np.ndarray, y: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    total = (x + y).astype(np.float64)
    return total / np.sqrt((total**2).mean(axis=1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("backend", BACKENDS)
class TestAddRMSNorm:
    @pytest.mark.parametrize("size", [*SIZES, 48, 20])  # the last two are no multiple of two vectors
    @pytest.mark.parametrize("eps", [1e-5, 0.5])
    def test_close_to_float64(self, backend, size, eps):
        for rows in (1, 3, 16, 300):
            x, y, weight = _arrays(rows, size)
            total, normed = _compiled(backend, eps=eps)(x, y, weight)
            np.testing.assert_array_equal(total, x + y)
            expected = _expected(x, y, weight, eps)
            assert np.abs(normed - expected).max() <= 5e-7 * np.abs(expected).max(), rows

    def test_what_is_no_number_stays_in_its_row(self, backend):
        x, y, weight = _arrays(4, 64)
        x[1, 3], x[2, 5], x[3], y[3] = np.nan, np.inf, 0.0, 0.0
        total, normed = (np.asarray(part) for part in _compiled(backend)(x, y, weight))
        assert np.isnan(normed[1]).all() and np.isnan(normed[2, 5]) and (normed[3] == 0).all()
        assert np.isfinite(normed[0]).all() and np.isinf(total[2, 5])

    def test_arguments_stay_as_they_are(self, backend):
        """The kernel adds in place where nobody else needs x."""
        x, y, weight = _arrays(5, 64)
        on_device = jnp.asarray(x)

        @jax.jit
        def both(x, y, weight):
            total, normed = add_rms_norm(x, y, weight, eps=1e-5, backend=backend)
            return x * 2, total, normed

        doubled, total, _ = both(on_device, y, weight)
        np.testing.assert_array_equal(doubled, 2 * x)
        np.testing.assert_array_equal(total, x + y)
        np.testing.assert_array_equal(on_device, x)


@needs_cpu_ffi
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_in_any_number_of_rows(size):
    x, y, weight = _arrays(300, size)
    together = np.asarray(_compiled("cpu_ffi")(x, y, weight)[1])
    for rows in (1, 2, 7, 8, 16, 64):
        for first in (0, 300 - rows):
            part = slice(first, first + rows)
            found = np.asarray(_compiled("cpu_ffi")(x[part], y[part], weight)[1])
            assert found.tobytes() == together[part].tobytes(), (rows, first)


@needs_cpu_tiles
def test_in_bfloat16_it_is_the_same_rounded():
    for rows in (1, 9, 256):
        x, y, weight = _arrays(rows, 576)
        normed = _compiled("cpu_ffi")(x, y, weight)[1]
        narrow = _compiled("cpu_ffi", jnp.bfloat16)(x, y, weight)[1]
        assert narrow.dtype == jnp.bfloat16
        assert np.asarray(narrow).tobytes() == np.asarray(normed.astype(jnp.bfloat16)).tobytes()


@pytest.mark.parametrize("size", [64, 576, 640, 2048])
def test_mean_square_has_the_same_bits_in_any_number_of_rows(size: int) -> None:
    x = np.random.default_rng(0).standard_normal((40, size), np.float32)
    compiled = jax.jit(mean_square)
    together = np.asarray(compiled(x))
    np.testing.assert_allclose(together, np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True), rtol=1e-6)
    for rows in (1, 2, 3, 4, 7, 8, 9, 16, 32):
        assert np.asarray(compiled(x[:rows])).tobytes() == together[:rows].tobytes(), rows


def test_heads_are_rows_of_their_own() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 64), np.float32)
    found = np.asarray(jax.jit(mean_square)(x))
    assert found.shape == (3, 2, 1)
    assert found.tobytes() == np.asarray(jax.jit(mean_square)(x.reshape(6, 64))).tobytes()
