"""Products head by head of every backend against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi
from jaxserve.pallas_kernels.matmul.api import linear_per_head

BACKENDS = [
    "xla",
    pytest.param("cpu_ffi", marks=needs_cpu_ffi),
]
_product = jax.jit(linear_per_head, static_argnames="backend")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
@pytest.mark.parametrize("columns", [64, 24])
def test_close_to_float64(backend: str, dtype: type, tokens: int, columns: int) -> None:
    random = np.random.default_rng(tokens)
    x = random.standard_normal((tokens, 5, columns)).astype(np.float32)
    w = random.standard_normal((5, 36, columns)).astype(dtype)
    out = np.asarray(_product(jnp.asarray(x), jnp.asarray(w), backend=backend))
    expected = np.einsum("thk,hnk->thn", x.astype(dtype).astype(np.float64), w.astype(np.float64))
    assert out.shape == (tokens, 5, 36) and out.dtype == np.float32
    assert np.abs(out - expected).max() <= 2e-6 * np.abs(expected).max()


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="matmul backend: got 'cuda'"):
        linear_per_head(jnp.zeros((2, 3, 32)), jnp.zeros((3, 8, 32)), backend="cuda")
