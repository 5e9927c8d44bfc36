"""How the vector of a text is made, as the sentence-transformers package writes it beside a checkpoint. No jax."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxserve.models.special_tokens import read_json

MODULES = "modules.json"
_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


@dataclasses.dataclass(frozen=True)
class EmbeddingSettings:
    """pooling: "cls", "mean" or "last"; max_tokens: longest text the model was trained for, None if nobody says."""

    pooling: str
    max_tokens: int | None


def embedding_settings(folder: Path) -> EmbeddingSettings | None:
    """The settings beside a checkpoint; None where it is no sentence-transformers model. Raises ValueError naming the
    file for a part of the pipeline that is not computed here (a dense layer behind the pooling, another pooling)."""
    path = folder / MODULES
    if not path.is_file():
        return None
    pooling = None
    for module in _modules(path):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind not in ("Transformer", "Normalize"):
            raise ValueError(f"{path}: module {module.get('type')!r}; allowed: Transformer, Pooling, Normalize")
    if pooling is None:
        raise ValueError(f"{path}: no module of type Pooling")
    length = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return EmbeddingSettings(pooling, length if isinstance(length, int) and length > 0 else None)


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path}: got {type(modules).__name__}; allowed: a list of objects")
    return modules


def _pooling(path: Path) -> str:
    content = read_json(path)
    if content.get("pooling_mode") in _POOLINGS.values():
        return content["pooling_mode"]
    chosen = [key for key, value in content.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ValueError(f"{path}: pooling: got {', '.join(chosen) or 'none'}; allowed: one of {', '.join(_POOLINGS)}")
    return _POOLINGS[chosen[0]]
