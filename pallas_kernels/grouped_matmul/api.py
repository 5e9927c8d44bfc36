"""The one entry to products of sorted rows with stacked matrices (the experts of a layer)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.backend import MATMUL_BACKENDS
from jaxserve.pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight

__all__ = ["grouped_matmul"]


def grouped_matmul(
    x: jax.Array,  # [M, K] float32
    w: jax.Array | QuantizedWeight,  # [E, N, K]
    group_sizes: jax.Array,  # [E] int32
    *,
    backend: str,
) -> jax.Array:
    """Rows of x lie one group after the other; group e, of group_sizes[e] rows, is multiplied with w[e].

    Returns [M, N] float32; rows behind the last group are zero, whatever they hold. With bfloat16 weights x is
    rounded to bfloat16 and products are summed in float32. No group has a capacity, and a row's result does not
    depend on the rows of its group or on those of others. Groups without rows cost nothing on CPU.

    backend: "cpu_ffi" ("cpu_int8" is the same here), "xla", "mosaic" or "interpret", as for dense products. Raises
    ValueError when the shapes do not fit, or the dtype or the backend is unknown.
    """
    if backend not in MATMUL_BACKENDS:
        raise ValueError(f"matmul backend: got {backend!r}; allowed: {', '.join(MATMUL_BACKENDS)}")
    count = w.codes.shape[0] if isinstance(w, QuantizedWeight) else w.shape[0]
    shape = (count, *w.shape[-2:])
    is_stack = w.codes.ndim == 3 if isinstance(w, QuantizedWeight) else w.ndim == 3
    if not is_stack or x.ndim != 2 or x.shape[1] != shape[2] or group_sizes.shape != (count,):
        raise ValueError(
            f"grouped_matmul: got x {x.shape}, w {shape}, group_sizes {group_sizes.shape}; "
            "allowed: [rows, in], [groups, out, in], [groups]"
        )
    if not isinstance(w, QuantizedWeight) and w.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"w: got dtype {w.dtype}; allowed: float32, bfloat16")
    if backend in ("cpu_ffi", "cpu_int8"):
        # Loaded only here: it needs numba, which other platforms do without.
        from jaxserve.pallas_kernels.grouped_matmul.cpu_ffi import fits, grouped_matmul_cpu

        if fits(x.shape, w):
            return grouped_matmul_cpu(x.astype(jnp.float32), w, group_sizes)
    if backend in ("mosaic", "interpret") and not isinstance(w, QuantizedWeight):
        # Loaded only here: it needs JAX 0.12.
        from jaxserve.pallas_kernels.grouped_matmul import mosaic
        from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params

        if mosaic.fits(x.shape, w):
            interpret = interpreter_params() if backend == "interpret" else None
            return mosaic.grouped_matmul_mosaic(x, w, group_sizes, interpret=interpret)
    return grouped_matmul_xla(x, w, group_sizes)
