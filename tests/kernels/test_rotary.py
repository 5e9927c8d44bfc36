"""Queries, keys and values out of a product, of every backend, against complex numbers in float64."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi
from jaxserve.pallas_kernels.rotary.api import rotate_heads

BACKENDS = ["xla", pytest.param("cpu_ffi", marks=needs_cpu_ffi)]
EPS = 1e-6
# (heads, kv heads, head_dim, dims that turn); the last are not made of whole vectors
SHAPES = [(9, 3, 64, 64), (4, 2, 128, 128), (3, 3, 80, 32), (4, 1, 96, 64), (2, 1, 256, 256), (2, 1, 40, 20)]


def _arrays(num_tokens: int, heads: int, kv_heads: int, head_dim: int, turning: int) -> list[np.ndarray]:
    rng = np.random.default_rng(num_tokens * 7919 + head_dim)
    angle = rng.uniform(0, 1000, (num_tokens, turning // 2))
    qkv = rng.standard_normal((num_tokens, heads + 2 * kv_heads, head_dim), np.float32)
    return [qkv, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)]


def _compiled(backend: str, num_heads: int, weights: tuple[np.ndarray, np.ndarray] | None):
    return jax.jit(functools.partial(rotate_heads, num_heads=num_heads, norm_weights=weights, eps=EPS, backend=backend))


def _expected(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    x, half = x.astype(np.float64), cos.shape[1]
    if weight is not None:
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
class TestRotateHeads:
    def test_close_to_float64(self, backend, has_norms, shape):
        heads, kv_heads, head_dim, _ = shape
        rng = np.random.default_rng(0)
        weights = tuple(rng.standard_normal(head_dim, np.float32) for _ in range(2)) if has_norms else None
        for num_tokens in (1, 5, 130):
            qkv, cos, sin = _arrays(num_tokens, *shape)
            q, k, v = _compiled(backend, heads, weights)(qkv, cos, sin)
            assert q.shape == (num_tokens, heads, head_dim) and k.shape == v.shape == (num_tokens, kv_heads, head_dim)
            np.testing.assert_array_equal(v, qkv[:, heads + kv_heads :])
            parts = (q, qkv[:, :heads]), (k, qkv[:, heads : heads + kv_heads])
            for (found, given), weight in zip(parts, weights or (None, None)):
                expected = _expected(given, cos, sin, weight)
                assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()

    def test_a_token_does_not_depend_on_how_many_there_are(self, backend, has_norms, shape):
        heads, head_dim = shape[0], shape[2]
        weights = (np.full(head_dim, 0.7, np.float32), np.full(head_dim, 1.3, np.float32)) if has_norms else None
        arrays, compiled = _arrays(130, *shape), _compiled(backend, heads, weights)
        together = [np.asarray(part) for part in compiled(*arrays)]
        for count in (1, 16, 64):
            part = compiled(*(array[130 - count :] for array in arrays))
            if backend == "cpu_ffi" and head_dim % 16 == 0:
                assert all(np.asarray(x).tobytes() == y[130 - count :].tobytes() for x, y in zip(part, together))
            else:
                for x, y in zip(part, together):
                    np.testing.assert_allclose(x, y[130 - count :], atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_do_not_fit_are_named(backend):
    qkv, cos, sin = _arrays(2, 4, 2, 64, 64)
    with pytest.raises(ValueError, match=r"rotate_heads: got qkv \(2, 8, 64\), 3 query heads"):
        rotate_heads(qkv, cos, sin, num_heads=3, backend=backend)
    wide = np.ones((2, 48), np.float32)
    with pytest.raises(ValueError, match=r"cos \(2, 48\)"):
        rotate_heads(qkv, wide, wide, num_heads=4, backend=backend)
