"""Where programs run: an LLM in this process, a jaxserve server, any server that speaks OpenAI's protocol. No jax."""

from __future__ import annotations

import weakref
from typing import Any

from jaxserve.lang.backends.base import Backend
from jaxserve.lang.backends.local import LocalBackend

_local: weakref.WeakKeyDictionary[Any, LocalBackend] = weakref.WeakKeyDictionary()
_default: Any = None


def set_default_backend(backend: Any) -> None:
    """What programs run on that are given no backend: an LLM, a Backend, or the URL of a jaxserve server."""
    global _default
    _default = None if backend is None else as_backend(backend)


def as_backend(backend: Any) -> Backend:
    """Raises ValueError or TypeError saying what can be a backend."""
    if backend is None:
        if _default is None:
            raise ValueError("backend: none was given; allowed: backend=LLM(...), or set_default_backend(LLM(...))")
        return _default
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, str):
        from jaxserve.lang.backends.endpoint import RuntimeEndpoint

        return RuntimeEndpoint(backend)
    if hasattr(backend, "engine_thread") and hasattr(backend, "tokenizer"):
        if backend not in _local:
            _local[backend] = LocalBackend(backend)
        return _local[backend]
    raise TypeError(f"backend: got {type(backend).__name__}; allowed: an LLM, a URL, RuntimeEndpoint(...), OpenAI(...)")
