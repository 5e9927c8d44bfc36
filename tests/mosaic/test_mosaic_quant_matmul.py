"""Products with quantised weights on Hopper GPUs against float64, in the interpreter with race detection on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixed_size import compiled_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.matmul.api import linear
from jaxserve.pallas_kernels.matmul.mosaic import MAX_ROWS, QuantBlocks, cut_inputs, quant_matmul_mosaic
from jaxserve.pallas_kernels.matmul.planar import planar
from jaxserve.pallas_kernels.matmul.quantized import KINDS, DoubleWeight, PlanarWeight
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params, races_raise
from quantized_weights import random_weight

BLOCKS = QuantBlocks(stages=2, blocks=8, min_steps=1)


@functools.cache
def product_of(blocks: QuantBlocks):
    def product(x, w):
        return quant_matmul_mosaic(x, w, blocks=blocks, interpret=interpreter_params(detect_races=True))

    return product


def check(kind: str, rows: int, shape: tuple[int, int], blocks: QuantBlocks = BLOCKS) -> None:
    weight, values = random_weight(kind, shape, rows)
    x = np.random.default_rng(rows).standard_normal((rows, shape[1])).astype(ml_dtypes.bfloat16).astype(np.float32)
    with races_raise():
        out = np.asarray(compiled_call(product_of(blocks), (x, planar(weight))))
    exact = x.astype(np.float64) @ values.T
    assert out.shape == exact.shape and out.dtype == np.float32
    assert np.linalg.norm(out - exact) <= 2e-3 * np.linalg.norm(exact)
    if kind not in ("int8", "fp8"):  # with a scale for some inputs weights are rounded, as XLA's expansion of them is
        values = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = x.astype(np.float64) @ values.T
    assert np.linalg.norm(out - expected) <= 2e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind):
    check(kind, 5, (256, 384))


@pytest.mark.parametrize(
    ("kind", "rows", "shape", "blocks"),
    [
        ("q4_1", 1, (130, 160), BLOCKS),  # padding of outputs and inputs
        ("q6_k", 70, (256, 640), QuantBlocks(outputs=128, stages=3, blocks=4, min_steps=2)),
        ("int8", 130, (128, 256), BLOCKS),  # more rows than one tile
        ("fp8_32", 9, (128, 128), QuantBlocks()),  # fewer steps than stages
    ],
)
def test_sizes(kind, rows, shape, blocks):
    check(kind, rows, shape, blocks)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    kind=st.sampled_from(KINDS), rows=st.integers(1, 200), outputs=st.integers(1, 400), blocks=st.integers(1, 8),
    inputs=st.integers(1, 24), stages=st.integers(2, 4),
)  # fmt: skip
def test_many_sizes(kind, rows, outputs, blocks, inputs, stages):
    check(kind, rows, (outputs, 32 * inputs), QuantBlocks(stages=stages, blocks=blocks, min_steps=1))


def test_runs_cover_all_steps_whatever_the_rows():
    blocks = QuantBlocks()
    for outputs, inputs in ((4096, 14336), (128, 128), (51200, 5120), (7168, 16384), (640, 1536)):
        runs, length = cut_inputs((outputs, inputs), blocks)
        assert (runs - 1) * length < inputs // 128 <= runs * length
        assert runs == 1 or length >= blocks.min_steps
    assert cut_inputs((4096, 14336), blocks)[0] * 4096 // 128 > 132  # few outputs, and yet a block for each SM


def test_the_entry_takes_the_kernel_for_few_rows_alone():
    weight, _ = random_weight("q4_1", (128, 128))
    stored = planar(weight)
    dense = DoubleWeight(stored, jnp.zeros((128, 128), jnp.bfloat16))

    def kernels(rows: int, w: PlanarWeight | DoubleWeight) -> int:
        x = jnp.ones((rows, 128))
        return str(jax.make_jaxpr(lambda x, w: linear(x, w, backend="interpret"))(x, w)).count("quant_matmul_mosaic")

    assert kernels(1, stored) and kernels(MAX_ROWS, stored) and not kernels(MAX_ROWS + 1, stored)
    assert kernels(4, dense) and not kernels(MAX_ROWS + 1, dense)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 128)), jnp.float32)
    np.testing.assert_allclose(linear(x, stored, backend="interpret"), linear(x, weight, backend="xla"), atol=1e-4)
