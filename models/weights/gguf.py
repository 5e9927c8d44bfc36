"""Tensors of a GGUF file, dequantised one at a time with the gguf package's own routines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


class GGUFWeights:
    """Implements weights.rules.WeightSource. Raises ValueError naming the file when it is not a whole GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        size = path.stat().st_size
        for tensor in self._tensors.values():
            if tensor.data_offset + tensor.n_bytes > size:
                raise ValueError(
                    f"{path}: tensor {tensor.name!r} ends at byte {tensor.data_offset + tensor.n_bytes}, "
                    f"the file at {size}: it is truncated"
                )
            if tensor.tensor_type.name not in SUPPORTED:
                raise ValueError(
                    f"{path}: tensor {tensor.name!r} has type {tensor.tensor_type.name}; known: {', '.join(SUPPORTED)}"
                )

    def fields(self) -> dict[str, Any]:
        """The metadata as Python values."""
        return {key: field.contents() for key, field in self._reader.fields.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        # GGUF lists the fastest axis first.
        return {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        shape = tuple(int(n) for n in tensor.shape[::-1])
        if tensor.tensor_type in _PLAIN:
            return np.asarray(tensor.data).reshape(shape)
        return dequantize(tensor.data, tensor.tensor_type).reshape(shape)

    def describe(self, name: str) -> str:
        return f"{self.path}: tensor {name!r}"


def open_gguf(path: Path) -> GGUFReader:
    """Raises ValueError naming the file when it is no GGUF file, or not a whole one."""
    try:
        return GGUFReader(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path}: not a whole GGUF file ({error})") from error
