"""Quantised weights as GPUs want them: codes in one array, scales and offsets in others.

The forms of quantized.py keep a block's scale beside its codes, which reads well on a CPU. Copies into a GPU's shared
memory want rows of a multiple of 16 bytes with nothing but codes in them. Weights are rearranged once, when loaded.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.matmul.quantized import (
    BLOCK,
    CODES_PER_WORD,
    PAD,
    ROW_KINDS,
    AnyWeight,
    DoubleWeight,
    JoinedWeight,
    PlanarWeight,
    QuantizedWeight,
    block_bytes,
    signed,
)

_FORMS = {
    "int8": "int8", "fp8": "fp8", "q8_0": "int8", "q6_k": "int8", "fp8_32": "fp8",
    "q4_1": "int4", "q4_z": "int4", "q4_k": "int4",
}  # fmt: skip


def planar(weight: QuantizedWeight) -> PlanarWeight:
    """The same values, rearranged on the host."""
    num_inputs = weight.shape[1]
    rows, kind = np.asarray(weight.codes), weight.kind
    form, offsets, group = _FORMS[kind], None, 0
    if kind in ROW_KINDS:
        codes, scales = rows[..., :num_inputs], np.ascontiguousarray(rows[..., num_inputs:]).view(np.float32)
    else:
        blocks = rows.reshape(*rows.shape[:-1], num_inputs // BLOCK, block_bytes(kind))
        codes, scales, offsets = _take_apart(blocks, kind)
        codes, scales = (x.reshape(*rows.shape[:-1], -1) for x in (codes, scales))
        group = num_inputs // scales.shape[-1]
    count = CODES_PER_WORD[form]
    codes = _padded(codes, PAD)
    split = codes.reshape(*codes.shape[:-1], -1, count, PAD // count).astype(np.uint16)
    words = sum(split[..., i, :] << (16 // count * i) for i in range(count))

    def by_group(values: np.ndarray) -> jax.Array:
        padded = _padded(values, PAD // group if group else 1)
        return jnp.asarray(np.ascontiguousarray(padded.swapaxes(-1, -2)))

    words = jnp.asarray(words.reshape(*codes.shape[:-1], -1))
    offsets = None if offsets is None else by_group(offsets)
    return PlanarWeight(words, by_group(scales), offsets, form, weight.shape, group)


def planar_parts(weight: AnyWeight) -> AnyWeight:
    """`weight`, its quantised parts rearranged."""
    if isinstance(weight, DoubleWeight):
        return DoubleWeight(planar_parts(weight.stored), weight.dense)
    if isinstance(weight, JoinedWeight):
        return JoinedWeight(tuple(planar_parts(part) for part in weight.parts))
    return planar(weight) if isinstance(weight, QuantizedWeight) else weight


def _padded(values: np.ndarray, multiple: int) -> np.ndarray:
    """[..., out, n] -> zeros behind, up to multiples of PAD and `multiple`."""
    num_outputs, count = values.shape[-2:]
    widths = [(0, 0)] * (values.ndim - 2) + [(0, -num_outputs % PAD), (0, -count % multiple)]
    return np.pad(values, widths) if any(after for _, after in widths) else values


def _take_apart(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """uint8 [..., blocks, bytes] -> codes uint8 [..., blocks, BLOCK], scales [..., blocks or halves of them], offsets.
    Products of the parts of a scale are exact in float32."""

    def half(at: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]

    def byte(at: int) -> np.ndarray:
        return blocks[..., at].astype(np.float32)

    if kind == "q8_0":
        return blocks[..., 2:], half(0), None
    if kind == "fp8_32":
        return blocks[..., 4:], np.ascontiguousarray(blocks[..., :4]).view(np.float32)[..., 0], None
    if kind == "q6_k":
        return blocks[..., 4:], half(0)[..., None] * blocks[..., 2:4].view(np.int8).astype(np.float32), None
    packed = blocks[..., block_bytes(kind) - BLOCK // 2 :]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    if kind == "q4_1":
        return codes, half(0), half(2)
    if kind == "q4_z":
        return codes, half(0).astype(np.float32), -half(0) * byte(2)
    return codes, half(0) * byte(4), -half(2) * byte(5)


def take_planar_rows(weight: PlanarWeight, rows: jax.Array) -> jax.Array:
    """Rows of a table [out, in] by index [T] -> [T, in] float32."""
    offsets = None if weight.offsets is None else weight.offsets[:, rows]
    shape = rows.shape[0], weight.shape[1]
    taken = dataclasses.replace(
        weight, codes=weight.codes[rows], scales=weight.scales[:, rows], offsets=offsets, shape=shape
    )
    return expand(taken)


def expand(weight: PlanarWeight) -> jax.Array:
    """[..., out, in] float32: the values that dequantize gives, to the bit."""
    before, count = weight.codes.shape[:-1], CODES_PER_WORD[weight.form]
    bits = 16 // count
    words = weight.codes.reshape(*before, -1, PAD // count)
    codes = jnp.stack([words >> (bits * i) & (2**bits - 1) for i in range(count)], axis=-2)
    values = codes.astype(jnp.float32) if bits == 4 else signed(codes.astype(jnp.uint8), weight.form)
    values = values.reshape(*before, weight.scales.shape[-2], -1)

    def by_output(values: jax.Array) -> jax.Array:
        return values.astype(jnp.float32).swapaxes(-1, -2)[..., None]

    values = values * by_output(weight.scales)
    if weight.offsets is not None:
        values += by_output(weight.offsets)
    return values.reshape(*before, -1)[..., : weight.shape[0], : weight.shape[1]]
