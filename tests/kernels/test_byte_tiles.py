"""Products with inputs rounded to 8 bits, against the same rounding in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_marks import needs_cpu_bytes
from jaxserve.models.quantization import dequantize_numpy
from jaxserve.pallas_kernels.backend import cpu_tiles_available, has_tile_registers
from jaxserve.pallas_kernels.matmul.api import gated_linear, linear
from jaxserve.pallas_kernels.matmul.quantized import DoubleWeight, JoinedWeight, QuantizedWeight
from quantized_weights import random_weight

KINDS = ["int8", "q4_1", "q4_k", "q4_z", "q6_k", "q8_0"]
OUTLIER = 20  # times the mean of a row: from there on 32 values have 16 bits

pytestmark = needs_cpu_bytes


@functools.partial(jax.jit, static_argnames="activation")
def _product(x: jax.Array, w: QuantizedWeight, activation: str = "") -> jax.Array:
    from jaxserve.pallas_kernels.matmul.cpu_ffi_tiles import linear_gated, linear_tiles

    return linear_gated(x, w, activation, in_bytes=True) if activation else linear_tiles(x, w, in_bytes=True)


def _inputs(rows: int, k: int, outliers: tuple[tuple[int, int], ...] = ()) -> np.ndarray:
    x = np.random.default_rng(rows + k).standard_normal((rows, k)).astype(np.float32)
    for row, column in outliers:
        x[row % rows, column] = 400.0
    return x


def _rounded(x: np.ndarray) -> np.ndarray:
    """[T, K] -> the values that are multiplied, in float64: 32 at a time whole numbers up to 127 times a scale, or up
    to 127 * 256 where one of them is an outlier of its row."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    is_outlier = largest > OUTLIER * np.abs(x.astype(np.float64)).mean(axis=1)[:, None, None]
    steps = np.where(is_outlier, np.float32(256), np.float32(1))
    up = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    numbers = np.rint(blocks * (up * steps)).astype(np.float64)  # the product in float32: it decides ties
    return (numbers * largest / (127 * steps.astype(np.float64))).reshape(x.shape)


