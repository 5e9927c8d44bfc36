"""Weights kept in a quantised form and multiplied as they are stored.

A row (one output) is a run of bytes:
    int8   K int8 codes, then one float32 scale                         value = scale * code
    q8_0   per 32 values: float16 d, 32 int8 codes (GGUF)               value = d * code
    q4_1   per 32 values: float16 d, float16 m, 16 bytes of two codes   value = d * code + m
           (GGUF: low halves are values 0 to 15 of the block, high halves 16 to 31)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 32  # values that share a scale in q8_0 and q4_1
KINDS = ("int8", "q8_0", "q4_1")
_BLOCK_BYTES = {"q8_0": 2 + BLOCK, "q4_1": 4 + BLOCK // 2}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as `codes` uint8 [out, bytes per row]; kind and shape are static.

    Raises ValueError naming the field, the value seen and the values allowed.
    """

    codes: jax.Array
    kind: str = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        row = row_bytes(self.kind, self.shape[1])
        # Transformations put other things than arrays in here.
        if hasattr(self.codes, "shape") and hasattr(self.codes, "dtype"):
            expected = (self.shape[0], row)
            if self.codes.shape[-2:] != expected or self.codes.dtype != jnp.uint8:
                raise ValueError(
                    f"codes: got {self.codes.dtype} {self.codes.shape}; allowed for {self.kind} "
                    f"{self.shape}: uint8 {expected}"
                )


def row_bytes(kind: str, num_inputs: int) -> int:
    """Bytes of one row of `num_inputs` values. Raises ValueError for an unknown kind or a broken block."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; allowed: {', '.join(KINDS)}")
    if kind == "int8":
        return num_inputs + 4
    if num_inputs % BLOCK:
        raise ValueError(f"shape: got {num_inputs} inputs; allowed for {kind}: a multiple of {BLOCK}")
    return num_inputs // BLOCK * _BLOCK_BYTES[kind]


def quantize_int8(weight: np.ndarray) -> QuantizedWeight:
    """float [out, in] -> int8 with one scale per output: error at most half a scale, max|row| / 254."""
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    codes = np.rint(weight / np.where(scale > 0, scale, 1)).astype(np.int8)
    row = np.concatenate([codes.view(np.uint8), scale.astype(np.float32).view(np.uint8)], axis=1)
    return QuantizedWeight(jnp.asarray(row), "int8", (weight.shape[0], weight.shape[1]))


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """[out, in] float32."""
    codes, (num_outputs, num_inputs) = weight.codes, weight.shape
    if weight.kind == "int8":
        scale = lax.bitcast_convert_type(codes[:, num_inputs:].reshape(num_outputs, 1, 4), jnp.float32)
        return lax.bitcast_convert_type(codes[:, :num_inputs], jnp.int8).astype(jnp.float32) * scale
    blocks = codes.reshape(num_outputs, num_inputs // BLOCK, _BLOCK_BYTES[weight.kind])

    def half(start: int) -> jax.Array:  # [out, blocks, 1] float32
        bits = lax.bitcast_convert_type(blocks[:, :, start : start + 2], jnp.float16)
        return bits[:, :, None].astype(jnp.float32)

    if weight.kind == "q8_0":
        values = half(0) * lax.bitcast_convert_type(blocks[:, :, 2:], jnp.int8).astype(jnp.float32)
    else:
        packed = blocks[:, :, 4:]
        nibbles = jnp.concatenate([packed & 15, packed >> 4], axis=2).astype(jnp.float32)
        values = half(0) * nibbles + half(2)
    return values.reshape(num_outputs, num_inputs)
