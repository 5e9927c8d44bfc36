"""Tensors of a folder of safetensors files: one file, or shards with an index. No jax, no pickle.

Format: https://github.com/huggingface/safetensors#format. Reading a tensor needs memory for that
tensor alone, and a file that is too short is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxserve.models.special_tokens import read_json
from jaxserve.models.weights.buffers import read_array

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("<f8"),
}  # fmt: skip
_RAW = {
    "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(np.uint8),
}  # fmt: skip
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8,
          "U64": 8, "C64": 8} | {name: dtype.itemsize for name, dtype in _DTYPES.items()}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20


@dataclasses.dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file


class SafetensorsTensors:
    """TensorFile of a folder. Raises ValueError naming the file, and the tensor where there is one, for a missing
    shard, a broken index or header, or a file that ends early; and for a folder that has pickled weights only."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._entries = _read_entries(folder)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def where(self, name: str) -> str:
        entry = self._entries.get(name)
        return str(self.path if entry is None else entry.file)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        entry = self._entries[name]
        if dtype == np.uint8 and entry.dtype == "U8":
            return self.raw(name)
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; allowed: {', '.join(_DTYPES)}")
        return read_array(entry.file, entry.start, entry.shape, _DTYPES[entry.dtype], dtype)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's stored values; float8 as the bytes that they are."""
        entry = self._entries[name]
        if entry.dtype not in _RAW:
            raise ValueError(f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; allowed: {', '.join(_RAW)}")
        return read_array(entry.file, entry.start, entry.shape, _RAW[entry.dtype], _RAW[entry.dtype])

    def stored_dtype(self, name: str) -> str:
        """The format's name of a tensor's type, for instance "F8_E4M3"."""
        return self._entries[name].dtype

    def stored(self, name: str) -> None:
        return None


def _read_entries(folder: Path) -> dict[str, _Entry]:
    if (folder / INDEX).exists():
        return _read_sharded(folder)
    if (folder / SINGLE).exists():
        return _read_header(folder / SINGLE)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return _read_header(others[0])
    if others:
        raise ValueError(f"{folder}: {len(others)} safetensors files but no {INDEX} that says what they hold")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder}: only pickled weights ({pickled[0]}), which run code when they are read; "
            f"allowed: safetensors (convert them with the tools they came with)"
        )
    raise ValueError(f"{folder}: no weights; allowed: {SINGLE}, or shards with {INDEX}")


def _read_sharded(folder: Path) -> dict[str, _Entry]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map; allowed: an object from tensor names to file names")
    entries: dict[str, _Entry] = {}
    headers: dict[str, dict[str, _Entry]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{index}: tensor {name!r} lies in {shard!r}; allowed: a .safetensors file name")
        if shard not in headers:
            if not (folder / shard).is_file():
                raise ValueError(f"{folder / shard}: the shard is missing; {INDEX} says it holds {name!r}")
            headers[shard] = _read_header(folder / shard)
        if name not in headers[shard]:
            raise ValueError(f"{folder / shard}: tensor {name!r} is missing; {INDEX} says it is there")
        entries[name] = headers[shard][name]
    for shard, header in headers.items():
        unlisted = sorted(set(header) - set(weight_map))
        if unlisted:
            raise ValueError(f"{folder / shard}: tensor {unlisted[0]!r} is not listed in {INDEX}")
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: the file has {size} bytes and its header says {length}: it is truncated "
                             "or no safetensors file")  # fmt: skip
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a JSON {type(header).__name__}; allowed: an object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}


def _entry(path: Path, name: str, info: Any, base: int, size: int) -> _Entry:
    try:
        dtype, shape = info["dtype"], tuple(int(n) for n in info["shape"])
        start, end = (int(n) for n in info["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path}: the header's entry of tensor {name!r} is broken: {info!r}") from None
    num_bytes = math.prod(shape) * _SIZES.get(dtype, 0)
    if min(shape, default=0) < 0 or start < 0 or end < start or (dtype in _SIZES and end - start != num_bytes):
        raise ValueError(f"{path}: tensor {name!r} has {dtype} {list(shape)} but bytes {start} to {end} in the header")
    if base + end > size:
        raise ValueError(f"{path}: tensor {name!r} needs {base + end} bytes, but the file has {size}: it is truncated")
    return _Entry(path, dtype, shape, base + start)
