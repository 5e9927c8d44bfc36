"""Dense products of every backend against float64."""

from __future__ import annotations

import functools
import threading

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve.pallas_kernels.backend import cpu_ffi_available
from jaxserve.pallas_kernels.matmul.api import linear
from jaxserve.pallas_kernels.matmul.quantized import KINDS, QuantizedWeight, quantize_int8

BACKENDS = [
    "xla",
    pytest.param("cpu_ffi", marks=pytest.mark.skipif(not cpu_ffi_available()[0], reason=cpu_ffi_available()[1] or "-")),
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


@pytest.mark.skipif(not cpu_ffi_available()[0], reason=cpu_ffi_available()[1] or "-")
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


def _quantized(kind: str, outputs: int, k: int) -> tuple[QuantizedWeight, np.ndarray]:
    """(a random weight, its values in float64 by the gguf package or by the definition)."""
    rng = np.random.default_rng(outputs)
    values = rng.standard_normal((outputs, k), np.float32)
    if kind == "int8":
        weight = quantize_int8(values)
        rows = np.asarray(weight.codes)
        scale = np.ascontiguousarray(rows[:, k:]).view(np.float32).astype(np.float64)
        assert np.abs(rows[:, :k].view(np.int8) * scale - values).max() <= scale.max() * 0.5001
        return weight, rows[:, :k].view(np.int8) * scale
    form = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}[kind]
    codes = gguf.quants.quantize(values, form)
    weight = QuantizedWeight(jnp.asarray(codes), kind, (outputs, k))
    return weight, gguf.quants.dequantize(codes, form).astype(np.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
class TestQuantizedWeights:
    @pytest.mark.parametrize("rows", [1, 3, 7, 20, 70])
    @pytest.mark.parametrize(("outputs", "k"), [(192, 576), (67, 64)])
    def test_close_to_float64(self, backend, kind, rows, outputs, k):
        weight, values = _quantized(kind, outputs, k)
        x, _ = _arrays(rows, outputs, k, "float32")
        out = np.asarray(_linear(x, weight, backend=backend))
        expected = np.asarray(x).astype(np.float64) @ values.T
        # Expanding to bfloat16 rounds x and w; the kernel for few rows rounds neither.
        tolerance = 2e-6 if backend == "cpu_ffi" and rows <= 20 else 1e-2
        assert np.abs(out - expected).max() <= tolerance * max(np.abs(expected).max(), 1.0)

    def test_wrong_codes_are_refused(self, backend, kind):
        weight, _ = _quantized(kind, 4, 64)
        with pytest.raises(ValueError, match=r"codes: got uint8 \(3, "):
            QuantizedWeight(weight.codes[:3], kind, weight.shape)
        with pytest.raises(ValueError, match="kind: got 'q2_k'; allowed: int8, q8_0, q4_1"):
            QuantizedWeight(weight.codes, "q2_k", weight.shape)
