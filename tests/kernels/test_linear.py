"""Dense products of every backend against float64."""

from __future__ import annotations

import dataclasses
import functools
import threading

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi, needs_cpu_tiles, needs_tile_registers
from jaxserve.pallas_kernels.backend import cpu_tiles_available, has_tile_registers
from jaxserve.pallas_kernels.matmul.api import gated_linear, linear, take_rows
from jaxserve.pallas_kernels.matmul.quantized import (
    KINDS,
    DoubleWeight,
    JoinedWeight,
    QuantizedWeight,
    dequantize,
    joined,
    quantize_int8,
)

BACKENDS = [
    "xla",
    pytest.param("cpu_ffi", marks=needs_cpu_ffi),
    pytest.param("cpu_tiles", marks=needs_cpu_tiles),
]
DTYPES = ["float32", "bfloat16"]


@functools.partial(jax.jit, static_argnames="backend")
def _linear(x, w, *, backend):
    return linear(x, w, backend=backend)


def _arrays(rows: int, outputs: int, k: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows * 7919 + outputs)
    x, w = rng.standard_normal((rows, k), np.float32), rng.standard_normal((outputs, k), np.float32)
    return jnp.asarray(x), jnp.asarray(w, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 40])
    @pytest.mark.parametrize(("outputs", "k"), [(192, 576), (67, 64), (30, 20)])
    def test_close_to_float64(self, backend, rows, outputs, k, dtype):
        x, w = _arrays(rows, outputs, k, dtype)
        out = np.asarray(_linear(x, w, backend=backend))
        assert out.dtype == np.float32 and out.shape == (rows, outputs)
        # What is promised: x rounded to the type of the weights, sums in float32.
        rounded = np.asarray(x.astype(w.dtype)).astype(np.float64)
        expected = rounded @ np.asarray(w).astype(np.float64).T
        assert np.abs(out - expected).max() <= 2e-6 * np.abs(expected).max()

    def test_wrong_arguments_are_named(self, backend):
        x, w = _arrays(2, 8, 32, "float32")
        with pytest.raises(ValueError, match=r"linear: got x \(2, 16\) and w \(8, 32\)"):
            linear(x[:, :16], w, backend=backend)
        with pytest.raises(ValueError, match="w: got dtype int32; allowed: float32, bfloat16"):
            linear(x, w.astype(jnp.int32), backend=backend)
        with pytest.raises(ValueError, match="matmul backend: got 'cuda'"):
            linear(x, w, backend="cuda")


@needs_cpu_tiles
@pytest.mark.parametrize("backend", ["cpu_ffi", "cpu_tiles"])
@pytest.mark.parametrize(("outputs", "k"), [(16, 32), (48, 64), (192, 576), (2064, 1024)])
def test_rows_in_tiles_do_not_depend_on_their_number(outputs, k, backend):
    """A few rows, one and two blocks of 16, whole and partly filled, take different code, as do odd numbers of
    outputs."""
    x, w = _arrays(100, outputs, k, "bfloat16")
    together = np.asarray(_linear(x, w, backend=backend))
    expected = np.asarray(x.astype(w.dtype)).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    assert np.abs(together - expected).max() <= 2e-6 * np.abs(expected).max()
    for rows in (1, 2, 3, 7, 12, 13, 16, 17, 31, 32, 33, 48, 64, 96):
        for first in (0, 100 - rows):
            part = np.asarray(_linear(x[first : first + rows], w, backend=backend))
            assert part.tobytes() == together[first : first + rows].tobytes(), (rows, first)


@needs_tile_registers
def test_a_weight_kept_twice_is_read_in_its_blocks_where_there_are_tiles():
    weight, _ = _quantized("q4_1", 48, 64)
    both = DoubleWeight(weight, jnp.ones((48, 64), jnp.bfloat16))
    for rows in (1, 40):
        x, _ = _arrays(rows, 48, 64, "float32")
        for backend in ("cpu_ffi", "cpu_tiles"):
            found = np.asarray(_linear(x, both, backend=backend))
            np.testing.assert_array_equal(found, np.asarray(_linear(x, weight, backend=backend)))


@needs_cpu_tiles
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("rows", [1, 12, 20, 70])
def test_blocks_in_tiles_equal_their_expansion(kind, rows):
    w, _ = _quantized(kind, 80, 256)
    x = _arrays(rows, 80, 256, "float32")[0]
    found = np.asarray(_linear(x, w, backend="cpu_tiles"))
    expected = np.asarray(_linear(x, dequantize(w).astype(jnp.bfloat16), backend="cpu_tiles"))
    assert found.tobytes() == expected.tobytes()


