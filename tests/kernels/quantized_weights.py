"""Random quantised weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxserve.models.quantization import dequantize_numpy, fp8_blocks, quantize, zero_point_blocks
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight, block_bytes


def random_weight(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[QuantizedWeight, np.ndarray]:
    """(weight, its values in float64)."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    values = rng.standard_normal(shape).astype(np.float32)
    blocks = columns // 32
    if kind in ("int8", "fp8", "q4_1"):
        found, codes = quantize(values, {"q4_1": "int4"}.get(kind, kind))
        assert found == kind
    elif kind == "fp8_32":
        _, whole = quantize(values, "fp8")
        codes = fp8_blocks(whole[:, :columns], rng.uniform(0.5, 2, (rows, blocks)).astype(np.float32))
    elif kind == "q4_z":
        zeros, scales = rng.integers(0, 16, (rows, blocks), np.uint8), rng.uniform(0.5, 2, (rows, blocks))
        codes = zero_point_blocks(rng.integers(0, 16, shape, np.uint8), zeros, scales)
    else:  # q8_0, q4_k and q6_k: any bytes, with halves that are no NaN
        codes = rng.integers(0, 256, (rows, blocks, block_bytes(kind)), np.uint8)
        for at in (0, 2) if kind == "q4_k" else (0,):
            half = rng.uniform(0.5, 2, (rows, blocks, 1)).astype(np.float16)
            codes[..., at : at + 2] = half.view(np.uint8)
        codes = codes.reshape(rows, -1)
    return QuantizedWeight(jnp.asarray(codes), kind, shape), dequantize_numpy(codes, kind).astype(np.float64)
