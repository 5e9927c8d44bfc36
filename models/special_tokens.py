"""Which tokens begin and end a text, from the files of a checkpoint. No jax.

The tokenizer (text) and the model configuration (sampling masks) must agree, so both ask here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Control tokens that end a turn or a text whatever else the metadata says: many converted files name only one of
# the two ends (end of turn, end of text) that the model was trained to write.
END_MARKERS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>",
        "<end_of_turn>", "<turn|>", "<|end_of_turn|>", "<EOT>", "<｜end▁of▁sentence｜>", "</s>", "<eos>",
    }
)  # fmt: skip
CONTROL_TYPE = 3  # tokenizer.ggml.token_type
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a text, ascending."""
    ids = {int(metadata[key]) for name in _END_KEYS if (key := f"tokenizer.ggml.{name}") in metadata}
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    # Control tokens stand in the first or the last part of a vocabulary; the scan takes milliseconds.
    ids.update(k for k, kind in enumerate(types) if kind == CONTROL_TYPE and tokens[k] in END_MARKERS)
    return tuple(sorted(ids))


def hf_end_token_ids(folder: Path) -> tuple[int, ...]:
    """Every token that ends a text, ascending: generation_config.json, config.json and the tokenizer's eos."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        content = read_json(folder / name)
        inner = content.get("text_config")
        for part in (content, inner if isinstance(inner, dict) else {}):
            ids.update(_as_ids(part.get("eos_token_id"), folder / name))
    eos = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if eos is not None:
        ids.update(token_id for text, token_id in _added_tokens(folder).items() if text == eos)
    return tuple(sorted(ids))


def _added_tokens(folder: Path) -> dict[str, int]:
    found = {}
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for token_id, entry in (decoder or {}).items():
        found[entry["content"]] = int(token_id)
    return found


def _as_ids(value: Any, path: Path) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values):
        raise ValueError(f"{path}: eos_token_id: got {value!r}; allowed: token ids")
    return values


def token_text(value: Any) -> str | None:
    """The text of a token entry, which is a string or a dictionary with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when the file does not exist. ValueError naming the file when it is broken."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason})") from None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a JSON {type(content).__name__}; allowed: an object")
    return content
