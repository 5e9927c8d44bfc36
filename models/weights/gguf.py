"""Tensors of a GGUF file, dequantised block by block with the `gguf` package. No jax."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from jaxserve.models.weights.gguf_blocks import form_of, kept_blocks
from jaxserve.models.weights.gguf_file import GGUFFile

_PLAIN = {GGMLQuantizationType.F32: np.dtype("<f4"), GGMLQuantizationType.F16: np.dtype("<f2")}
READABLE = (
    *_PLAIN,
    GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)  # fmt: skip
_CHUNK_VALUES = 1 << 20  # values expanded to float32 at a time by one thread


class GGUFTensors:
    """TensorFile of a GGUF file. Raises ValueError for a tensor whose type it cannot expand."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.path = file.path
        bad = {name: tensor.type.name for name, tensor in file.tensors.items() if tensor.type not in READABLE}
        if bad:
            name, kind = next(iter(bad.items()))
            raise ValueError(
                f"{file.path}: tensor {name!r} (and {len(bad) - 1} more) is stored as {kind}; "
                f"allowed: {', '.join(kind.name for kind in READABLE)}"
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.file.tensors.items()}

    def where(self, name: str) -> str:
        return str(self.path)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        tensor = self.file.tensors[name]
        stored = self.file.stored(name)
        if tensor.type in _PLAIN:
            values = stored.reshape(-1).view(_PLAIN[tensor.type]).reshape(tensor.shape)
            return np.array(values.astype(np.float32, copy=False), dtype)
        rows = stored.reshape(-1, stored.shape[-1])
        out = np.empty((rows.shape[0], tensor.shape[-1]), dtype)
        step = max(1, _CHUNK_VALUES // tensor.shape[-1])

        def expand(start: int) -> None:
            out[start : start + step] = gguf.dequantize(rows[start : start + step], tensor.type)

        starts = range(0, rows.shape[0], step)
        if len(starts) == 1:
            expand(0)
        else:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                list(pool.map(expand, starts))
        return out.reshape(tensor.shape)

    def stored(self, name: str) -> tuple[str, np.ndarray] | None:
        tensor = self.file.tensors[name]
        form = form_of(tensor.type)
        if form is None or len(tensor.shape) != 2:
            return None
        return form, kept_blocks(self.file.stored(name), tensor.type)
