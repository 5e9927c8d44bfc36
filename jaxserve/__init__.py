"""jaxserve: an LLM inference engine compiled by JAX/XLA."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.llm import LLM
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.structured.grammar import Grammar

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "Grammar", "SamplingParams"]

_LAZY = {
    "LLM": "jaxserve.llm",
    "EngineConfig": "jaxserve.config",
    "Grammar": "jaxserve.structured.grammar",
    "SamplingParams": "jaxserve.sampling_params",
}


def __getattr__(name: str) -> Any:
    # LLM pulls in jax; the HTTP server and the command line must start without it. The kernels are of use without
    # anything else of the engine.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
