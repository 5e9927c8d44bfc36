"""What a checkpoint's tensors look like to the loader, whatever the file format. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np


class TensorFile(Protocol):
    """The tensors of one checkpoint.

    path     the file or folder, for messages
    shapes   name -> shape, slowest axis first ([out, in] for a weight); known without reading any values
    """

    path: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        ...

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A fresh array of the tensor's values, rounded once to `dtype` (float32 or bfloat16); of a tensor of bytes,
        as they are (uint8)."""
        ...

    def stored(self, name: str) -> tuple[str, np.ndarray] | None:
        """(kind, codes uint8 [out, bytes per row]) of a tensor stored in blocks that products can use as they
        are (`pallas_kernels/matmul/quantized.py`: KINDS); None for every other tensor."""
        ...
