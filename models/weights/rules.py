"""Which tensors of a file make which parameter. Pure data and numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np


class WeightSource(Protocol):
    """The tensors of a checkpoint, read one at a time."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, for 2-D weights [out, in]."""
        ...

    def read(self, name: str) -> np.ndarray:
        """float32, or the file's own 16-bit float type. Raises ValueError naming file and tensor if it is damaged."""
        ...

    def describe(self, name: str) -> str:
        """Where the tensor is, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of the file; transform turns it (same shape) into what the model expects."""

    name: str
    transform: Callable[[np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """Parameter `path` (dotted) is the concatenation of the pieces along the first axis."""

    path: str
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class NameTable:
    """A family's names in one file format.

    top      parameter path -> tensor name
    layer    the same inside a layer: paths under layers.{i}; several names are stacked in that order
    prefix   of a layer's tensors, with {} for its number
    ignored  names that files of this family may carry and that hold nothing (a suffix match)
    """

    top: dict[str, str]
    layer: dict[str, tuple[str, ...]]
    prefix: str
    ignored: tuple[str, ...] = ()

    def rules(self, num_layers: int, transforms: dict[str, Callable[[np.ndarray], np.ndarray]]) -> Iterator[Rule]:
        """transforms: layer tensor name, or "norm" for every norm weight -> function."""

        def piece(full: str, local: str) -> Piece:
            kind = "norm" if "norm" in local else local
            return Piece(full, transforms.get(kind))

        for path, name in self.top.items():
            yield Rule(path, (piece(name, name),))
        for i in range(num_layers):
            for path, names in self.layer.items():
                pieces = tuple(piece(self.prefix.format(i) + name, name) for name in names)
                yield Rule(f"layers.{i}.{path}", pieces)


def unpermute_rope(num_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Undo the interleaving of rotary halves: rows (2j, 2j + 1) of a head become (j, j + head_dim / 2)."""

    def transform(weight: np.ndarray) -> np.ndarray:
        head_dim = weight.shape[0] // num_heads
        pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

    return transform


def plus_one(weight: np.ndarray) -> np.ndarray:
    return weight.astype(np.float32) + np.float32(1)
