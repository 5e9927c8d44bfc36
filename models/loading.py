"""From a model source to a ModelConfig and to a model with its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh
from jaxserve.models.checkpoint import DTYPES, AnyConfig, CheckpointParameters, Progress, check_tensors, on_device
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.config_gguf import GGUFConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.embedding_model import for_embeddings, with_prefix
from jaxserve.models.encoder import Encoder
from jaxserve.models.family import Family, WeightNames
from jaxserve.models.parameters import Parameters
from jaxserve.models.quantization import ONLINE, published_method
from jaxserve.models.registry import GGUF_ARCHITECTURES, HF_ARCHITECTURES, family_named, family_of
from jaxserve.models.sharded_parameters import ShardedParameters
from jaxserve.models.special_tokens import read_json
from jaxserve.models.tensor_parallel import shard_config
from jaxserve.models.weights.gguf import GGUFTensors
from jaxserve.models.weights.gguf_file import GGUFFile
from jaxserve.models.weights.packed import PackedTensors
from jaxserve.models.weights.safetensors import SafetensorsTensors
from jaxserve.models.weights.tensor_file import TensorFile
from jaxserve.sharding.shape import ONE_DEVICE

_HEADLESS = "class_without_head"  # in HFConfig.content: the name of a class that has no head
_READ_BY_FAMILIES = ("mxfp4",)  # ways of storing weights that a family's names take care of


class Source(Protocol):
    """Where a model lies (jaxserve.hub.ModelSource): kind "gguf" (a file), "safetensors" or "orbax" (a folder)."""

    kind: str
    path: Path


def load_config(source: Source) -> AnyConfig:
    """The configuration of a model. ValueError naming the file and the key for what is missing, broken or unknown;
    code that a checkpoint names (auto_map) is never run."""
    return _read_config(source)


def load_model(
    source: Source,
    config: AnyConfig,
    options: RuntimeOptions,
    *,
    progress: Progress | None = None,
    check_weights: bool = False,
    weights: str = "dense",
    quantization: str = "",
    mesh: Mesh | None = None,
) -> Decoder | Encoder:
    """Build the model with its weights, one tensor at a time, on the default device or split over a mesh.

    Names and shapes of all tensors are checked before any value is read. progress is called as
    progress("load weights", values read, values in all).

    check_weights    also refuse NaN and infinity
    weights          what becomes of weights that the file stores in blocks: "dense": expanded to the compute dtype;
                     "stored": they stay in blocks, exact values in a third to a half of bfloat16's memory; "both":
                     blocks for products of few rows, an expanded copy for many
    quantization     one of quantization.ONLINE: quantise matrices while they are read; "": do not. Matrices that stay
                     in the file's blocks are left alone
    mesh             the one that options.mesh describes: the model is to be called under shard_map then

    A decoder whose task is "embed" has no head of its own.

    Raises ValueError listing the tensors that are missing, left over or of the wrong shape, with their file.
    """
    reader = open_parameters(
        source,
        config,
        options,
        progress=progress,
        check_weights=check_weights,
        weights=weights,
        quantization=quantization,
        place=on_device if mesh is None else np.asarray,
    )
    if mesh is None:
        return _build(config, options, reader)
    if isinstance(config, EncoderConfig):
        raise ValueError("mesh: got one for an encoder; allowed: one device")
    params = ShardedParameters(config, mesh, options.dtype, reader, slots=dict(options.expert_slots))
    return Decoder(shard_config(config, options.mesh), options, params)


def open_parameters(
    source: Source,
    config: AnyConfig,
    options: RuntimeOptions,
    *,
    progress: Progress | None = None,
    check_weights: bool = False,
    weights: str = "dense",
    quantization: str = "",
    place: Callable[[np.ndarray], Any] = on_device,
) -> CheckpointParameters:
    """The parameters of the whole model, all names and shapes checked and no value read yet. Arguments and errors are
    load_model's; place: what becomes of an array that has been read."""
    if weights not in ("dense", "stored", "both"):
        raise ValueError(f"weights: got {weights!r}; allowed: dense, stored, both")
    if quantization not in ("", *ONLINE):
        raise ValueError(f"quantization: got {quantization!r}; allowed: none, {', '.join(ONLINE)}")
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype: got {options.dtype!r}; allowed: {', '.join(DTYPES)}")
    names, file = _open(source)
    if source.kind != "orbax":
        if config.task == "embed" and isinstance(config, ModelConfig):
            file = with_prefix(file)
        if names.adapt is not None:
            file = names.adapt(file, config)
    whole = dataclasses.replace(options, mesh=ONE_DEVICE, expert_slots=())
    needed = check_tensors(config, names, file, lambda params: _build(config, whole, params))
    return CheckpointParameters(
        config,
        options,
        names,
        file,
        num_values=sum(math.prod(shape) for shape in needed.values()),
        check_weights=check_weights,
        weights=weights,
        quantization=quantization,
        progress=progress,
        place=place,
    )


def is_encoder(source: Source) -> bool:
    """Whether a model is an encoder, which has no pages and continues no text."""
    return isinstance(load_config(source), EncoderConfig)


def _build(config: AnyConfig, options: RuntimeOptions, params: Parameters) -> Decoder | Encoder:
    if isinstance(config, EncoderConfig):
        return Encoder(config, options, params)
    return Decoder(config, options, params)


def _open(source: Source) -> tuple[WeightNames, TensorFile]:
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        family = family_of(file.architecture, known=GGUF_ARCHITECTURES, where=str(file.path))
        return family.gguf_names, GGUFTensors(file)
    if source.kind == "safetensors":
        hf = _hf_config(source.path)
        family = family_of(hf.architecture, known=HF_ARCHITECTURES, where=str(hf.path))
        return family.hf_names, _safetensors(source.path, hf)
    if source.kind == "orbax":
        # Only here: the library takes a second to load.
        from jaxserve.models.weights.orbax import OrbaxTensors, read_description, slot_names

        config, _ = read_description(source.path)
        return slot_names(family_named(config.family)), OrbaxTensors(source.path)
    raise ValueError(f"kind of model: got {source.kind!r}; allowed: gguf, safetensors, orbax")


def _safetensors(folder: Path, hf: HFConfig) -> TensorFile:
    file = SafetensorsTensors(folder)
    published = published_method(hf.content, hf.path)
    if published is None or published[0] in _READ_BY_FAMILIES:
        return file
    return PackedTensors(file, *published)


def _read_config(source: Source) -> AnyConfig:
    if source.kind == "gguf":
        gguf = GGUFConfig(GGUFFile(source.path))
        family = family_of(gguf.architecture, known=GGUF_ARCHITECTURES, where=str(source.path))
        return _named(source.path, lambda: family.read_gguf(gguf))
    if source.kind == "safetensors":
        hf = _hf_config(source.path)
        family = family_of(hf.architecture, known=HF_ARCHITECTURES, where=str(hf.path))
        return _named(hf.path, lambda: _read_hf(family, hf))
    if source.kind == "orbax":
        from jaxserve.models.weights.orbax import read_description

        return read_description(source.path)[0]
    raise ValueError(f"kind of model: got {source.kind!r}; allowed: gguf, safetensors, orbax")


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
    published_method(content, path)
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
