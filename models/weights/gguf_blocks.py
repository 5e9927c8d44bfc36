"""Blocks of a GGUF file as the forms that products take (pallas_kernels/matmul/quantized.py). No jax.

Every value stays what it was: codes move, scales are unpacked, nothing is rounded. Layouts:
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Kind
from jaxserve.models.quantization import pack_nibbles


def _same(blocks: np.ndarray) -> np.ndarray:
    return blocks


def _from_q4_0(blocks: np.ndarray) -> np.ndarray:
    head = np.zeros((*blocks.shape[:-1], 2), np.uint8)
    head[..., 0] = 8  # value = d * (code - 8)
    return np.concatenate([blocks[..., :2], head, blocks[..., 2:]], axis=-1)


def _from_q5_0(blocks: np.ndarray) -> np.ndarray:
    """d, the fifth bits of 32 codes, 16 bytes of their low halves: value = d * (code - 16), as int8 codes."""
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    low = np.concatenate([blocks[..., 6:] & 15, blocks[..., 6:] >> 4], axis=-1)
    codes = (low | high << 4).astype(np.int8) - 16
    return np.concatenate([blocks[..., :2], codes.view(np.uint8)], axis=-1)


def _from_q4_k(blocks: np.ndarray) -> np.ndarray:
    """256 values: d, dmin, 8 scales and 8 offsets of 6 bits in 12 bytes, 128 bytes of codes."""
    d, dmin, packed = blocks[..., 0:2], blocks[..., 2:4], blocks[..., 4:16]
    first, second, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 2 & 48)], axis=-1)
    offsets = np.concatenate([second & 63, (rest >> 4) | (second >> 2 & 48)], axis=-1)
    chunks = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    codes = np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(*blocks.shape[:-1], 8, 32)
    heads = [_eight(d), _eight(dmin), scales[..., None], offsets[..., None]]
    return np.concatenate([*heads, pack_nibbles(codes)], axis=-1)


def _from_q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 values: 128 bytes of low halves, 64 of high pairs of bits, 16 int8 scales, d."""
    lead = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*lead, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low.reshape(*lead, 8, 32) | high.reshape(*lead, 8, 32) << 4).astype(np.int8) - 32
    factors = blocks[..., 192:208].reshape(*lead, 8, 2)
    return np.concatenate([_eight(blocks[..., 208:210]), factors, codes.view(np.uint8)], axis=-1)


def _eight(values: np.ndarray) -> np.ndarray:
    """[..., n] -> [..., 8, n]: the same for each block of 32 in one of 256."""
    return np.broadcast_to(values[..., None, :], (*values.shape[:-1], 8, values.shape[-1]))


# GGUF type -> (form, bytes of a block in the file, conversion of blocks [..., bytes])
_FORMS: dict[Kind, tuple[str, int, Callable[[np.ndarray], np.ndarray]]] = {
    Kind.Q8_0: ("q8_0", 34, _same),
    Kind.Q4_1: ("q4_1", 20, _same),
    Kind.Q4_0: ("q4_z", 18, _from_q4_0),
    Kind.Q5_0: ("q8_0", 22, _from_q5_0),
    Kind.Q4_K: ("q4_k", 144, _from_q4_k),
    Kind.Q6_K: ("q6_k", 210, _from_q6_k),
}
KEPT = tuple(_FORMS)


def form_of(kind: Kind) -> str | None:
    """The form that a type is kept in; None if it is not."""
    return _FORMS[kind][0] if kind in _FORMS else None


def kept_blocks(rows: np.ndarray, kind: Kind) -> np.ndarray:
    """uint8 [out, bytes per row] of the file -> [out, bytes per row] of form_of(kind)."""
    _, size, convert = _FORMS[kind]
    if convert is _same:
        return rows
    return convert(rows.reshape(rows.shape[0], -1, size)).reshape(rows.shape[0], -1)
