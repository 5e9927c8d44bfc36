"""A file whose tensors are known by other names than it gives them. No jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from jaxserve.models.weights.tensor_file import TensorFile


class RenamedTensors:
    """TensorFile with names changed by `rename`. Raises ValueError when two tensors get one name."""

    def __init__(self, file: TensorFile, rename: Callable[[str], str]) -> None:
        self.path = file.path
        self._file = file
        self._names: dict[str, str] = {}
        for name in file.shapes:
            new = rename(name)
            if new in self._names:
                raise ValueError(f"{file.where(name)}: tensors {self._names[new]!r} and {name!r} are both {new!r}")
            self._names[new] = name

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._file.shapes
        return {new: shapes[old] for new, old in self._names.items()}

    def where(self, name: str) -> str:
        return self._file.where(self._names.get(name, name))

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        return self._file.read(self._names[name], dtype)

    def stored(self, name: str) -> tuple[str, np.ndarray] | None:
        return self._file.stored(self._names[name])
