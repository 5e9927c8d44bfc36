"""A checkpoint in the serving layout, kept by Orbax: arrays by the model's own slots, as products take them.

jaxserve_model.json   version of the layout, the model's configuration, dtype of the weights
arrays/               an Orbax pytree (OCDBT): slot + ".weight" or ".bias" -> array [out, in]; rows of queries and keys
                      are ordered for a rotation of halves, norms hold what is multiplied by, experts are stacks
tokenizer files       as the source had them, or tokenizer.gguf: the metadata of a GGUF file
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orbax.checkpoint as ocp
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.family import Family, WeightNames

DESCRIPTION, ARRAYS = "jaxserve_model.json", "arrays"
VERSION = 1
_CHUNK_BYTES = 16 << 20  # what is read at once, and may lie on another device
_FILE_BYTES = 256 << 20
_CONFIGS = {"decoder": ModelConfig, "encoder": EncoderConfig}


def write_orbax(
    folder: Path, arrays: Mapping[str, np.ndarray], config: ModelConfig | EncoderConfig, dtype: str
) -> None:
    """Write description and arrays into an existing folder."""
    kind = "encoder" if isinstance(config, EncoderConfig) else "decoder"
    content = {"version": VERSION, "kind": kind, "dtype": dtype, "config": msgspec.to_builtins(config)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
        save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
        item = ocp.args.PyTreeSave(dict(arrays), save_args=save_args, ocdbt_target_data_file_size=_FILE_BYTES)
        checkpointer.save((folder / ARRAYS).absolute(), args=item)
    (folder / DESCRIPTION).write_text(json.dumps(content, indent=1))


def read_description(folder: Path) -> tuple[ModelConfig | EncoderConfig, str]:
    """(configuration, dtype of the weights). Raises ValueError naming the file for one that is broken or of another
    version."""
    path = folder / DESCRIPTION
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version: got {content['version']!r}; allowed: {VERSION}")
        return msgspec.convert(content["config"], _CONFIGS[content["kind"]]), content["dtype"]
    except FileNotFoundError:
        raise ValueError(f"{path}: the file is missing") from None
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None


def slot_names(family: Family) -> WeightNames:
    """Every slot of a family under its own name."""
    known = (family.hf_names, family.gguf_names)
    top = {slot: slot for names in known for slot in names.top}
    return WeightNames(top, {slot: f"layers.{{i}}.{slot}" for names in known for slot in names.layer})


class OrbaxTensors:
    """TensorFile of a converted checkpoint. Arrays of a layer are read together and handed out one by one. Raises
    ValueError naming the folder when Orbax cannot read it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._arrays = (folder / ARRAYS).absolute()
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
        try:
            tree = self._checkpointer.metadata(self._arrays).item_metadata.tree
        except Exception as error:  # whatever its many layers raise
            raise ValueError(f"{self._arrays}: Orbax cannot read it: {_first_line(error)}") from None
        self._shapes = {name: tuple(array.shape) for name, array in tree.items()}
        self._read: dict[str, np.ndarray] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> str:
        return str(self._arrays)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._read:
            self._read = self._restore([other for other in self._shapes if _group(other) == _group(name)])
        return self._read.pop(name).astype(dtype, copy=False)

    def stored(self, name: str) -> None:
        return None

    def _restore(self, names: list[str]) -> dict[str, np.ndarray]:
        arguments = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0),
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
            partial_restore=True,
        )
        try:
            return dict(self._checkpointer.restore(self._arrays, args=arguments))
        except Exception as error:
            raise ValueError(f"{self._arrays}: tensor {names[0]!r} (or one beside it): {_first_line(error)}") from None


def _group(name: str) -> str:
    found = re.match(r"layers\.\d+\.", name)
    return found[0] if found else name


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
