"""Every backend of grouped products against a float64 oracle."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cpu_marks import needs_cpu_ffi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxserve.pallas_kernels.grouped_matmul import xla
from jaxserve.pallas_kernels.grouped_matmul.api import grouped_matmul
from jaxserve.pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight, dequantize, row_bytes

FORMS = {
    "reference": grouped_matmul_reference,
    "xla": functools.partial(grouped_matmul, backend="xla"),
    "ragged_dot": xla._ragged_dot,  # what platforms other than the CPU take
    "cpu_ffi": functools.partial(grouped_matmul, backend="cpu_ffi"),
}
NAMES = ["reference", "xla", "ragged_dot", pytest.param("cpu_ffi", marks=needs_cpu_ffi)]
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
COMPILED = {name: jax.jit(form) for name, form in FORMS.items()}


def make(sizes: list[int], spare: int, shape: tuple[int, int], dtype: str, seed: int = 0) -> tuple[np.ndarray, ...]:
    """x [sum(sizes) + spare, K] (rows behind the last group hold NaN), w [E, N, K], group_sizes [E]."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((sum(sizes) + spare, shape[1])).astype(np.float32)
    x[sum(sizes) :] = np.nan
    w = random.standard_normal((len(sizes), *shape)).astype(DTYPES[dtype])
    return x, w, np.asarray(sizes, np.int32)


def oracle(x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    rounded = x.astype(w.dtype).astype(np.float64)
    out, first = np.zeros((x.shape[0], w.shape[1])), 0
    for size, matrix in zip(sizes, w):
        out[first : first + size] = rounded[first : first + size] @ matrix.astype(np.float64).T
        first += size
    return out


@pytest.mark.parametrize("name", NAMES)
# Each drawn shape is one XLA compilation, hence few examples from few shapes.
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 5, 9, 40]), min_size=1, max_size=5),
    spare=st.sampled_from([0, 3]),
    dtype=st.sampled_from(list(DTYPES)),
    columns=st.sampled_from([32, 64, 48]),
    seed=st.integers(0, 99),
)
def test_any_sizes(name: str, sizes: list[int], spare: int, dtype: str, columns: int, seed: int) -> None:
    x, w, group_sizes = make(sizes, spare or int(not sum(sizes)), (24, columns), dtype, seed)
    out = np.asarray(COMPILED[name](x, w, group_sizes))
    np.testing.assert_allclose(out, oracle(x, w, group_sizes), rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["xla", pytest.param("cpu_ffi", marks=needs_cpu_ffi)])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """Bit for bit the same alone with its expert, in a full group, and beside many others."""
    x, w, _ = make([0, 33, 0], 0, (16, 64), "bfloat16")
    alone = np.asarray(COMPILED[name](x[:1], w, np.int32([0, 1, 0])))
    for before, group, after in ((0, 2, 0), (5, 33, 0), (0, 33, 60), (1, 9, 4)):
        rows = np.concatenate([np.ones((before, 64), np.float32), x[:group], np.ones((after, 64), np.float32)])
        out = np.asarray(COMPILED[name](rows, w, np.int32([before, group, after])))
        assert out[before].tobytes() == alone[0].tobytes(), (before, group, after)


def test_the_stack_is_not_copied() -> None:
    """XLA:CPU likes to widen bfloat16 stacks in front of the loop that takes one matrix at a time."""
    arguments = [jax.ShapeDtypeStruct((8, 256), "float32"), jax.ShapeDtypeStruct((16, 256, 256), "bfloat16")]
    compiled = COMPILED["xla"].lower(*arguments, jax.ShapeDtypeStruct((16,), "int32")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 256 * 256 * 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_take_ragged_dot(platform: str) -> None:
    """Lowered for a device that is not here."""
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in (
        ((8, 64), "float32"), ((4, 32, 64), "bfloat16"), ((4,), "int32"))]  # fmt: skip
    text = jax.export.export(COMPILED["xla"], platforms=[platform])(*arguments).mlir_module()
    assert "ragged_dot" in text and "while" not in text


@pytest.mark.parametrize("backend", ["xla", pytest.param("cpu_ffi", marks=needs_cpu_ffi)])
@pytest.mark.parametrize("kind", ["int8", "q4_1", "fp8_32"])  # how each form is read is tested with `linear`
def test_quantised_experts(backend: str, kind: str) -> None:
    x, _, sizes = make([3, 0, 7], 2, (24, 64), "float32")
    # Any bytes are a valid block but for scales that would be infinite or NaN: keep those bytes small.
    codes = np.random.default_rng(1).integers(0, 60, (3, 24, row_bytes(kind, 64)), dtype=np.uint8)
    stack = QuantizedWeight(jnp.asarray(codes), kind, (24, 64), "float32")
    out = np.asarray(grouped_matmul(jnp.asarray(x), stack, jnp.asarray(sizes), backend=backend))
    values = np.stack([np.asarray(dequantize(dataclasses.replace(stack, codes=jnp.asarray(one)))) for one in codes])
    expected = oracle(x, values, sizes)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_wrong_arguments_are_named() -> None:
    x, w, sizes = (jnp.asarray(part) for part in make([2, 1], 0, (16, 64), "float32"))
    with pytest.raises(ValueError, match=r"matmul backend: got 'cuda'"):
        grouped_matmul(x, w, sizes, backend="cuda")
    with pytest.raises(ValueError, match=r"got x \(3, 32\), w \(2, 16, 64\), group_sizes \(2,\)"):
        grouped_matmul(x[:, :32], w, sizes, backend="xla")
    with pytest.raises(ValueError, match=r"group_sizes \(1,\)"):
        grouped_matmul(x, w, sizes[:1], backend="xla")
    with pytest.raises(ValueError, match="w: got dtype float16"):
        grouped_matmul(x, w.astype(jnp.float16), sizes, backend="xla")
