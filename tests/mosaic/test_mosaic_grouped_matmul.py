"""Grouped products on Hopper GPUs against float64, in the interpreter with race detection on."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixed_size import compiled_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.grouped_matmul.mosaic import GroupedBlocks, fits, grouped_matmul_mosaic
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params, races_raise

NUM_ROWS, GROUPS = 60, 4


@functools.cache
def product_of(outputs: int):
    blocks = GroupedBlocks(outputs, stages=2)

    def product(x, w, sizes):
        return grouped_matmul_mosaic(x, w, sizes, blocks=blocks, interpret=interpreter_params(detect_races=True))

    return product


def check(outputs: int, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((NUM_ROWS, 192)).astype(ml_dtypes.bfloat16).astype(np.float32)
    w = rng.standard_normal((GROUPS, 256, 192)).astype(ml_dtypes.bfloat16)
    total = sum(sizes)
    x[total:] = np.nan
    for group, size in enumerate(sizes):
        if not size:
            w[group] = np.nan  # a group without rows is not read
    with races_raise():
        out = np.asarray(compiled_call(product_of(outputs), (x, w, np.asarray(sizes, np.int32))))
    group = np.repeat(np.arange(GROUPS), sizes)
    expected = np.einsum("mk,mnk->mn", x[:total].astype(np.float64), w.astype(np.float64)[group])
    assert np.isfinite(out).all()
    assert not out[total:].any()
    np.testing.assert_allclose(out[:total], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("outputs", [64, 128])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(sizes=st.lists(st.integers(0, 15), min_size=GROUPS, max_size=GROUPS), seed=st.integers(0, 99))
def test_groups_of_any_size(outputs, sizes, seed):
    check(outputs, sizes, seed)


def test_edges():
    for sizes in ([60, 0, 0, 0], [0, 0, 0, 0], [8, 16, 1, 35]):
        check(64, sizes, 3)


def test_what_fits():
    assert fits((5, 64), jnp.zeros((2, 128, 64), jnp.bfloat16))
    assert not fits((5, 64), jnp.zeros((2, 96, 64), jnp.bfloat16))
    assert not fits((5, 64), jnp.zeros((2, 128, 64), jnp.float32))
