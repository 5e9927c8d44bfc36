"""Which backend computes attention and dense products on this device.

Resolved once, when an engine starts: a backend that cannot run is refused or replaced there, with the reason
in the log, and never at a later step.
"""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("cpu_ffi", "xla", "reference", "mosaic", "interpret")
# "mosaic" has products of its own for experts and quantised weights; other dense ones are XLA's. cpu_ffi multiplies in
# tiles of bfloat16 where a CPU can, and has other kernels for few rows elsewhere, and for experts; cpu_tiles has no
# such others, so that nothing depends on the number of rows. cpu_int8 is cpu_ffi, but rounds the inputs of more than a
# few rows to 8 bits where weights are quantised.
CPU_MATMUL_BACKENDS = ("cpu_ffi", "cpu_tiles", "cpu_int8")
MATMUL_BACKENDS = (*CPU_MATMUL_BACKENDS, "xla", "mosaic", "interpret")


@functools.cache
def cpu_ffi_available() -> tuple[bool, str]:
    """(whether the numba kernels run in this process, the reason if they do not). Cached."""
    try:
        from jaxserve.pallas_kernels.cpu_ffi.support import check_support
    except ImportError as error:
        return False, f"numba does not load: {error}"
    reason = check_support()
    return not reason, reason


def cpu_tiles_available() -> tuple[bool, str]:
    """As cpu_ffi_available, for products in tiles."""
    return _cpu_ffi_with("has_bf16_dot", "for bfloat16")


def cpu_bytes_available() -> tuple[bool, str]:
    """As cpu_ffi_available, for products in bytes."""
    return _cpu_ffi_with("has_byte_dot", "with VNNI")


@functools.cache
def _cpu_ffi_with(feature: str, what: str) -> tuple[bool, str]:
    """As cpu_ffi_available, where support.<feature>() is asked for too."""
    is_available, reason = cpu_ffi_available()
    if not is_available:
        return False, reason
    from jaxserve.pallas_kernels.cpu_ffi import support

    return (True, "") if getattr(support, feature)() else (False, f"the CPU lacks AVX-512 {what}")


@functools.cache
def has_tile_registers() -> bool:
    """Whether the CPU has registers for these products: it can then expand quantised weights beside them."""
    if not cpu_tiles_available()[0]:
        return False
    from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_tiles

    return has_bf16_tiles()


@functools.cache
def mosaic_available(interpret: bool = False) -> tuple[bool, str]:
    """(whether the Mosaic GPU kernels run in this process, the reason if they do not). Cached.

    interpret: in JAX's interpreter on a CPU, not on the GPU at hand.
    """
    import jax

    if jax.__version_info__ < (0, 12):
        return False, f"it needs JAX 0.12 or newer (Python 3.12 or newer), this is {jax.__version__}"
    if interpret:
        return True, ""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        return False, f"it is written for Hopper GPUs (compute capability 9.x), {device.device_kind} has {capability}"
    return True, ""


def mosaic_reason(head_dim: int, page_size: int, page_dtype: str = "bfloat16") -> str:
    """Why the Mosaic GPU kernels do not serve this shape; empty if they do."""
    if head_dim > 256:
        return f"head_dim {head_dim} is over 256"
    if not 8 <= page_size <= 1024:
        return f"page_size {page_size} is not in 8 to 1024"
    if page_dtype not in ("bfloat16", "float16", "int8", "fp8"):
        return f"pages of {page_dtype} are none of bfloat16, float16, int8, fp8"
    if page_dtype in ("int8", "fp8"):
        if head_dim > 128:
            # Beside a warpgroup that converts, the sums of one block do not fit the registers.
            return f"head_dim {head_dim} is over 128, the most for pages of {page_dtype}"
        if page_size < 32:
            # The scales of a page are one copy, and copies begin at multiples of 128 bytes.
            return f"page_size {page_size} is under 32, the least for pages of {page_dtype}"
    return ""


def mosaic_latent_reason(latent_dim: int, rope_dim: int, page_size: int, page_dtype: str = "bfloat16") -> str:
    """As mosaic_reason, for latent attention."""
    if latent_dim % 128 or latent_dim > 512 or rope_dim % 64 or rope_dim > 64:
        return f"latent vectors of {latent_dim} + {rope_dim} are not a multiple of 128 up to 512, plus 64"
    return mosaic_reason(64, page_size, page_dtype)


