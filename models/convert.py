"""Any checkpoint that loads -> one in the serving layout (models/weights/orbax.py)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxserve.models.checkpoint import Progress
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.encoder import Encoder
from jaxserve.models.loading import Source, load_config, open_parameters
from jaxserve.models.parameters import Parameters
from jaxserve.models.weights.gguf_file import write_metadata
from jaxserve.models.weights.orbax import write_orbax

_TRAVELLING = ("*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")
_FOLDERS = ("additional_chat_templates", "1_Pooling")
TOKENIZER_GGUF = "tokenizer.gguf"


def convert(
    source: Source,
    target: Path,
    *,
    dtype: str = "bfloat16",
    check_weights: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write `source` into the new folder `target`; needs memory for the whole model in `dtype`.

    What the source stores in blocks is expanded. The folder appears when it is complete. Raises ValueError for a
    source that does not load and FileExistsError for a target that exists.
    """
    if target.exists():
        raise FileExistsError(f"{target}: exists already; allowed: a new folder")
    config = load_config(source)
    options = RuntimeOptions(dtype=dtype)
    values = open_parameters(source, config, options, progress=progress, check_weights=check_weights, place=np.asarray)
    collected = _Collector(values)
    if isinstance(config, EncoderConfig):
        Encoder(config, options, collected)
    else:
        Decoder(config, options, collected)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write_orbax(folder, collected.arrays, config, dtype)
        _copy_text(source, folder)
        os.replace(folder, target)


def _copy_text(source: Source, folder: Path) -> None:
    """Tokenizer, templates and configuration."""
    if source.kind == "gguf":
        write_metadata(source.path, folder / TOKENIZER_GGUF)
        return
    for pattern in _TRAVELLING:
        for path in sorted(source.path.glob(pattern)):
            if not path.name.endswith(".index.json") and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    for name in _FOLDERS:
        if (source.path / name).is_dir():
            shutil.copytree(source.path / name, folder / name)


class _Collector:
    """Parameters that keeps every array by slot; models are built of shapes only."""

    def __init__(self, values: Parameters) -> None:
        self.values = values
        self.arrays: dict[str, np.ndarray] = {}

    def _split(self, slots: Sequence[str], suffix: str, rows: Sequence[int], whole: object, axis: int) -> None:
        ends = np.cumsum(rows)[:-1]
        for slot, part in zip(slots, np.split(np.asarray(whole), ends, axis=axis), strict=True):
            self.arrays[f"{slot}.{suffix}"] = part

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> jax.ShapeDtypeStruct:
        whole = self.values.matrix(slots, rows, columns)
        self._split(slots, "weight", rows, whole, 0)
        return jax.ShapeDtypeStruct(whole.shape, np.float32)

    def table(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self._keep(f"{slot}.weight", self.values.table(slot, rows, columns))

    def exact(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self._keep(f"{slot}.weight", self.values.exact(slot, rows, columns))

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> jax.ShapeDtypeStruct:
        whole = self.values.stack(slots, rows, columns, count)
        self._split(slots, "weight", rows, whole, 1)
        return jax.ShapeDtypeStruct((count, sum(rows), columns), np.float32)

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.ShapeDtypeStruct:
        whole = self.values.stack_bias(slots, rows, count)
        self._split(slots, "bias", rows, whole, 1)
        return jax.ShapeDtypeStruct((count, sum(rows)), np.float32)

    def vector(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        return self._keep(slot, self.values.vector(slot, size))

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.ShapeDtypeStruct:
        whole = self.values.bias(slots, rows)
        self._split(slots, "bias", rows, whole, 0)
        return jax.ShapeDtypeStruct(whole.shape, np.float32)

    def norm(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        return self._keep(f"{slot}.weight", self.values.norm(slot, size))

    def _keep(self, name: str, values: object) -> jax.ShapeDtypeStruct:
        self.arrays[name] = np.asarray(values)
        return jax.ShapeDtypeStruct(self.arrays[name].shape, np.float32)
