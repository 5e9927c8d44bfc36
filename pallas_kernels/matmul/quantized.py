"""Weights kept in a quantised form and multiplied as they are stored.

A row (one output) is a run of bytes, either all values and then one scale, or blocks of 32 values with their own:
    int8     K int8 codes, then one float32 scale                        value = scale * code
    fp8      K float8_e4m3fn codes, then one float32 scale               value = scale * code
    q8_0     float16 d, 32 int8 codes (GGUF)                             value = d * code
    q4_1     float16 d, float16 m, 32 codes of 4 bits (GGUF)             value = d * code + m
    q4_z     float16 d, uint8 z, one byte unused, 32 codes of 4 bits     value = d * (code - z)
    q4_k     float16 d, float16 e, uint8 a, uint8 b, 32 codes of 4 bits  value = d * a * code - e * b
    q6_k     float16 d, int8 a, int8 b, 32 int8 codes                    value = d * a * code (b: of the last 16)
    fp8_32   float32 scale, 32 float8_e4m3fn codes                       value = scale * code
Codes of 4 bits lie as in GGUF: 16 bytes, their low halves are values 0 to 15 of the block, the high halves 16 to 31.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

BLOCK = 32  # values that share a scale
_ROW_TAIL = 4  # bytes of the one scale of a row in the forms without blocks
_BLOCK_BYTES = {
    "q8_0": 2 + BLOCK, "q4_1": 4 + BLOCK // 2, "q4_z": 4 + BLOCK // 2, "q4_k": 6 + BLOCK // 2, "q6_k": 4 + BLOCK,
    "fp8_32": 4 + BLOCK,
}  # fmt: skip
ROW_KINDS = ("int8", "fp8")
KINDS = (*ROW_KINDS, *_BLOCK_BYTES)
EXPANDED = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as `codes` uint8 [out, bytes per row]; the rest is static. Split over a mesh, codes is the
    global array and shape that of one device's part, as a function under shard_map sees it.

    expanded   what it is expanded to where a product cannot take it as it is: "bfloat16" or "float32"

    Raises ValueError naming the field, the value seen and the values allowed.
    """

    codes: jax.Array
    kind: str = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    expanded: str = dataclasses.field(default="bfloat16", metadata={"static": True})

    def __post_init__(self) -> None:
        row = row_bytes(self.kind, self.shape[1])
        if self.expanded not in EXPANDED:
            raise ValueError(f"expanded: got {self.expanded!r}; allowed: {', '.join(EXPANDED)}")
        # Transformations put other things than arrays in here.
        if hasattr(self.codes, "shape") and hasattr(self.codes, "dtype"):
            expected, found = (self.shape[0], row), _shape_on_device(self.codes)
            if found[-2:] != expected or self.codes.dtype != jnp.uint8:
                raise ValueError(
                    f"codes: got {self.codes.dtype} {found}; allowed for {self.kind} {self.shape}: uint8 {expected}"
                )


def _shape_on_device(array: jax.Array) -> tuple[int, ...]:
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.shard_shape(array.shape)
    return array.shape


