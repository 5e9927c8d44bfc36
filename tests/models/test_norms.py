"""Norms of a row do not depend on how many rows there are."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jaxserve.pallas_kernels.rms_norm.reference import mean_square


@pytest.mark.parametrize("size", [64, 576, 640, 2048])
def test_a_row_has_the_same_bits_in_any_number_of_rows(size: int) -> None:
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
