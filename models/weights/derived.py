"""Tensors that a file stores in another form than the model asks for. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from jaxserve.models.weights.tensor_file import TensorFile


@dataclasses.dataclass(frozen=True)
class Derived:
    """A tensor made of a stored one.

    source         name of the stored tensor
    source_shape   its shape; a file that stores another one does not have the derived tensor
    shape          of the result
    build          values of the stored tensor -> of the result, in the same dtype
    """

    source: str
    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    build: Callable[[np.ndarray], np.ndarray]


class DerivedTensors:
    """TensorFile that shows derived tensors in place of their sources."""

    def __init__(self, file: TensorFile, derived: Mapping[str, Derived]) -> None:
        self.file, self.path = file, file.path
        stored = file.shapes
        self._derived = {
            name: tensor for name, tensor in derived.items() if stored.get(tensor.source) == tensor.source_shape
        }
        sources = {tensor.source for tensor in self._derived.values()}
        self._shapes = {name: shape for name, shape in stored.items() if name not in sources}
        self._shapes |= {name: tensor.shape for name, tensor in self._derived.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> str:
        return self.file.where(self._derived[name].source if name in self._derived else name)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._derived:
            return self.file.read(name, dtype)
        tensor = self._derived[name]
        return tensor.build(self.file.read(tensor.source, dtype))

    def stored(self, name: str) -> tuple[str, np.ndarray] | None:
        return None if name in self._derived else self.file.stored(name)
