"""MXFP4: blocks of 32 four-bit floats that share a power of two (OCP Microscaling Formats, version 1.0). No jax."""

from __future__ import annotations

import numpy as np

BLOCK = 32  # values that share a scale
# Codes 0 to 7 of e2m1, then their negatives.
_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_VALUES, -_VALUES])
_BIAS = 127


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """blocks uint8 [..., n, 16] (the low half of a byte first), scales uint8 [..., n] -> [..., 32 n] of `dtype`.

    float32 and bfloat16 hold every value of scales from 2**-125 to 2**125 exactly. Raises ValueError when the
    shapes do not fit.
    """
    if blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(f"mxfp4: got blocks {blocks.shape} and scales {scales.shape}; allowed: [..., n, 16], [..., n]")
    out = np.empty((*scales.shape, BLOCK), dtype)
    # One leading index at a time: values are expanded in float32 first.
    for at in np.ndindex(scales.shape[:1] if scales.ndim > 1 else ()):
        codes = np.stack([blocks[at] & 15, blocks[at] >> 4], axis=-1).reshape(*scales[at].shape, BLOCK)
        out[at] = np.ldexp(_VALUES[codes], scales[at].astype(np.int32)[..., None] - _BIAS)
    return out.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)
