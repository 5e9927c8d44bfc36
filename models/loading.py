"""From a model source to a ModelConfig and to a model with its weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.embedding_model import for_embeddings, with_prefix
from jaxserve.models.encoder import Encoder
from jaxserve.models.family import Family, WeightNames
from jaxserve.models.parameters import Parameters, WeightValue
from jaxserve.models.registry import GGUF_ARCHITECTURES, HF_ARCHITECTURES, family_of
from jaxserve.models.sharded_parameters import ShardedParameters
from jaxserve.models.special_tokens import read_json
from jaxserve.models.tensor_parallel import shard_config
from jaxserve.models.weights.gguf import GGUFTensors
from jaxserve.models.weights.gguf_file import GGUFFile
from jaxserve.models.weights.safetensors import SafetensorsTensors
from jaxserve.models.weights.tensor_file import TensorFile
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight
from jaxserve.sharding.shape import ONE_DEVICE

AnyConfig = ModelConfig | EncoderConfig
Progress = Callable[[str, int, int], None]
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_MAX_LISTED = 8
_HEADLESS = "class_without_head"  # in HFConfig.content: the name of a class that has no head
_READ_BY_FAMILIES = ("mxfp4",)  # ways of storing weights that a family's names take care of
_LAYER_PREFIX = r"(?:model\.layers|blk)\.(\d+)\."


class Source(Protocol):
    """Where a model lies (jaxserve.hub.ModelSource): kind "gguf" (a file) or "safetensors" (a folder)."""

    kind: str
    path: Path


def load_config(source: Source) -> AnyConfig:
    """The configuration of a model. ValueError naming the file and the key for what is missing, broken or unknown;
    code that a checkpoint names (auto_map) is never run."""
    return _read_config(source)[0]


def load_model(
    source: Source,
    config: AnyConfig,
    options: RuntimeOptions,
    *,
    progress: Progress | None = None,
    check_weights: bool = False,
    keep_quantized: bool = False,
    mesh: Mesh | None = None,
) -> Decoder | Encoder:
    """Build the model with its weights, one tensor at a time, on the default device or split over a mesh.

    Names and shapes of all tensors are checked before any value is read. progress is called as
    progress("load weights", values read, values in all).

    check_weights    also refuse NaN and infinity
    keep_quantized   weights that a GGUF file stores in blocks which products take as they are (Q8_0, Q4_1) stay so:
                     exact values in a third to a half of bfloat16's memory, fast at few rows
    mesh             the one that options.mesh describes: weights are then expanded, and the model is to be called
                     under shard_map

    A decoder whose task is "embed" has no head of its own.

    Raises ValueError listing the tensors that are missing, left over or of the wrong shape, with their file.
    """
    if options.dtype not in _DTYPES:
        raise ValueError(f"dtype: got {options.dtype!r}; allowed: {', '.join(_DTYPES)}")
    _, names, file = _open(source)
    if config.task == "embed" and isinstance(config, ModelConfig):
        file = with_prefix(file)
    if names.adapt is not None:
        file = names.adapt(file, config)
    needed = check_tensors(config, dataclasses.replace(options, mesh=ONE_DEVICE), names, file)
    reader = _CheckpointParameters(
        config,
        options,
        names,
        file,
        num_values=sum(math.prod(shape) for shape in needed.values()),
        check_weights=check_weights,
        keep_quantized=keep_quantized and mesh is None,
        progress=progress,
        place=jnp.asarray if mesh is None else np.asarray,
    )
    if mesh is None:
        return _build(config, options, reader)
    if isinstance(config, EncoderConfig):
        raise ValueError("mesh: got one for an encoder; allowed: one device")
    return Decoder(shard_config(config, options.mesh), options, ShardedParameters(config, mesh, options.dtype, reader))


def is_encoder(source: Source) -> bool:
    """Whether a model is an encoder, which has no pages and continues no text."""
    return isinstance(load_config(source), EncoderConfig)


def _build(config: AnyConfig, options: RuntimeOptions, params: Parameters) -> Decoder | Encoder:
    if isinstance(config, EncoderConfig):
        return Encoder(config, options, params)
    return Decoder(config, options, params)


def _open(source: Source) -> tuple[Family, WeightNames, TensorFile]:
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        family = family_of(file.architecture, known=GGUF_ARCHITECTURES, where=str(file.path))
        return family, family.gguf_names, GGUFTensors(file)
    if source.kind == "safetensors":
        hf = _hf_config(source.path)
        family = family_of(hf.architecture, known=HF_ARCHITECTURES, where=str(hf.path))
        return family, family.hf_names, SafetensorsTensors(source.path)
    raise ValueError(f"kind of model: got {source.kind!r}; allowed: gguf, safetensors")


def _read_config(source: Source) -> tuple[AnyConfig, Family]:
    if source.kind == "gguf":
        gguf = GGUFConfig(GGUFFile(source.path))
        family = family_of(gguf.architecture, known=GGUF_ARCHITECTURES, where=str(source.path))
        return _named(source.path, lambda: family.read_gguf(gguf)), family
    if source.kind == "safetensors":
        hf = _hf_config(source.path)
        family = family_of(hf.architecture, known=HF_ARCHITECTURES, where=str(hf.path))
        return _named(hf.path, lambda: _read_hf(family, hf)), family
    raise ValueError(f"kind of model: got {source.kind!r}; allowed: gguf, safetensors")


def _read_hf(family: Family, hf: HFConfig) -> AnyConfig:
    config = family.read_hf(hf)
    if isinstance(config, EncoderConfig):
        return config
    return for_embeddings(config, hf, has_head=_HEADLESS not in hf.content)


def _hf_config(folder: Path) -> HFConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing")
    content = read_json(path)
    method = (content.get("quantization_config") or {}).get("quant_method", "")
    if content.get("quantization_config") and method not in _READ_BY_FAMILIES:
        raise ValueError(f"{path}: quantization_config: got {method!r}; allowed: unquantised weights, or GGUF")
    names = content.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str) and names[0].endswith("Model"):
        causal = names[0].removesuffix("Model") + "ForCausalLM"
        if causal in HF_ARCHITECTURES:
            content = content | {"architectures": [causal], _HEADLESS: names[0]}
    return HFConfig(content, path)


def _named(path: Path, read: Callable[[], AnyConfig]) -> AnyConfig:
    try:
        return read()
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def file_name(names: WeightNames, slot: str, expert: int | None = None) -> str:
    """What the file calls a slot, without ".weight" or ".bias"."""
    if slot in names.top:
        return names.top[slot]
    _, index, part = slot.split(".", 2)
    if part not in names.layer:
        raise ValueError(f"slot {slot!r} has no name in this family; allowed: {', '.join(names.layer)}")
    return names.layer[part].format(i=index, e=expert)


def _tensors(
    names: WeightNames, slots: Sequence[str], rows: Sequence[int], expert: int | None = None
) -> list[tuple[str, str, int]]:
    """(first slot, name, rows) of the tensors that hold the slots: neighbours of one name are one tensor."""
    found: list[tuple[str, str, int]] = []
    for slot, count in zip(slots, rows, strict=True):
        name = file_name(names, slot, expert)
        if found and found[-1][1] == name:
            found[-1] = (found[-1][0], name, found[-1][2] + count)
        else:
            found.append((slot, name, count))
    return found


def _is_split(names: WeightNames, slot: str) -> bool:
    """Whether the file stores each matrix of a stack as a tensor of its own."""
    return "{e}" in names.layer.get(slot.split(".", 2)[-1], "")


def check_tensors(
    config: AnyConfig, options: RuntimeOptions, names: WeightNames, file: TensorFile
) -> dict[str, tuple[int, ...]]:
    """Compare the tensors a model needs with those of a file; ValueError with all differences. Returns their shapes."""
    plan = _PlannedParameters(names)
    _build(config, options, plan)
    shapes = file.shapes
    missing = [name for name in plan.shapes if name not in shapes]
    misshapen = [
        f"{name} is {list(shapes[name])}, allowed {list(shape)}"
        for name, shape in plan.shapes.items()
        if name in shapes and shapes[name] != shape
    ]
    surplus = [name for name in shapes if name not in plan.shapes and not _is_ignored(name, config, names, shapes)]
    problems = [
        f"{len(found)} tensors {what}: {_listed(found)}"
        for what, found in (("missing", missing), ("left over", surplus), ("of the wrong shape", misshapen))
        if found
    ]
    if problems:
        first = missing[0] if missing else surplus[0] if surplus else misshapen[0].split()[0]
        raise ValueError(f"{file.where(first)}: {'; '.join(problems)}")
    return plan.shapes


def _is_ignored(name: str, config: AnyConfig, names: WeightNames, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if any(re.fullmatch(pattern, name) for pattern in names.ignored):
        return True
    layer = re.match(_LAYER_PREFIX, name)
    if layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_draft_layers:
        return True
    # Some files store the tied head a second time; _CheckpointParameters compares the values.
    embedding, head = (f"{names.top.get(slot)}.weight" for slot in ("embedding", "head"))
    if config.task == "embed":
        return name == head
    return config.tie_word_embeddings and name == head and shapes[name] == shapes.get(embedding)


def _listed(found: Sequence[str]) -> str:
    more = f", and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return ", ".join(found[:_MAX_LISTED]) + more


class _PlannedParameters:
    """Answers with shapes only and notes which tensors of which shape the model asks for."""

    def __init__(self, names: WeightNames) -> None:
        self.names = names
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _note(
        self, slots: Sequence[str], suffix: str, rows: Sequence[int], *after: int, expert: int | None = None
    ) -> None:
        for _, name, count in _tensors(self.names, slots, rows, expert):
            self.shapes[f"{name}.{suffix}"] = (count, *after)

    def _note_stack(self, slots: Sequence[str], suffix: str, rows: Sequence[int], count: int, *after: int) -> None:
        if _is_split(self.names, slots[0]):
            for expert in range(count):
                self._note(slots, suffix, rows, *after, expert=expert)
            return
        for _, name, num_rows in _tensors(self.names, slots, rows):
            self.shapes[f"{name}.{suffix}"] = (count, num_rows, *after)

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> jax.ShapeDtypeStruct:
        self._note(slots, "weight", rows, columns)
        return jax.ShapeDtypeStruct((sum(rows), columns), jnp.float32)

    def table(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self.matrix((slot,), (rows,), columns)

    def exact(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self.matrix((slot,), (rows,), columns)

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> jax.ShapeDtypeStruct:
        self._note_stack(slots, "weight", rows, count, columns)
        return jax.ShapeDtypeStruct((count, sum(rows), columns), jnp.float32)

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.ShapeDtypeStruct:
        self._note_stack(slots, "bias", rows, count)
        return jax.ShapeDtypeStruct((count, sum(rows)), jnp.float32)

    def vector(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        self.shapes[file_name(self.names, slot)] = (size,)
        return jax.ShapeDtypeStruct((size,), jnp.float32)

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.ShapeDtypeStruct:
        self._note(slots, "bias", rows)
        return jax.ShapeDtypeStruct((sum(rows),), jnp.float32)

    def norm(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        self._note((slot,), "weight", (size,))
        return jax.ShapeDtypeStruct((size,), jnp.float32)


class _CheckpointParameters:
    """Reads each tensor when the model asks for it and places it. Names and shapes have been checked."""

    def __init__(
        self,
        config: AnyConfig,
        options: RuntimeOptions,
        names: WeightNames,
        file: TensorFile,
        *,
        num_values: int,
        check_weights: bool,
        keep_quantized: bool,
        progress: Progress | None,
        place: Callable[[np.ndarray], Any] = jnp.asarray,
    ) -> None:
        self.place = place
        self.config, self.names, self.file = config, names, file
        self.dtype = _DTYPES[options.dtype]
        self.check_weights, self.keep_quantized = check_weights, keep_quantized
        self.progress = progress
        self.total = num_values
        self.done = 0
        self._check_tied_head()

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> WeightValue:
        kept = self._kept(slots, rows, columns) if self.keep_quantized else None
        if kept is not None:
            return kept
        tensors = _tensors(self.names, slots, rows)
        if len(tensors) == 1:
            return self.place(self._read(*tensors[0][:2], "weight", self.dtype))
        joined = np.empty((sum(rows), columns), self.dtype)
        self._read_rows(tensors, "weight", joined)
        return self.place(joined)

    def exact(self, slot: str, rows: int, columns: int) -> jax.Array:
        return self.place(self._read(slot, file_name(self.names, slot), "weight", _DTYPES["float32"]))

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> WeightValue:
        return self._read_stack(slots, "weight", rows, np.empty((count, sum(rows), columns), self.dtype))

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.Array:
        return self._read_stack(slots, "bias", rows, np.empty((count, sum(rows)), _DTYPES["float32"]))

    def vector(self, slot: str, size: int) -> jax.Array:
        return self.place(self._read_named(file_name(self.names, slot), _DTYPES["float32"]))

    def table(self, slot: str, rows: int, columns: int) -> WeightValue:
        return self.matrix((slot,), (rows,), columns)

    def _kept(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> QuantizedWeight | None:
        """The parts as they are stored, joined, if all are stored the same way."""
        tensors = _tensors(self.names, slots, rows)
        names = [f"{name}.weight" for _, name, _ in tensors]
        parts = [self.file.stored(name) for name in names]
        kinds = {part[0] for part in parts if part is not None}
        if None in parts or len(kinds) != 1:
            return None
        # Rows are whole in their blocks, so that they can be reordered and joined like rows of values.
        codes = [self._ordered(at[0], part[1]) for at, part in zip(tensors, parts, strict=True) if part is not None]
        if self.check_weights:
            for name in names:
                self._check(name, self.file.read(name, _DTYPES["float32"]))
        shape = (sum(rows), columns)
        self._count(math.prod(shape))
        return QuantizedWeight(jnp.asarray(np.concatenate(codes)), kinds.pop(), shape)

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.Array:
        parts = [
            self._read(slot, name, "bias", _DTYPES["float32"]) for slot, name, _ in _tensors(self.names, slots, rows)
        ]
        return self.place(np.concatenate(parts))

    def norm(self, slot: str, size: int) -> jax.Array:
        weight = self._read(slot, file_name(self.names, slot), "weight", _DTYPES["float32"])
        if self.names.norms_have_offset:
            weight = weight + np.float32(self.config.norm_offset)
        return self.place(weight)

    def _read_stack(self, slots: Sequence[str], suffix: str, rows: Sequence[int], joined: np.ndarray) -> jax.Array:
        if _is_split(self.names, slots[0]):
            for expert, matrix in enumerate(joined):
                self._read_rows(_tensors(self.names, slots, rows, expert), suffix, matrix)
        else:
            # The stack is the leading axis of each tensor, rows are the second.
            self._read_rows(_tensors(self.names, slots, rows), suffix, joined.swapaxes(0, 1), is_stacked=True)
        return self.place(joined)

    def _read_rows(
        self, tensors: list[tuple[str, str, int]], suffix: str, joined: np.ndarray, *, is_stacked: bool = False
    ) -> None:
        """Tensors one below the other into `joined` [rows, ...]."""
        start = 0
        for slot, name, count in tensors:
            values = self._read(slot, name, suffix, joined.dtype)
            joined[start : start + count] = values.swapaxes(0, 1) if is_stacked else values
            start += count

    def _read(self, slot: str, name: str, suffix: str, dtype: np.dtype) -> np.ndarray:
        return self._ordered(slot, self._read_named(f"{name}.{suffix}", dtype))

    def _read_named(self, name: str, dtype: np.dtype) -> np.ndarray:
        values = self.file.read(name, dtype)
        if self.check_weights:
            self._check(name, values)
        self._count(values.size)
        return values

    def _ordered(self, slot: str, rows: np.ndarray) -> np.ndarray:
        is_rotated = slot.rsplit(".", 1)[-1] in ("q", "k")
        return _halves_from_pairs(rows, self.config.head_dim) if self.names.has_interleaved_qk and is_rotated else rows

    def _check(self, name: str, values: np.ndarray) -> None:
        if not np.isfinite(values).all():
            raise ValueError(f"{self.file.where(name)}: tensor {name!r} holds NaN or infinity")

    def _count(self, num_values: int) -> None:
        self.done += num_values
        if self.progress is not None:
            self.progress("load weights", self.done, self.total)

    def _check_tied_head(self) -> None:
        head, embedding = (f"{self.names.top.get(slot)}.weight" for slot in ("head", "embedding"))
        if not self.config.tie_word_embeddings or self.config.task == "embed" or head not in self.file.shapes:
            return
        if not np.array_equal(self.file.read(head, self.dtype), self.file.read(embedding, self.dtype)):
            raise ValueError(
                f"{self.file.where(head)}: tensor {head!r} differs from {embedding!r}, "
                "but the configuration says that they are tied"
            )


def _halves_from_pairs(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head ordered for a rotation of neighbouring pairs -> for one of halves."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
