"""Quantised weights rearranged for GPUs: the same values, and what is done where no kernel takes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve.pallas_kernels.matmul.api import linear, take_rows
from jaxserve.pallas_kernels.matmul.planar import expand, planar, planar_parts
from jaxserve.pallas_kernels.matmul.quantized import KINDS, DoubleWeight, JoinedWeight, PlanarWeight, dequantize
from quantized_weights import random_weight

# One program each, where every operation would be compiled alone.
expand, take_rows, dequantize = jax.jit(expand), jax.jit(take_rows), jax.jit(dequantize)


@pytest.mark.parametrize("shape", [(128, 256), (70, 96)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_values_stay(kind, shape):
    weight, values = random_weight(kind, shape)
    found = planar(weight)
    assert found.shape == shape and found.scales.shape[-1] == 128
    np.testing.assert_array_equal(np.asarray(expand(found)), values.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(expand(found)), np.asarray(dequantize(weight)))
    rows = jnp.asarray([5, 0, shape[0] - 1, 5])
    np.testing.assert_array_equal(np.asarray(take_rows(found, rows)), np.asarray(take_rows(weight, rows)))


def test_they_take_no_more_memory_than_before_but_for_scales_of_scales():
    for kind, allowed in (("int8", 1.0), ("fp8", 1.0), ("q8_0", 1.0), ("q4_1", 1.0), ("fp8_32", 1.0), ("q4_z", 1.2)):
        weight, _ = random_weight(kind, (128, 1024))
        found = planar(weight)
        parts = [part.nbytes for part in (found.codes, found.scales, found.offsets) if part is not None]
        assert sum(parts) <= allowed * weight.codes.nbytes, kind


@pytest.mark.parametrize("kind", ["int8", "fp8_32", "q4_1"])
def test_xla_multiplies_the_same_values(kind):
    weight, _ = random_weight(kind, (70, 96))
    x = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    expected = linear(jnp.asarray(x), weight, backend="xla")
    np.testing.assert_array_equal(linear(jnp.asarray(x), planar(weight), backend="xla"), expected)


def test_parts_are_rearranged_and_the_rest_stays():
    parts = [random_weight(kind, (128, 256))[0] for kind in ("int8", "q6_k")]
    whole = planar_parts(JoinedWeight((*parts, jnp.ones((128, 256)))))
    assert [type(part) for part in whole.parts[:2]] == [PlanarWeight, PlanarWeight]
    assert whole.shape == (384, 256)
    both = planar_parts(DoubleWeight(parts[0], jnp.ones((128, 256))))
    assert isinstance(both.stored, PlanarWeight) and both.dense.shape == (128, 256)
