"""Making quantised weights while a checkpoint is loaded, and what published files call theirs. No jax.

Weights alone are quantised. Forms are those of pallas_kernels/matmul/quantized.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ONLINE = ("int8", "int4", "fp8")
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FP8_MAX = 448.0
BLOCK_BYTES = {"q8_0": 34, "q4_1": 20, "q4_z": 20, "q4_k": 22, "q6_k": 36, "fp8_32": 36}  # of 32 values
_BLOCK = 32


def quantize(values: np.ndarray, method: str) -> tuple[str, np.ndarray] | None:
    """float32 [..., out, in] -> (form, codes uint8 [..., out, bytes per row]); None where the form has no room for such
    a matrix (int4: inputs that are no multiple of 32).

    int8   one scale per output, max|row| / 127, rounded to nearest
    int4   per 32 values scale (max - min) / 15 and offset min in float16, codes nearest to those rounded values
    fp8    one scale per output, max|row| / 448, rounded to nearest float8_e4m3fn
    """
    if method == "int8":
        scale = _row_scale(values, 127)
        codes = np.rint(values / scale).astype(np.int8)
        return "int8", _with_scale(codes.view(np.uint8), scale)
    if method == "fp8":
        scale = _row_scale(values, _FP8_MAX)
        codes = np.clip(values / scale, -_FP8_MAX, _FP8_MAX).astype(_FP8)
        return "fp8", _with_scale(codes.view(np.uint8), scale)
    if method == "int4":
        return None if values.shape[-1] % _BLOCK else ("q4_1", _quantize_int4(values))
    raise ValueError(f"quantization: got {method!r}; allowed: {', '.join(ONLINE)}")


def _row_scale(values: np.ndarray, largest: float) -> np.ndarray:
    scale = (np.abs(values).max(axis=-1, keepdims=True) / largest).astype(np.float32)
    return np.where(scale > 0, scale, np.float32(1))


def _with_scale(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.concatenate([codes, np.ascontiguousarray(scale).view(np.uint8)], axis=-1)


def _quantize_int4(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(*values.shape[:-1], -1, _BLOCK)
    low = blocks.min(axis=-1, keepdims=True).astype(np.float16)
    step = ((blocks.max(axis=-1, keepdims=True) - low.astype(np.float32)) / 15).astype(np.float16)
    wide = step.astype(np.float32)
    codes = np.rint((blocks - low.astype(np.float32)) / np.where(wide > 0, wide, 1)).clip(0, 15).astype(np.uint8)
    packed = pack_nibbles(codes)
    return np.concatenate([step.view(np.uint8), low.view(np.uint8), packed], axis=-1).reshape(*values.shape[:-1], -1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [..., 32] below 16 -> [..., 16]: values 0 to 15 in the low halves, 16 to 31 in the high ones."""
    return codes[..., : _BLOCK // 2] | codes[..., _BLOCK // 2 :] << 4


def dequantize_numpy(codes: np.ndarray, kind: str) -> np.ndarray:
    """float32 [out, in] of codes uint8 [out, bytes per row] in a form of pallas_kernels/matmul/quantized.py."""
    if kind in ("int8", "fp8"):
        scale = np.ascontiguousarray(codes[:, -4:]).view(np.float32)
        return codes[:, :-4].view(np.int8 if kind == "int8" else _FP8).astype(np.float32) * scale
    blocks = codes.reshape(codes.shape[0], -1, BLOCK_BYTES[kind])

    def half(at: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)

    def byte(at: int) -> np.ndarray:
        return blocks[..., at : at + 1].astype(np.float32)

    def nibbles(at: int) -> np.ndarray:
        return np.concatenate([blocks[..., at:] & 15, blocks[..., at:] >> 4], axis=-1).astype(np.float32)

    if kind == "q8_0":
        values = half(0) * blocks[..., 2:].view(np.int8)
    elif kind == "q4_1":
        values = half(0) * nibbles(4) + half(2)
    elif kind == "q4_z":
        values = half(0) * (nibbles(4) - byte(2))
    elif kind == "q4_k":
        values = half(0) * byte(4) * nibbles(6) - half(2) * byte(5)
    elif kind == "q6_k":
        factors = half(0) * blocks[..., 2:4].view(np.int8).astype(np.float32)
        values = np.repeat(factors, _BLOCK // 2, axis=-1) * blocks[..., 4:].view(np.int8)
    else:
        values = blocks[..., 4:].view(_FP8).astype(np.float32) * np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    return values.reshape(codes.shape[0], -1)


def zero_point_blocks(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Form q4_z of values scales * (codes - zeros): codes uint8 [out, in] below 16, zeros uint8 and scales float16
    [out, in / 32]."""
    num_outputs, num_inputs = codes.shape
    packed = pack_nibbles(codes.reshape(num_outputs, num_inputs // _BLOCK, _BLOCK))
    head = [as_bytes(scales.astype(np.float16)), zeros[..., None], np.zeros((*zeros.shape, 1), np.uint8)]
    return np.concatenate([*head, packed], axis=-1).reshape(num_outputs, -1)


def fp8_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Form fp8_32: codes uint8 [out, in] of float8_e4m3fn, scales float32 [out, in / 32]."""
    num_outputs, num_inputs = codes.shape
    blocks = codes.reshape(num_outputs, num_inputs // _BLOCK, _BLOCK)
    return np.concatenate([as_bytes(scales.astype(np.float32)), blocks], axis=-1).reshape(num_outputs, -1)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """[...] -> uint8 [..., bytes of an element]."""
    return np.ascontiguousarray(array)[..., None].view(np.uint8)


def published_method(content: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]] | None:
    """(method, its settings) of config.json's quantization_config; None for unquantised weights. Raises ValueError
    naming the file for a method that is not read here."""
    settings = content.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: quantization_config: got {settings!r}; allowed: an object")
    method = settings.get("quant_method")
    if method not in ("fp8", "awq", "gptq", "mxfp4"):
        raise ValueError(f"{path}: quantization_config: got {method!r}; allowed: fp8, awq, gptq, mxfp4, or GGUF files")
    return method, settings