def resolve_attention_backend(requested: str, platform: str) -> str:
    """Backend for paged attention: `requested`, or for "auto" the best that runs on `platform`.

    platform: jax.default_backend() or Device.platform ("cpu", "gpu", ...). Raises ValueError for an unknown
    name and for a backend that cannot run here.
    """
    return _resolve("attention_backend", requested, platform, ATTENTION_BACKENDS)


def resolve_matmul_backend(requested: str, platform: str) -> str:
    """Backend for dense products, as resolve_attention_backend."""
    return _resolve("matmul_backend", requested, platform, MATMUL_BACKENDS)


def deterministic_matmul_backend(platform: str, dtype: str) -> str:
    """Backend for dense products whose rows do not depend on how many there are, as far as `platform` has one; XLA's
    agree for some numbers of rows only."""
    return "cpu_tiles" if platform == "cpu" and dtype == "bfloat16" and cpu_tiles_available()[0] else "xla"


def _resolve(field: str, requested: str, platform: str, allowed: tuple[str, ...]) -> str:
    if requested not in ("auto", *allowed):
        raise ValueError(f"{field}: got {requested!r}; allowed: auto, {', '.join(allowed)}")
    if requested in ("mosaic", "interpret"):
        return _resolve_mosaic(field, requested, platform)
    if requested == "auto" and platform == "gpu" and "mosaic" in allowed:
        is_available, reason = mosaic_available()
        if is_available:
            return "mosaic"
        logger.warning("%s: using xla instead of mosaic: %s", field, reason)
    if requested == "auto" and platform != "cpu":
        return "xla"
    if requested in ("cpu_tiles", "cpu_int8"):
        of_cpu = cpu_tiles_available if requested == "cpu_tiles" else cpu_bytes_available
        is_available, reason = of_cpu() if platform == "cpu" else (False, f"platform {platform!r}")
        if not is_available:
            raise ValueError(f"{field}: got {requested!r}, which cannot run here ({reason}); allowed: auto, xla")
        return requested
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


def _resolve_mosaic(field: str, requested: str, platform: str) -> str:
    if requested == "mosaic" and platform != "gpu":
        raise ValueError(f"{field}: got 'mosaic' on platform {platform!r}; allowed there: auto, xla")
    if requested == "interpret" and platform != "cpu":
        raise ValueError(f"{field}: got 'interpret' on platform {platform!r}; allowed there: auto, xla")
    is_available, reason = mosaic_available(interpret=requested == "interpret")
    if not is_available:
        raise ValueError(f"{field}: got {requested!r}, which cannot run here ({reason}); allowed: auto, xla")
    return requested


def check_attention_shape(requested: str, backend: str, reason: str) -> str:
    """`backend`, or "xla" where "auto" was requested and the Mosaic kernels do not serve the shape.

    reason: that of mosaic_reason or mosaic_latent_reason. Raises ValueError when the kernels were asked for by name
    and there is one.
    """
    if backend not in ("mosaic", "interpret"):
        return backend
    if not reason:
        return backend
    if requested != "auto":
        raise ValueError(f"attention_backend: got {requested!r}, but {reason}; allowed here: auto, xla")
    logger.warning("attention: using xla instead of mosaic: %s", reason)
    return "xla"


@functools.cache
def attention_backend_for(backend: str, head_dim: int, page_size: int) -> str:
    """The backend that serves this shape: `backend` itself, or "xla" where cpu_ffi has no kernel for it.

    The page layout and the computation both ask here, so they always agree. The replacement is logged once.
    Raises ValueError for an unknown name, and for a shape that "mosaic" has no kernel for.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"attention backend: got {backend!r}; allowed: {', '.join(ATTENTION_BACKENDS)}")
    if backend in ("mosaic", "interpret"):
        reason = mosaic_reason(head_dim, page_size)
        if reason:
            raise ValueError(f"attention backend: got {backend!r}, but {reason}; allowed here: xla")
        return backend
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