PAD = 128  # inputs and outputs of a PlanarWeight are padded to multiples of it
# Codes of PAD inputs lie in words of 16 bits, so that a GPU can take one out of each half of a register at once: of 8
# bits, word j has inputs j and 64 + j, of 4 bits inputs j, 32 + j, 64 + j and 96 + j, the first in the lowest bits.
CODES_PER_WORD = {"int8": 2, "fp8": 2, "int4": 4}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanarWeight:
    """A weight [out, in], or a stack of them with one more axis in front; a value is scale * code + offset. For
    GPUs; made by planar.py.

    codes    uint16 [..., N, K / CODES_PER_WORD]
    scales   float32 or float16 [..., K / group, N]
    offsets  as scales, or None
    form     what codes are: "int8", "fp8" (float8_e4m3fn) or "int4" (0 to 15)
    shape    (out, in); N and K are multiples of PAD, what lies behind is zero
    group    inputs that share a scale: 16, 32, or 0 for all of them (scales [..., 1, N])
    """

    codes: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    form: str = dataclasses.field(metadata={"static": True})
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedWeight:
    """Weights that share their input, one below the other, each in a form of its own (never empty)."""

    parts: tuple[QuantizedWeight | PlanarWeight | jax.Array, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DoubleWeight:
    """One weight twice: in its blocks, which few rows are multiplied with, and expanded for many rows."""

    stored: QuantizedWeight | PlanarWeight | JoinedWeight
    dense: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape


AnyWeight = jax.Array | QuantizedWeight | PlanarWeight | JoinedWeight | DoubleWeight


def block_bytes(kind: str) -> int:
    """Bytes of BLOCK values of one row, without the scale of forms that have one per row."""
    return BLOCK if kind in ROW_KINDS else _BLOCK_BYTES[kind]


def tail_bytes(kind: str) -> int:
    """Bytes behind the last block of a row."""
    return _ROW_TAIL if kind in ROW_KINDS else 0


def row_bytes(kind: str, num_inputs: int) -> int:
    """Bytes of one row of `num_inputs` values. Raises ValueError for an unknown kind or a broken block."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; allowed: {', '.join(KINDS)}")
    if kind in ROW_KINDS:
        return num_inputs + _ROW_TAIL
    if num_inputs % BLOCK:
        raise ValueError(f"shape: got {num_inputs} inputs; allowed for {kind}: a multiple of {BLOCK}")
    return num_inputs // BLOCK * _BLOCK_BYTES[kind]


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """[out, in] float32."""
    codes, (num_outputs, num_inputs) = weight.codes, weight.shape
    if weight.kind in ROW_KINDS:
        scale = lax.bitcast_convert_type(codes[:, num_inputs:].reshape(num_outputs, 1, 4), jnp.float32)
        return signed(codes[:, :num_inputs], weight.kind) * scale
    blocks = codes.reshape(num_outputs, num_inputs // BLOCK, _BLOCK_BYTES[weight.kind])
    return _expand_blocks(blocks, weight.kind).reshape(num_outputs, num_inputs)


def _expand_blocks(blocks: jax.Array, kind: str) -> jax.Array:
    """uint8 [..., bytes] -> float32 [..., BLOCK]."""

    def half(start: int) -> jax.Array:  # [..., 1] float32
        bits = lax.bitcast_convert_type(blocks[..., start : start + 2], jnp.float16)
        return bits[..., None].astype(jnp.float32)

    def byte(at: int, dtype: jnp.dtype = jnp.uint8) -> jax.Array:  # [..., 1] float32
        return lax.bitcast_convert_type(blocks[..., at : at + 1], dtype).astype(jnp.float32)

    def nibbles(start: int) -> jax.Array:
        packed = blocks[..., start:]
        return jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.float32)

    if kind == "q8_0":
        return half(0) * signed(blocks[..., 2:], "int8")
    if kind == "q4_1":
        return half(0) * nibbles(4) + half(2)
    if kind == "q4_z":
        return half(0) * (nibbles(4) - byte(2))
    if kind == "q4_k":
        return half(0) * byte(4) * nibbles(6) - half(2) * byte(5)
    if kind == "q6_k":
        factors = jnp.concatenate([byte(2, jnp.int8), byte(3, jnp.int8)], axis=-1)
        return jnp.repeat(half(0) * factors, BLOCK // 2, axis=-1) * signed(blocks[..., 4:], "int8")
    scale = lax.bitcast_convert_type(blocks[..., :4], jnp.float32)[..., None]
    return signed(blocks[..., 4:], "fp8") * scale


def signed(codes: jax.Array, kind: str) -> jax.Array:
    """uint8 codes of int8 or float8_e4m3fn as float32."""
    if kind == "int8":
        return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    # As a float16 with three bits of the exponent missing: exact for every code but NaN.
    wide = codes.astype(jnp.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * FP8_SCALE


FP8_SCALE = 256.0  # a float8_e4m3fn whose bits are read as those of a float16 is so much too small


def joined(
    parts: Sequence[QuantizedWeight | jax.Array], place: Callable[[np.ndarray], Any] = jnp.asarray
) -> QuantizedWeight | JoinedWeight:
    """Weights that share their input as one: one array, put by `place`, where their forms agree."""
    first = parts[0]
    if all(isinstance(part, QuantizedWeight) and part.kind == first.kind for part in parts):
        rows = sum(part.shape[0] for part in parts)
        codes = np.concatenate([np.asarray(part.codes) for part in parts]) if len(parts) > 1 else first.codes
        return dataclasses.replace(first, codes=place(codes), shape=(rows, first.shape[1]))
    return JoinedWeight(tuple(parts))


def quantize_int8(weight: np.ndarray) -> QuantizedWeight:
    """float [out, in] -> int8 with one scale per output: error at most half a scale, max|row| / 254."""
    weight = np.asarray(weight, np.float32)
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    codes = np.rint(weight / np.where(scale > 0, scale, 1)).astype(np.int8)
    row = np.concatenate([codes.view(np.uint8), scale.astype(np.float32).view(np.uint8)], axis=1)
    return QuantizedWeight(jnp.asarray(row), "int8", (weight.shape[0], weight.shape[1]))
