"""Pages as tests hold them: one numpy array of any page dtype, quantised in numpy where that is a code.

Codes and their scale lie in one array of bytes: the last axis has head_dim codes, then the 4 bytes of a float32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxserve.pallas_kernels.paged_attention.quantized_pages import QuantizedPages

FLOATS = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
CODES = {"int8": (np.dtype(np.int8), 127), "fp8": (np.dtype(ml_dtypes.float8_e4m3fn), 448)}


def unwritten(shape: tuple[int, ...], page_dtype: str) -> np.ndarray:
    """Pages [..., D] that nobody has written: NaN, of codes both the scales and (fp8) the codes."""
    if page_dtype in CODES:
        return np.full((*shape[:-1], shape[-1] + 4), 0xFF, np.uint8)
    return np.full(shape, np.nan, FLOATS[page_dtype])


def store(values: np.ndarray, page_dtype: str) -> np.ndarray:
    """float32 [..., D] as pages hold them."""
    if page_dtype not in CODES:
        return values.astype(FLOATS[page_dtype])
    dtype, largest = CODES[page_dtype]
    scales = np.abs(values).max(axis=-1, keepdims=True) * np.float32(1 / largest)
    scaled = values * (np.float32(1) / np.where(scales > 0, scales, np.float32(1)))
    codes = (np.rint(scaled) if page_dtype == "int8" else np.clip(scaled, -largest, largest)).astype(dtype)
    return np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], axis=-1)


def load(stored: np.ndarray, page_dtype: str) -> np.ndarray:
    """What `stored` stands for, float64."""
    if page_dtype not in CODES:
        return stored.astype(np.float64)
    codes, scales = _parts(stored, page_dtype)
    return codes.astype(np.float64) * scales.astype(np.float64)[..., None]


def to_device(stored: np.ndarray, page_dtype: str, head_dim: int) -> Any:
    """Stored pages as an engine has them, in new memory; head_dim: that of the backend, with its padding."""
    values, scales = _parts(stored, page_dtype) if page_dtype in CODES else (stored, None)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, head_dim - values.shape[-1])]
    values = jnp.array(np.pad(values, padding), copy=True)
    return values if scales is None else QuantizedPages(values, jnp.array(scales, copy=True))


def from_device(pages: Any, head_dim: int) -> np.ndarray:
    """The other way round; head_dim: without padding."""
    if not isinstance(pages, QuantizedPages):
        return np.asarray(pages)[..., :head_dim]
    codes = np.ascontiguousarray(np.asarray(pages.codes)[..., :head_dim])
    scales = np.asarray(pages.scales)[..., None]
    return np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], axis=-1)


def _parts(stored: np.ndarray, page_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = np.ascontiguousarray(stored[..., :-4]), np.ascontiguousarray(stored[..., -4:])
    return codes.view(CODES[page_dtype][0]), scales.view(np.float32)[..., 0]
