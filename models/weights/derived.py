"""Tensors that a file stores in another form than the model asks for. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from jaxserve.models.weights.tensor_file import TensorFile


@dataclasses.dataclass(frozen=True)
class Derived:
    """A tensor made of stored ones.

    sources   name -> shape of the stored tensors; a file without them, in these shapes, has no such derived tensor
    shape     of the result
    build     (file, dtype) -> the values
    """

    sources: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]
    build: Callable[[TensorFile, np.dtype], np.ndarray]


def rearranged(
    source: str, stored: tuple[int, ...], shape: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]
) -> Derived:
    """The values of one tensor in another order, or a part of them."""
    return Derived({source: stored}, shape, lambda file, dtype: change(file.read(source, dtype)))


class DerivedTensors:
    """TensorFile that shows derived tensors in place of their sources."""

    def __init__(self, file: TensorFile, derived: Mapping[str, Derived]) -> None:
        self.file, self.path = file, file.path
        stored = file.shapes
        self._derived = {
            name: tensor
            for name, tensor in derived.items()
            if all(stored.get(source) == shape for source, shape in tensor.sources.items())
        }
        used = {source for tensor in self._derived.values() for source in tensor.sources}
        self._shapes = {name: shape for name, shape in stored.items() if name not in used}
        self._shapes |= {name: tensor.shape for name, tensor in self._derived.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> str:
        return self.file.where(next(iter(self._derived[name].sources)) if name in self._derived else name)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        return self._derived[name].build(self.file, dtype) if name in self._derived else self.file.read(name, dtype)

    def stored(self, name: str) -> tuple[str, np.ndarray] | None:
        return None if name in self._derived else self.file.stored(name)