def _gated(values: np.ndarray, activation: str) -> np.ndarray:
    """In float64, of gate and, beside it, up."""
    gate, up = np.split(values, 2, axis=1)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
class TestGatedProduct:
    @pytest.mark.parametrize(("outputs", "k"), [(16, 32), (48, 96), (96, 576), (20, 64)])
    def test_close_to_float64(self, backend, activation, dtype, outputs, k):
        product = jax.jit(functools.partial(gated_linear, activation=activation, backend=backend))
        for rows in (1, 3, 8, 9, 16, 33, 70):
            x, w = _arrays(rows, 2 * outputs, k, dtype)
            x = x * 0.3
            exact = np.asarray(x.astype(w.dtype)).astype(np.float64) @ np.asarray(w).astype(np.float64).T
            expected = _gated(exact, activation)
            found = np.asarray(product(x, w))
            assert np.abs(found - expected).max() <= 5e-6 * max(np.abs(expected).max(), 1.0), rows

    def test_what_is_far_from_zero_and_what_is_no_number(self, backend, activation, dtype):
        x = jnp.asarray([[-300.0] + [0.0] * 31, [300.0] + [0.0] * 31, [np.nan] + [0.0] * 31], jnp.float32)
        w = jnp.ones((32, 32)).astype(dtype)
        found = np.asarray(jax.jit(functools.partial(gated_linear, activation=activation, backend=backend))(x, w))
        assert np.abs(found[0]).max() < 1e-30 and np.isnan(found[2]).all()
        np.testing.assert_allclose(found[1], 300.0**2, rtol=1e-5)

    def test_unknown_activation_is_named(self, backend, activation, dtype):
        x, w = _arrays(2, 32, 32, dtype)
        with pytest.raises(ValueError, match="activation: got 'relu'; allowed: silu, gelu_tanh"):
            gated_linear(x, w, activation="relu", backend=backend)


@needs_cpu_tiles
def test_rows_of_a_gated_product_do_not_depend_on_their_number():
    x, w = _arrays(100, 192, 576, "bfloat16")
    product = jax.jit(functools.partial(gated_linear, activation="silu", backend="cpu_tiles"))
    together = np.asarray(product(x, w))
    for rows in (1, 2, 8, 12, 13, 16, 17, 32, 33, 64, 96):
        for first in (0, 100 - rows):
            part = np.asarray(product(x[first : first + rows], w))
            assert part.tobytes() == together[first : first + rows].tobytes(), (rows, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "k"), [(192, 576), (256, 640), (64, 64)])
def test_xla_rows_do_not_depend_on_their_number(outputs, k, dtype):
    """Up to 4 rows, and any multiple of 4: what a ladder of step sizes may use where results must not change
    with the batch. (A remainder of one or two rows past a multiple of 16 takes another path.)"""
    x, w = _arrays(256, outputs, k, dtype)
    together = np.asarray(_linear(x, w, backend="xla"))
    for rows in (1, 2, 3, 4, 8, 12, 16, 20, 32, 52, 64, 128):
        for first in (0, 37, 256 - rows):
            part = np.asarray(_linear(x[first : first + rows], w, backend="xla"))
            assert part.tobytes() == together[first : first + rows].tobytes(), (rows, first)


@needs_cpu_ffi
class TestSkinnyKernel:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_do_not_depend_on_their_number(self, dtype):
        from jaxserve.pallas_kernels.matmul.cpu_ffi import MAX_ROWS, linear_cpu

        x, w = _arrays(MAX_ROWS[dtype], 193, 96, dtype)
        together = np.asarray(jax.jit(linear_cpu)(x, w))
        for first in range(len(x)):
            for count in (1, 3, 4):
                part = np.asarray(jax.jit(linear_cpu)(x[first : first + count], w))
                assert part.tobytes() == together[first : first + count].tobytes()

    def test_many_threads_at_once(self):
        x, w = _arrays(3, 4000, 512, "bfloat16")
        expected = np.asarray(_linear(x, w, backend="cpu_ffi"))
        wrong = []

        def work() -> None:
            for _ in range(20):
                if not np.array_equal(np.asarray(_linear(x, w, backend="cpu_ffi")), expected):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def _quantized(kind: str, outputs: int, k: int, *, expanded: str = "bfloat16") -> tuple[QuantizedWeight, np.ndarray]:
    """(a random weight, its values in float64 by the gguf package or by the definition of the form)."""
    rng = np.random.default_rng(outputs)
    values = rng.standard_normal((outputs, k), np.float32)
    if kind == "int8":
        weight = dataclasses.replace(quantize_int8(values), expanded=expanded)
        rows = np.asarray(weight.codes)
        scale = np.ascontiguousarray(rows[:, k:]).view(np.float32).astype(np.float64)
        assert np.abs(rows[:, :k].view(np.int8) * scale - values).max() <= scale.max() * 0.5001
        return weight, rows[:, :k].view(np.int8) * scale
    if kind in ("q8_0", "q4_1"):
        form = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}[kind]
        codes = gguf.quants.quantize(values, form)
        expected = gguf.quants.dequantize(codes, form).astype(np.float64)
    else:
        codes, expected = _random_form(kind, outputs, k, rng)
    return QuantizedWeight(jnp.asarray(codes), kind, (outputs, k), expanded), expected


