"""Which backend computes attention and dense products on this device.

Resolved once, when an engine starts: a backend that cannot run is refused or replaced there, with the reason
in the log, and never at a later step.
"""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("cpu_ffi", "xla", "reference")
MATMUL_BACKENDS = ("cpu_ffi", "xla")


@functools.cache
def cpu_ffi_available() -> tuple[bool, str]:
    """(whether the numba kernels run in this process, the reason if they do not). Cached."""
    try:
        from jaxserve.pallas_kernels.cpu_ffi.support import check_support
    except ImportError as error:
        return False, f"numba does not load: {error}"
    reason = check_support()
    return not reason, reason


def resolve_attention_backend(requested: str, platform: str) -> str:
    """Backend for paged attention: `requested`, or for "auto" the best that runs on `platform`.

    platform: jax.default_backend() or Device.platform ("cpu", "gpu", ...). Raises ValueError for an unknown
    name and for a backend that cannot run here.
    """
    return _resolve("attention_backend", requested, platform, ATTENTION_BACKENDS)


def resolve_matmul_backend(requested: str, platform: str) -> str:
    """Backend for dense products, as resolve_attention_backend."""
    return _resolve("matmul_backend", requested, platform, MATMUL_BACKENDS)


def _resolve(field: str, requested: str, platform: str, allowed: tuple[str, ...]) -> str:
    if requested not in ("auto", *allowed):
        raise ValueError(f"{field}: got {requested!r}; allowed: auto, {', '.join(allowed)}")
    if requested == "auto" and platform != "cpu":
        return "xla"
    if requested not in ("auto", "cpu_ffi"):
        return requested
    if platform != "cpu":
        raise ValueError(f"{field}: got 'cpu_ffi' on platform {platform!r}; allowed there: auto, xla")
    is_available, reason = cpu_ffi_available()
    if is_available:
        return "cpu_ffi"
    if requested == "cpu_ffi":
        raise ValueError(f"{field}: got 'cpu_ffi', which cannot run here ({reason}); allowed: auto, xla")
    logger.warning("%s: using xla instead of cpu_ffi: %s", field, reason)
    return "xla"


@functools.cache
def attention_backend_for(backend: str, head_dim: int, page_size: int) -> str:
    """The backend that serves this shape: `backend` itself, or "xla" where cpu_ffi has no kernel for it.

    The page layout and the computation both ask here, so they always agree. The replacement is logged once.
    Raises ValueError for an unknown name.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention backend: got {backend!r}; allowed: {', '.join(ATTENTION_BACKENDS)}")
    if backend != "cpu_ffi":
        return backend
    reason = ""
    if head_dim % 16 or head_dim > 512:
        reason = f"head_dim {head_dim} is not a multiple of 16 up to 512"
    elif page_size > 1024:
        reason = f"page_size {page_size} is over 1024"
    if not reason:
        return "cpu_ffi"
    logger.warning("attention: using xla instead of cpu_ffi: %s", reason)
    return "xla"
