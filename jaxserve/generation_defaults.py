"""How a model's authors want it sampled: what requests get that do not say. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.models.special_tokens import read_json
from jaxserve.models.weights.gguf_file import GGUFFile
from jaxserve.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
# Field of SamplingParams -> what a GGUF file calls it.
_FIELDS = {
    "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip


def generation_defaults(path: Path) -> dict[str, float]:
    """Fields of SamplingParams from generation_config.json of a folder, or from the metadata of a GGUF file; {} where
    they name none. do_sample: false means greedy unless a temperature is named. Raises ValueError naming the file for a
    value out of range."""
    if path.is_file():
        content, where = _from_gguf(GGUFFile(path).metadata), str(path)
    elif (path / "tokenizer.gguf").is_file():
        content, where = _from_gguf(GGUFFile(path / "tokenizer.gguf").metadata), str(path)
    else:
        content, where = read_json(path / GENERATION_CONFIG), str(path / GENERATION_CONFIG)
    found = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    if content.get("do_sample") is False and "temperature" not in found:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return found


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, float]:
    keys = {name: f"general.sampling.{key}" for name, key in _FIELDS.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}
