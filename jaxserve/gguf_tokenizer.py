"""Rebuilds a tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and sentencepiece BPE ("llama"). No jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxserve.models.weights.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED, _UNKNOWN, _BYTE = 3, 4, 2, 6

# How text is cut into words before merging, by tokenizer.ggml.pre: as the models were trained.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _QWEN2}
_PLAIN = ("gpt-2", "default", "olmo", "phi-2")
_SINGLE_DIGITS = ("smollm", "refact", "starcoder", "command-r")


def metadata_from_gguf(path: Path) -> dict[str, Any]:
    """Every metadata key as a Python value. Raises ValueError naming the file when it cannot be read."""
    fields = GGUFFile(path).metadata
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.tokens"):
        if key not in fields:
            raise ValueError(f"{path}: metadata key {key!r} is missing")
    return fields


def backend_from_gguf(path: Path, fields: dict[str, Any]) -> Tokenizer:
    kind = fields["tokenizer.ggml.model"]
    if kind == "gpt2":
        backend = _byte_level(path, fields)
    elif kind == "llama":
        backend = _sentencepiece(path, fields)
    else:
        raise ValueError(f"{path}: tokenizer model {kind!r}; known: gpt2, llama")
    types = _types(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    control = [AddedToken(tokens[i], special=True, normalized=False) for i, t in enumerate(types) if t == _CONTROL]
    backend.add_special_tokens(control)
    # Sentencepiece matches these in normalised text, where a space is already the mark "▁".
    user = [
        AddedToken(tokens[i].replace("▁", " ") if kind == "llama" else tokens[i], normalized=kind == "llama")
        for i, t in enumerate(types)
        if t == _USER_DEFINED
    ]
    backend.add_tokens([token for token in user if backend.token_to_id(token.content) is not None or kind != "llama"])
    return backend


def _types(fields: dict[str, Any]) -> list[int]:
    types = fields.get("tokenizer.ggml.token_type")
    return [1] * len(fields["tokenizer.ggml.tokens"]) if types is None else list(map(int, types))


def _byte_level(path: Path, fields: dict[str, Any]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges") or ()]
    model = BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    backend = Tokenizer(model)
    if pre in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in _SINGLE_DIGITS:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in _PLAIN:
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        known = ", ".join((*_PATTERNS, *_SINGLE_DIGITS, *_PLAIN))
        raise ValueError(f"{path}: tokenizer.ggml.pre {pre!r}; known: {known}")
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(path: Path, fields: dict[str, Any]) -> Tokenizer:
    """A sentencepiece BPE model lists pieces with scores: the pair whose joined piece scores best is merged first."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if "tokenizer.ggml.scores" not in fields:
        raise ValueError(f"{path}: metadata key 'tokenizer.ggml.scores' is missing")
    types = _types(fields)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Better pieces first; pieces of equal score as they stand in the file.
    order = np.argsort(-np.asarray(fields["tokenizer.ggml.scores"], np.float32), kind="stable").tolist()
    merges = [
        pair for i in order if types[i] not in (_CONTROL, _UNKNOWN, _BYTE) for pair in _pairs(tokens[i], vocabulary)
    ]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    model = BPE(
        vocabulary,
        merges,
        byte_fallback=_BYTE in types,
        fuse_unk=True,
        unk_token=tokens[unknown] if unknown is not None else None,
    )
    backend = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _pairs(token: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The ways to make a token of two others, in the order of their ids."""
    found = []
    for cut in range(1, len(token)):
        left = token[:cut]
        if left in vocabulary:
            right = token[cut:]
            if right in vocabulary:
                found.append((vocabulary[left], vocabulary[right], left, right))
    if len(found) > 1:
        found.sort()
    return [pair[2:] for pair in found]
