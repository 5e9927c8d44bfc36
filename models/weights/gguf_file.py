"""The header of a GGUF file: metadata and where each tensor's bytes lie. No jax.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package reads the same header an
element at a time (17 s for a vocabulary of 262,144 tokens); here arrays are read in one pass each (0.2 s).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"), 5: ("i", "<i4"),
    6: ("f", "<f4"), 7: ("?", "u1"), 10: ("Q", "<u8"), 11: ("q", "<i8"), 12: ("d", "<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    shape    of the values, slowest axis first ([out, in] for a weight)
    type     how values are stored; blocks run along the last axis
    start    first byte in the file; num_bytes behind it belong to the tensor
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file. Tensor bytes are mapped, never copied.

    metadata   key -> bool, int, float, str, list[str] or a numpy array
    tensors    name -> GGUFTensor, in the order of the file

    Raises ValueError naming the file (and the tensor) when the header is broken, a tensor's type is unknown or the
    file ends before its last tensor does.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            if not file.read(1):
                raise ValueError(f"{self.path}: the file is empty; allowed: a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._map, self.path)
        try:
            self.metadata, self.tensors = _read_header(cursor)
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{self.path}: the header is broken near byte {cursor.at} ({error})") from None
        for tensor in self.tensors.values():
            if tensor.start + tensor.num_bytes > len(self._map):
                raise ValueError(
                    f"{self.path}: tensor {tensor.name!r} needs bytes {tensor.start} to "
                    f"{tensor.start + tensor.num_bytes}, but the file has {len(self._map)}: it is truncated"
                )

    @property
    def architecture(self) -> str:
        """general.architecture; ValueError when it is missing."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ValueError(f"{self.path}: the metadata has no general.architecture")
        return name

    def stored(self, name: str) -> np.ndarray:
        """The tensor's bytes as they are stored: uint8 [..., bytes per row], read-only."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.start)
        return flat.reshape(*tensor.shape[:-1], -1)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes < 0 or self.at + num_bytes > len(self.data):
            raise ValueError(f"{self.path}: the header ends at byte {len(self.data)}: the file is truncated")
        start = self.at
        self.at += num_bytes
        return self.data[start : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        # The loop of a large vocabulary: everything looked up once.
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        size, out = len(data), []
        for _ in range(count):
            if at + 8 > size:
                raise ValueError(f"{self.path}: the header ends at byte {size}: the file is truncated")
            (length,) = unpack(data, at)
            end = at + 8 + length
            if end > size:
                raise ValueError(f"{self.path}: the header ends at byte {size}: the file is truncated")
            out.append(data[at + 8 : end].decode("utf-8", "surrogateescape"))
            at = end
        self.at = at
        return out

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind][0])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"{self.path}: metadata of type {kind} near byte {self.at}; allowed: 0 to 12")
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            dtype = np.dtype(_SCALARS[element][1])
            array = np.frombuffer(self.take(count * dtype.itemsize), dtype)
            return array.astype(bool) if element == _BOOL else array
        if element == _STRING:
            return self.strings(count)
        if count > len(self.data):
            raise ValueError(f"{self.path}: an array of {count} values near byte {self.at} is past the file's end")
        return [self.value(element) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise ValueError(f"{cursor.path}: the file starts with {magic!r}; allowed: {_MAGIC!r} (a GGUF file)")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"{cursor.path}: GGUF version {version}; allowed: 2, 3 (little endian)")
    num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{cursor.path}: general.alignment is {alignment!r}; allowed: 1 or more")
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"{cursor.path}: tensor {name!r} is listed twice")
        num_bytes = _tensor_bytes(cursor.path, name, shape, kind)
        tensors[name] = GGUFTensor(name, shape, kind, base + offset, num_bytes)
    return metadata, tensors


def write_metadata(source: Path, target: Path) -> None:
    """A GGUF file with the metadata of another and without tensors."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, source)
        magic, version = cursor.take(4), cursor.scalar("I")
        _, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        start = cursor.at
        for _ in range(num_pairs):
            cursor.string()
            cursor.value(cursor.scalar("I"))
        target.write_bytes(magic + struct.pack("<IQQ", version, 0, num_pairs) + data[start : cursor.at])


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    length = cursor.scalar("Q")
    if length > _MAX_NAME_BYTES:
        raise ValueError(f"{cursor.path}: a tensor name of {length} bytes near byte {cursor.at}")
    name = cursor.take(length).decode("utf-8")
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions; allowed: 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    code, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise ValueError(f"{cursor.path}: tensor {name!r} has the unknown type {code}") from None
    return name, shape, kind, offset


def _tensor_bytes(path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"{path}: tensor {name!r} of type {kind.name} has rows of {shape[-1]} values; "
                         f"allowed: a multiple of {block}")  # fmt: skip
    return math.prod(shape) // block * block_bytes
