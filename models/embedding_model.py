"""Decoders that were made for embeddings: published without a head, often without the prefix "model.". No jax."""

from __future__ import annotations

import dataclasses

from jaxserve.models.config import ModelConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.sentence_transformers import embedding_settings
from jaxserve.models.weights.renamed import RenamedTensors
from jaxserve.models.weights.tensor_file import TensorFile

_PREFIX = "model."
_WITHOUT_PREFIX = ("lm_head.",)


def for_embeddings(config: ModelConfig, hf: HFConfig, *, has_head: bool) -> ModelConfig:
    """The configuration of a model that has files of sentence-transformers beside it, or whose class has no head: its
    task is "embed". Others as they are. Raises ValueError for what a causal decoder does not compute."""
    if hf.flag("use_bidirectional_attention", False) or not hf.flag("is_causal", True):
        raise ValueError(f"{hf.path}: bidirectional attention in a decoder; allowed: causal attention")
    settings = embedding_settings(hf.path.parent)
    if settings is None:
        return config if has_head else dataclasses.replace(config, task="embed")
    if settings.pooling not in ("last", "mean"):
        raise ValueError(f"{hf.path.parent}: pooling: got {settings.pooling!r}; allowed in a decoder: last, mean")
    longest = config.max_position_embeddings
    if settings.max_tokens is not None:
        longest = min(longest, settings.max_tokens)
    return dataclasses.replace(config, task="embed", pooling=settings.pooling, max_position_embeddings=longest)


def with_prefix(file: TensorFile) -> TensorFile:
    """A decoder's tensors by the names that files with a head give them."""
    if any(name.startswith(_PREFIX) for name in file.shapes):
        return file
    return RenamedTensors(file, lambda name: name if name.startswith(_WITHOUT_PREFIX) else _PREFIX + name)
