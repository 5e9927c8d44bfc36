"""Products of many rows in tile registers: the bits of the kernel for few rows, whatever the form of the weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_marks import needs_tile_registers
from jaxserve.pallas_kernels.matmul.api import gated_linear, input_dtype, linear
from jaxserve.pallas_kernels.matmul.quantized import KINDS, DoubleWeight, JoinedWeight
from quantized_weights import random_weight

pytestmark = needs_tile_registers
SHAPES = [(32, 32), (224, 96), (192, 576)]  # (outputs, inputs): down to one panel and one step


def _x(rows: int, k: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rows * 7919 + k).standard_normal((rows, k), np.float32))


def _weight(kind: str, outputs: int, k: int):
    if kind == "bfloat16":
        return jnp.asarray(np.random.default_rng(outputs).standard_normal((outputs, k), np.float32), jnp.bfloat16)
    return random_weight(kind, (outputs, k))[0]


def _linear(x, w):
    return np.asarray(jax.jit(lambda x, w: linear(x, w, backend="cpu_ffi"))(x, w))


def _gated(x, w, activation="silu", dtype=jnp.float32):
    product = jax.jit(lambda x, w: gated_linear(x, w, activation=activation, backend="cpu_ffi", dtype=dtype))
    return np.asarray(product(x, w))


@pytest.mark.parametrize("kind", ["bfloat16", *KINDS])
@pytest.mark.parametrize(("outputs", "k"), SHAPES)
class TestPanels:
    @pytest.mark.parametrize("rows", [96, 352])
    def test_bits_of_few_rows(self, kind, outputs, k, rows):
        from jaxserve.pallas_kernels.matmul.cpu_ffi_tiles import takes_panels

        x, w = _x(rows, k), _weight(kind, outputs, k)
        assert takes_panels(rows, w) and not takes_panels(48, w)
        together = _linear(x, w)
        assert together.dtype == np.float32
        for first in range(0, rows, 48):
            part = x[first : first + 48]
            assert _linear(part, w).tobytes() == together[first : first + 48].tobytes()
        # Rounded before it is handed over, x gives the same.
        assert _linear(x.astype(jnp.bfloat16), w).tobytes() == together.tobytes()


@pytest.mark.parametrize(
    ("kind", "activation"), [*((kind, "silu") for kind in ["bfloat16", *KINDS]), ("q4_1", "gelu_tanh")]
)
@pytest.mark.parametrize(("outputs", "k"), SHAPES)
def test_bits_of_few_rows_with_a_gate(kind, activation, outputs, k):
    x, w = _x(128, k), _weight(kind, outputs, k)
    together = _gated(x, w, activation)
    for first, count in ((0, 48), (48, 17), (65, 1), (80, 48)):
        assert _gated(x[first : first + count], w, activation).tobytes() == (together[first : first + count].tobytes())
    narrow = _gated(x, w, activation, jnp.bfloat16)
    assert narrow.tobytes() == np.asarray(jnp.asarray(together).astype(jnp.bfloat16)).tobytes()


@pytest.mark.parametrize("kind", ["bfloat16", "q4_1", "int8"])
@pytest.mark.parametrize(
    ("rows", "outputs", "k"), [(96, 64, 1024), (352, 1600, 1120), (4224, 192, 800), (128, 96, 4096)]
)
def test_sums_wait_between_runs_of_inputs(kind, rows, outputs, k):
    """Long rows are multiplied run by run; with very many of them, sums of one panel alone wait."""
    x, w = _x(rows, k) * 0.1, _weight(kind, outputs, k)
    together, gated = _linear(x, w), _gated(x, w)
    for first in range(0, rows, max(rows // 11, 32)):
        part = x[first : first + 32]
        assert _linear(part, w).tobytes() == together[first : first + 32].tobytes()
        assert _gated(part, w).tobytes() == gated[first : first + 32].tobytes()
    rounded = x.astype(jnp.bfloat16)
    assert _linear(rounded, w).tobytes() == together.tobytes()
    narrow = _gated(rounded, w, "silu", jnp.bfloat16)
    assert narrow.tobytes() == np.asarray(jnp.asarray(gated).astype(jnp.bfloat16)).tobytes()


def test_close_to_float64():
    x, w = _x(256, 1536) / 30, _weight("bfloat16", 576, 1536)
    exact = np.asarray(x.astype(jnp.bfloat16)).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    assert np.abs(_linear(x, w) - exact).max() <= 2e-6 * np.abs(exact).max()
    gate, up = np.split(exact, 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    assert np.abs(_gated(x, w) - expected).max() <= 5e-6 * np.abs(expected).max()


def test_what_is_no_number_stays_in_its_row():
    x, w = np.array(_x(96, 64)), _weight("q4_1", 64, 64)
    clean = _linear(jnp.asarray(x), w)
    x[17, 5], x[40, 63] = np.nan, np.inf
    found = _linear(jnp.asarray(x), w)
    others = [row for row in range(96) if row not in (17, 40)]
    assert np.isnan(found[17]).all() and not np.isfinite(found[40]).any()
    assert found[others].tobytes() == clean[others].tobytes()


def test_who_may_hand_over_bfloat16():
    """Only where the product would begin with rounding to it."""
    narrow, wide = _weight("bfloat16", 64, 64), jnp.zeros((64, 64), jnp.float32)
    blocks = _weight("q4_1", 64, 64)
    odd = _weight("bfloat16", 48, 64)  # not cut into panels

    def allowed(w, rows=128, backend="cpu_ffi"):
        return input_dtype(rows, w, backend=backend)

    assert allowed(narrow) == allowed(blocks) == allowed(DoubleWeight(blocks, narrow)) == jnp.bfloat16
    assert allowed(JoinedWeight((narrow, blocks))) == jnp.bfloat16
    for w in (wide, odd, JoinedWeight((narrow, odd)), dataclasses.replace(blocks, expanded="float32")):
        assert allowed(w) == jnp.float32
    assert allowed(narrow, rows=64) == allowed(narrow, rows=100) == allowed(narrow, backend="xla") == jnp.float32


def test_types():
    from jaxserve.pallas_kernels.matmul.cpu_ffi_panels import linear_panels

    x, w = _x(96, 64), _weight("bfloat16", 64, 64)
    half = x.astype(jnp.float16)
    assert _linear(half, w).tobytes() == _linear(half.astype(jnp.float32), w).tobytes()
    with pytest.raises(ValueError, match="result of a product: got bfloat16; allowed: float32"):
        linear_panels(x, w, "", jnp.bfloat16)
    with pytest.raises(ValueError, match="result of a product: got float16; allowed: float32 or bfloat16"):
        linear_panels(x, w, "silu", jnp.float16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unacceptable argument types or shapes"):
        jax.block_until_ready(linear_panels(x[:64], w))  # more tiles to lay out than steps


@pytest.mark.parametrize("kind", ["bfloat16", "q4_1"])
def test_a_layer_has_the_bits_of_few_rows(kind):
    """Norm, gate and products as a decoder has them: what is handed over in bfloat16 changes nothing."""
    from jaxserve.models.contract import RuntimeOptions
    from jaxserve.models.layers import FeedForward
    from jaxserve.pallas_kernels.rms_norm.api import add_rms_norm

    class Weights:
        def matrix(self, slots, rows, columns):
            return _weight(kind, sum(rows), columns)

    options = RuntimeOptions(dtype="bfloat16", matmul="cpu_ffi")
    mlp = FeedForward(Weights(), "mlp", 192, 320, activation="silu", has_bias=False, options=options)
    norm = jnp.linspace(0.5, 1.5, 192)

    @jax.jit
    def layer(x, y):
        dtype = mlp.input_dtype(x.shape[0])
        assert dtype == (jnp.bfloat16 if x.shape[0] >= 96 else jnp.float32)
        total, normed = add_rms_norm(x, y, norm, eps=1e-5, backend="cpu_ffi", dtype=dtype)
        return total + mlp(normed)

    x, y = _x(256, 192), _x(256, 192) * 0.5
    together = np.asarray(layer(x, y))
    for first in (0, 100, 224):
        part = slice(first, first + 32)
        assert np.asarray(layer(x[part], y[part])).tobytes() == together[part].tobytes()
