"""Tensors of a Hugging Face folder: one safetensors file, or shards with an index. Pickled weights are never read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """Implements weights.rules.WeightSource. Raises ValueError naming the file for a missing or damaged shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        index = self._index()
        for path in self._files(index):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    self._file_of[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
        for name, shard in (index or {}).items():
            if name not in self._file_of:
                raise ValueError(f"{folder / INDEX}: lists tensor {name!r} in {shard}, which does not hold it")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        path = self._file_of[name]
        try:
            with _open(path) as file:
                return file.get_tensor(name)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: tensor {name!r} cannot be read ({error})") from error

    def describe(self, name: str) -> str:
        return f"{self._file_of.get(name, self.folder)}: tensor {name!r}"

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.exists():
            return None
        try:
            weight_map = json.loads(path.read_text())["weight_map"]
            return {str(name): str(shard) for name, shard in weight_map.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: no valid index ({error!r})") from None

    def _files(self, index: dict[str, str] | None) -> list[Path]:
        if index is None:
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.folder.glob(pattern)]
                found = f"only {', '.join(pickled)}, which can run code and is not read" if pickled else "no weights"
                raise ValueError(f"{self.folder}: {found}; allowed: *.safetensors or a GGUF file")
            return files
        files = []
        for shard in sorted(set(index.values())):
            path = self.folder / shard
            if Path(shard).name != shard:
                raise ValueError(f"{self.folder / INDEX}: shard {shard!r}; allowed: a file name inside the folder")
            if not path.exists():
                raise ValueError(f"{path}: the shard is missing; {INDEX} lists it")
            files.append(path)
        return files


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