def _random_form(kind: str, outputs: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Every code may appear, subnormal numbers too; NaN never."""
    count = (outputs, k // 32)

    def halves(low: float, high: float) -> np.ndarray:
        return (rng.uniform(low, high, count) * rng.choice([-1, 1], count)).astype(np.float16)

    def as_bytes(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)[..., None].view(np.uint8)

    def fp8(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 1
        return codes, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)

    if kind == "fp8":
        codes, values = fp8((outputs, k))
        scale = rng.uniform(1e-3, 2e-3, (outputs, 1)).astype(np.float32)
        return np.concatenate([codes, scale.view(np.uint8)], axis=1), values * scale
    nibbles = rng.integers(0, 16, (*count, 32))
    packed = (nibbles[..., :16] | nibbles[..., 16:] << 4).astype(np.uint8)
    d, m = halves(1e-3, 2e-2), halves(1e-3, 2e-2)
    wide_d, wide_m = (part.astype(np.float64)[..., None] for part in (d, m))
    if kind == "fp8_32":
        codes, values = fp8((*count, 32))
        scale = rng.uniform(1e-4, 2e-4, count).astype(np.float32)
        blocks, expected = [as_bytes(scale), codes], values * scale[..., None]
    elif kind == "q4_z":
        zero = rng.integers(0, 17, count).astype(np.uint8)
        blocks = [as_bytes(d), zero[..., None], np.zeros((*count, 1), np.uint8), packed]
        expected = wide_d * (nibbles - zero[..., None].astype(np.float64))
    elif kind == "q4_k":
        a, b = (rng.integers(0, 64, count).astype(np.uint8) for _ in range(2))
        blocks = [as_bytes(d), as_bytes(m), a[..., None], b[..., None], packed]
        expected = wide_d * a[..., None] * nibbles - wide_m * b[..., None]
    else:
        assert kind == "q6_k"
        factors = rng.integers(-128, 128, (*count, 2)).astype(np.int8)
        codes = rng.integers(-32, 32, (*count, 32)).astype(np.int8)
        blocks = [as_bytes(d), factors.view(np.uint8), codes.view(np.uint8)]
        expected = wide_d * np.repeat(factors, 16, axis=-1) * codes
    return np.concatenate(blocks, axis=-1).reshape(outputs, -1), expected.reshape(outputs, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
class TestQuantizedWeights:
    @pytest.mark.parametrize(("rows", "outputs", "k"), [(1, 67, 64), (7, 192, 576), (12, 67, 96), (40, 67, 64)])
    def test_close_to_float64(self, backend, kind, rows, outputs, k):
        weight, values = _quantized(kind, outputs, k)
        x, _ = _arrays(rows, outputs, k, "float32")
        out = np.asarray(_linear(x, weight, backend=backend))
        expected = np.asarray(x).astype(np.float64) @ values.T
        # Expanding to bfloat16 rounds x and w; the kernel for few rows rounds neither.
        few = 4 if cpu_tiles_available()[0] and outputs % 16 == 0 and k % 32 == 0 else 16
        tolerance = 2e-6 if backend == "cpu_ffi" and rows <= few else 1e-2
        assert np.abs(out - expected).max() <= tolerance * max(np.abs(expected).max(), 1.0)

    @pytest.mark.parametrize("rows", [3, 40])
    def test_expanded_to_float32_where_asked(self, backend, kind, rows):
        weight, values = _quantized(kind, 64, 96, expanded="float32")
        x, _ = _arrays(rows, 64, 96, "float32")
        out = np.asarray(_linear(x, weight, backend=backend))
        expected = np.asarray(x).astype(np.float64) @ values.T
        assert np.abs(out - expected).max() <= 2e-6 * max(np.abs(expected).max(), 1.0)

    def test_dequantised_values(self, backend, kind):
        """In float32 the products of scales and codes round once or twice."""
        weight, values = _quantized(kind, 30, 128)
        np.testing.assert_allclose(np.asarray(dequantize(weight)), values, rtol=3e-7, atol=3e-7 * np.abs(values).max())
        rows = np.array([3, 0, 29, 3])
        np.testing.assert_array_equal(
            np.asarray(take_rows(weight, jnp.asarray(rows))), np.asarray(dequantize(weight))[rows]
        )

    def test_wrong_codes_are_refused(self, backend, kind):
        weight, _ = _quantized(kind, 4, 64)
        with pytest.raises(ValueError, match=r"codes: got uint8 \(3, "):
            QuantizedWeight(weight.codes[:3], kind, weight.shape)
        with pytest.raises(ValueError, match="kind: got 'q2_k'; allowed: int8, fp8, q8_0, q4_1"):
            QuantizedWeight(weight.codes, "q2_k", weight.shape)
        with pytest.raises(ValueError, match="expanded: got 'float16'; allowed: bfloat16, float32"):
            QuantizedWeight(weight.codes, kind, weight.shape, "float16")


@needs_cpu_ffi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "k"), [(67, 32), (64, 576), (530, 160), (41, 256)])
class TestStoredWeights:
    """The kernel for few rows: whole and broken groups of four blocks, any number of outputs."""

    def test_rows_do_not_depend_on_their_number(self, kind, outputs, k):
        from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import linear_cpu_quantized

        weight, values = _quantized(kind, outputs, k)
        x, _ = _arrays(8, outputs, k, "float32")
        x = x * jnp.where(jnp.arange(k) % 37 == 5, 1000.0, 1.0)  # few large inputs among small ones
        product = jax.jit(linear_cpu_quantized)
        together = np.asarray(product(x, weight))
        expected = np.asarray(x).astype(np.float64) @ values.T
        assert np.abs(together - expected).max() <= 2e-6 * np.abs(expected).max()
        for rows in (1, 2, 3, 4, 5):
            for first in (0, 3):
                part = np.asarray(product(x[first : first + rows], weight))
                assert part.tobytes() == together[first : first + rows].tobytes(), (rows, first)

    def test_zeros_and_what_is_no_number(self, kind, outputs, k):
        from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import linear_cpu_quantized

        weight, _ = _quantized(kind, outputs, k)
        x = np.zeros((4, k), np.float32)
        x[1, k - 1], x[2, k // 2], x[3] = np.nan, np.inf, 1e-36
        found = np.asarray(jax.jit(linear_cpu_quantized)(jnp.asarray(x), weight))
        np.testing.assert_array_equal(found[0], 0)
        assert np.isnan(found[1]).all() and not np.isfinite(found[2]).any()
        assert np.abs(found[3]).max() < 1e-30


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_several_forms_are_one_product(backend):
    parts = [_quantized("q4_k", 48, 64), _quantized("q6_k", 32, 64), _quantized("q6_k", 16, 64)]
    dense = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    weight = joined([part for part, _ in parts] + [jnp.asarray(dense)])
    assert isinstance(weight, JoinedWeight) and weight.shape == (112, 64)
    same = joined([part for part, _ in parts[1:]])
    assert isinstance(same, QuantizedWeight) and same.shape == (48, 64)
    x, _ = _arrays(4, 112, 64, "float32")
    expected = np.asarray(x).astype(np.float64) @ np.concatenate([values for _, values in parts] + [dense]).T
    found = np.asarray(_linear(x, weight, backend=backend))
    in_float32 = backend == "cpu_ffi" and not has_tile_registers()
    np.testing.assert_allclose(found, expected, atol=(2e-6 if in_float32 else 1e-2) * np.abs(expected).max())
    np.testing.assert_array_equal(np.asarray(_linear(x, same, backend=backend)), found[:, 48:96])


@needs_cpu_ffi
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expanded", ["float32", "bfloat16"])
def test_expansion_by_the_kernel_equals_that_by_xla(kind, expanded):
    from jaxserve.pallas_kernels.matmul.cpu_ffi_quantized import expand_cpu

    weight, _ = _quantized(kind, 67, 96, expanded=expanded)
    found, expected = (np.asarray(jax.jit(f)(weight).astype(jnp.float32)) for f in (expand_cpu, dequantize))
    step = 2.0**-8 if expanded == "bfloat16" else 3e-7
    np.testing.assert_allclose(found, expected, rtol=step, atol=step * 1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_kept_twice_takes_the_form_that_suits_the_rows(backend):
    weight, _ = _quantized("q4_1", 40, 64)
    other = jnp.ones((40, 64), jnp.bfloat16)  # so that it shows which one was taken
    both = DoubleWeight(weight, other)
    assert both.shape == (40, 64)
    for rows in (1, 4, 5, 40):
        x, _ = _arrays(rows, 40, 64, "float32")
        found = np.asarray(_linear(x, both, backend=backend))
        one = weight if backend == "cpu_ffi" and rows <= 4 else other
        np.testing.assert_array_equal(found, np.asarray(_linear(x, one, backend=backend)))
