"""Residual sums and their norms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.backend import CPU_MATMUL_BACKENDS
from jaxserve.pallas_kernels.rms_norm.reference import rms_norm


def add_rms_norm(
    x: jax.Array, y: jax.Array, weight: jax.Array, *, eps: float, backend: str, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """x and y [T, K] float32 -> x + y [T, K] float32 and, times weight [K], its RMS norm in `dtype`.

    backend: that of dense products; their kernels for CPUs have one for this, in which a row has the same bits among
    any others. dtype: float32, or bfloat16 where matmul.api.input_dtype says so.
    """
    if backend in CPU_MATMUL_BACKENDS and x.shape[0]:
        # Loaded only here: it needs numba, which other platforms do without.
        from jaxserve.pallas_kernels.rms_norm import cpu_ffi

        if cpu_ffi.fits(x):
            return cpu_ffi.add_rms_norm_cpu(x, y, weight, eps=eps, dtype=dtype)
    total = x + y
    return total, rms_norm(total, weight, eps=eps).astype(dtype)