def _error(found: jax.Array, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(("outputs", "k"), [(16, 32), (48, 96), (96, 576)])
def test_as_the_rounded_inputs_in_float64(kind, rows, outputs, k):
    w, values = random_weight(kind, (outputs, k))
    for outliers in ((), ((0, 5), (rows // 2, k - 1), (17, 3))):
        x = _inputs(rows, k, outliers)
        assert _error(_product(jnp.asarray(x), w), _rounded(x) @ values.T) <= 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_leaves_the_others_their_digits(kind):
    """Of a row with one value 400 times the others, the others matter as they do without it."""
    w, values = random_weight(kind, (96, 576))
    x = _inputs(20, 576, tuple((row, 7) for row in range(20)))
    found, exact = np.asarray(_product(jnp.asarray(x), w)), x.astype(np.float64) @ values.T
    without = x.copy()
    without[:, 7] = 0
    size = np.abs(without.astype(np.float64) @ values.T).max()
    assert np.abs(found - exact).max() <= 0.02 * size
    plain = np.abs(x.reshape(20, -1, 32)).max(-1, keepdims=True) / 127  # what 8 bits for all would be
    coarse = (np.rint(x.reshape(20, -1, 32) / plain) * plain).reshape(x.shape).astype(np.float64) @ values.T
    assert np.abs(found - exact).max() < 0.5 * np.abs(coarse - exact).max()


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("kind", ["q4_1", "q6_k"])
def test_rows_do_not_depend_on_their_number_nor_on_outliers_of_others(kind, activation):
    w, _ = random_weight(kind, (96, 192))
    x = _inputs(70, 192, ((3, 40), (33, 100), (64, 1)))
    together = np.asarray(_product(jnp.asarray(x), w, activation))
    for rows in (1, 2, 8, 9, 16, 31, 33, 64):
        for first in (0, 70 - rows):
            part = np.asarray(_product(jnp.asarray(x[first : first + rows]), w, activation))
            assert part.tobytes() == together[first : first + rows].tobytes(), (rows, first)


@pytest.mark.parametrize(("kind", "activation"), [("q4_1", "silu"), ("q4_1", "gelu_tanh"), ("q6_k", "silu")])
def test_gated(kind, activation):
    w, values = random_weight(kind, (96, 192))
    for rows in (5, 16, 40):
        x = _inputs(rows, 192) * np.float32(1 / np.abs(values).max())
        gate, up = np.split(_rounded(x) @ values.T, 2, axis=1)
        if activation == "silu":
            expected = gate / (1 + np.exp(-gate)) * up
        else:
            expected = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        assert _error(_product(jnp.asarray(x), w, activation), expected) <= 1e-3


@pytest.mark.parametrize("kind", ["int8", "q8_0", "q6_k"])
def test_codes_of_zero_and_of_the_largest_size(kind):
    """The bias of signed codes is taken away exactly, also where all of them are as far from zero as they get."""
    w, _ = random_weight(kind, (16, 1536))
    x = np.abs(_inputs(6, 1536, ((0, 7),)))
    for code in (0, 0x80, 0x7F, 0xFF):
        codes = np.array(w.codes)
        if kind == "int8":
            codes[:, :1536] = code
        else:
            codes.reshape(16, 48, -1)[..., -32:] = code
        extreme = dataclasses.replace(w, codes=jnp.asarray(codes))
        values = dequantize_numpy(codes, kind).astype(np.float64)
        expected, found = _rounded(x) @ values.T, np.asarray(_product(jnp.asarray(x), extreme))
        assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["int8", "q4_1"])
def test_small_and_large_values(kind):
    w, values = random_weight(kind, (32, 64))
    for size in (1e-15, 1e-10, 1e10, 1e30):
        x = _inputs(20, 64, ((3, 5),)) * np.float32(size)
        assert _error(_product(jnp.asarray(x), w), _rounded(x) @ values.T) <= 3e-6
    tiny = np.asarray(_product(jnp.asarray(_inputs(20, 64) * np.float32(1e-30)), w))
    assert np.abs(tiny).max() <= 1e-18


def test_nothing_infinity_and_nan():
    w, _ = random_weight("q4_1", (32, 64))
    x = _inputs(4, 64)
    x[1], x[2, 9], x[3, 40] = 0, np.nan, np.inf
    found = np.asarray(_product(jnp.asarray(x), w))
    assert np.isfinite(found[0]).all() and (found[1] == 0).all()
    assert np.isnan(found[2]).all() and not np.isfinite(found[3]).any()


def test_where_products_are_in_bytes():
    """More than 4 rows, or more than 16 of a weight with a copy in bfloat16 that the CPU multiplies; not where there
    are tile registers, and no weights but quantised ones with codes of whole numbers."""
    w, values = random_weight("q4_1", (96, 64))
    copy, of_copy = jnp.asarray(values, jnp.bfloat16), 16 if cpu_tiles_available()[0] else 4
    for weight, most_exact in ((w, 4), (DoubleWeight(w, copy), of_copy), (JoinedWeight((w, w)), 4)):
        for rows in (1, 4, 5, 16, 17, 40):
            x = jnp.asarray(_inputs(rows, 64))
            default, found = (
                np.asarray(jax.jit(functools.partial(linear, backend=backend))(x, weight))
                for backend in ("cpu_ffi", "cpu_int8")
            )
            is_same = default.tobytes() == found.tobytes()
            assert is_same == (rows <= most_exact or has_tile_registers()), rows
            if not is_same:
                in_bytes = np.asarray(_product(x, w))
                np.testing.assert_array_equal(found[:, :96], in_bytes)
    for other in (copy, random_weight("fp8_32", (96, 64))[0]):
        x = jnp.asarray(_inputs(40, 64))
        default, found = (linear(x, other, backend=backend) for backend in ("cpu_ffi", "cpu_int8"))
        np.testing.assert_array_equal(np.asarray(default), np.asarray(found))


def test_gated_products_are_in_bytes_too():
    w, _ = random_weight("q4_1", (96, 64))
    x = jnp.asarray(_inputs(20, 64))
    found = np.asarray(jax.jit(functools.partial(gated_linear, activation="silu", backend="cpu_int8"))(x, w))
    if has_tile_registers():
        default = jax.jit(functools.partial(gated_linear, activation="silu", backend="cpu_ffi"))(x, w)
        np.testing.assert_array_equal(found, np.asarray(default))
    else:
        np.testing.assert_array_equal(found, np.asarray(_product(x, w, "silu")))
