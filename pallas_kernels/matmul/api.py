"""Dense products with weights stored [out, in], whatever the backend and the form of the weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.backend import CPU_MATMUL_BACKENDS, MATMUL_BACKENDS
from jaxserve.pallas_kernels.matmul.planar import expand, take_planar_rows
from jaxserve.pallas_kernels.matmul.quantized import (
    BLOCK,
    AnyWeight,
    DoubleWeight,
    JoinedWeight,
    PlanarWeight,
    QuantizedWeight,
    dequantize,
)

# XLA:CPU takes other paths for one row (it widens the whole weight first) and for two: four are not slower, and
# give every row the bits that it has among any larger number of rows.
_MIN_XLA_ROWS = 4
# Up to which products with an expanded copy, where the CPU multiplies bfloat16, are as fast and exacter.
_BYTE_ROWS = 16
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def linear(x: jax.Array, w: AnyWeight, *, backend: str) -> jax.Array:
    """x [T, K] float32 or bfloat16 times w [N, K] (float32 or bfloat16) -> [T, N] float32.

    With bfloat16 weights x is rounded to bfloat16 and products are summed in float32. Quantised weights are expanded
    for each product, to bfloat16 unless they ask for float32, or taken from the expanded copy of a DoubleWeight. Planar
    ones are multiplied as stored by "mosaic" ("interpret": the same kernel in JAX's interpreter), unless rows are many.
    Backends "cpu_ffi" and "cpu_tiles" multiply in tiles where the CPU can and the weight fits, whatever T is, so that a
    row has the same bits in any; quantised weights are expanded to them. Where tile registers are missing "cpu_ffi"
    has other kernels for quantised weights and few rows (T fixes that when a program is traced), which multiply them as
    stored, with x in float32; and where tiles cannot be had, for all weights. "cpu_int8" is "cpu_ffi" but for quantised
    weights whose codes are whole numbers and more than a few rows, where there are no tile registers: x is rounded to
    8 bits for those (see cpu_ffi_byte_tiles), and they are multiplied as they are stored.
    Raises ValueError when the shapes do not fit, or the dtype or backend is unknown.
    """
    if backend not in MATMUL_BACKENDS:
        raise ValueError(f"matmul backend: got {backend!r}; allowed: {', '.join(MATMUL_BACKENDS)}")
    if x.ndim != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"linear: got x {x.shape} and w {w.shape}; allowed: [tokens, in] and [out, in]")
    w = _only_form(x.shape[0], w, backend)
    if isinstance(w, JoinedWeight):
        return jnp.concatenate([linear(x, part, backend=backend) for part in w.parts], axis=1)
    if isinstance(w, QuantizedWeight):
        return _linear_quantized(x, w, backend)
    if isinstance(w, PlanarWeight):
        return _linear_planar(x, w, backend)
    if w.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"w: got dtype {w.dtype}; allowed: float32, bfloat16")
    if backend in CPU_MATMUL_BACKENDS and x.shape[0]:
        # Loaded only here: they need numba, which other platforms do without.
        from jaxserve.pallas_kernels.matmul import cpu_ffi, cpu_ffi_tiles

        if cpu_ffi_tiles.fits(w):
            return cpu_ffi_tiles.linear_tiles(x, w)
        most = 0 if backend == "cpu_tiles" else cpu_ffi.MAX_ROWS[w.dtype.name]
        if x.shape[0] <= most and x.shape[1] and x.shape[1] % cpu_ffi.STEP == 0:
            return cpu_ffi.linear_cpu(x.astype(jnp.float32), w)
    return linear_xla(x, w)


def gated_linear(x: jax.Array, w: AnyWeight, *, activation: str, backend: str, dtype: Any = jnp.float32) -> jax.Array:
    """activation(x @ gate.T) * (x @ up.T) -> [T, N] in `dtype`, for w [2 N, K] that holds gate and, below it, up.

    activation: as `activate` has them. Types, backend and errors as in `linear`. dtype: float32, or bfloat16 where
    `input_dtype` says so.
    """
    if backend in CPU_MATMUL_BACKENDS and x.ndim == 2 and x.shape[0] and x.shape[1:] == w.shape[1:]:
        # Loaded only here: they need numba, which other platforms do without.
        from jaxserve.pallas_kernels.matmul import cpu_ffi_tiles

        w = _only_form(x.shape[0], w, backend)
        in_bytes = _takes_bytes(x.shape[0], w, backend)
        if activation in _ACTIVATIONS and cpu_ffi_tiles.fits_gated(w, in_bytes=in_bytes):
            return cpu_ffi_tiles.linear_gated(x, w, activation, dtype, in_bytes=in_bytes)
    gate, up = jnp.split(linear(x, w, backend=backend), 2, axis=-1)
    return (activate(gate, activation) * up).astype(dtype)


def input_dtype(num_rows: int, w: AnyWeight, *, backend: str) -> Any:
    """bfloat16 if `linear` of so many rows begins with rounding them to it and takes them as well in that type: then
    whoever computes them may round them already, for the same result. Else float32."""
    if backend in CPU_MATMUL_BACKENDS and num_rows:
        from jaxserve.pallas_kernels.matmul import cpu_ffi_tiles

        w = _only_form(num_rows, w, backend)
        if all(cpu_ffi_tiles.takes_bfloat16(num_rows, part) for part in getattr(w, "parts", (w,))):
            return jnp.bfloat16
    return jnp.float32


def activate(x: jax.Array, name: str) -> jax.Array:
    """ "silu" or "gelu_tanh" (Hendrycks & Gimpel, 2016, arXiv:1606.08415) of every element."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}; allowed: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name](x)


def _only_form(num_rows: int, w: AnyWeight, backend: str) -> AnyWeight:
    """Of a weight that is kept twice what a product with so many rows takes; others as they are."""
    if not isinstance(w, DoubleWeight):
        return w
    return w.stored if _takes_blocks(num_rows, w.stored, backend) else w.dense


def _takes_blocks(num_rows: int, w: AnyWeight, backend: str) -> bool:
    """Whether so few rows are better off with the blocks than with a copy in bfloat16."""
    if backend in ("mosaic", "interpret"):
        return _fits_planar(num_rows)
    if backend not in CPU_MATMUL_BACKENDS:
        return False
    from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_dot, has_bf16_tiles
    from jaxserve.pallas_kernels.matmul import cpu_ffi, cpu_ffi_tiles

    copied = _BYTE_ROWS if has_bf16_dot() else 0
    if num_rows > copied and all(_takes_bytes(num_rows, part, backend) for part in getattr(w, "parts", (w,))):
        return True
    if has_bf16_tiles() and all(cpu_ffi_tiles.fits(part) for part in getattr(w, "parts", (w,))):
        return True  # expanding in the cache, beside the multiplication, costs less than reading the copy
    return backend != "cpu_tiles" and num_rows <= cpu_ffi.BLOCK_ROWS


def _takes_bytes(num_rows: int, w: AnyWeight, backend: str) -> bool:
    """Whether x may be rounded to 8 bits, and that is worth it: few rows cost what reading the weight costs, and tile
    registers are faster with bfloat16."""
    if backend != "cpu_int8":
        return False
    from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_tiles
    from jaxserve.pallas_kernels.matmul import cpu_ffi, cpu_ffi_tiles

    return num_rows > cpu_ffi.BLOCK_ROWS and cpu_ffi_tiles.fits_bytes(w) and not has_bf16_tiles()


def _linear_quantized(x: jax.Array, w: QuantizedWeight, backend: str) -> jax.Array:
    if backend in CPU_MATMUL_BACKENDS and x.shape[0] and x.shape[1] and x.shape[1] % BLOCK == 0:
        from jaxserve.pallas_kernels.cpu_ffi.support import has_bf16_tiles
        from jaxserve.pallas_kernels.matmul import cpu_ffi, cpu_ffi_quantized, cpu_ffi_tiles

        if _takes_bytes(x.shape[0], w, backend):
            return cpu_ffi_tiles.linear_tiles(x, w, in_bytes=True)
        few = 0 if has_bf16_tiles() or backend == "cpu_tiles" else cpu_ffi.BLOCK_ROWS
        if cpu_ffi_tiles.fits(w) and x.shape[0] > few:
            return cpu_ffi_tiles.linear_tiles(x, w)
        if backend != "cpu_tiles" and x.shape[0] <= cpu_ffi_quantized.MAX_ROWS:
            return cpu_ffi_quantized.linear_cpu_quantized(x.astype(jnp.float32), w)
        return linear(x, cpu_ffi_quantized.expand_cpu(w), backend=backend)
    return linear(x, dequantize(w).astype(w.expanded), backend=backend)


def _fits_planar(num_rows: int) -> bool:
    # Loaded only here: it needs JAX 0.12.
    from jaxserve.pallas_kernels.matmul.mosaic import MAX_ROWS

    return 0 < num_rows <= MAX_ROWS


def _linear_planar(x: jax.Array, w: PlanarWeight, backend: str) -> jax.Array:
    if backend in ("mosaic", "interpret") and _fits_planar(x.shape[0]):
        from jaxserve.pallas_kernels.matmul.mosaic import quant_matmul_mosaic
        from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params

        return quant_matmul_mosaic(x, w, interpret=interpreter_params() if backend == "interpret" else None)
    return linear_xla(x, expand(w).astype(jnp.bfloat16))


def take_rows(table: AnyWeight, rows: jax.Array) -> jax.Array:
    """Rows of a table [out, in], in any form but a joined one, by index [T] -> [T, in] float32."""
    if isinstance(table, DoubleWeight):
        table = table.stored
    if isinstance(table, PlanarWeight):
        return take_planar_rows(table, rows)
    if isinstance(table, QuantizedWeight):
        shape = rows.shape[0], table.shape[1]
        return dequantize(dataclasses.replace(table, codes=table.codes[rows], shape=shape))
    return table[rows].astype(jnp.float32)


def linear_per_head(x: jax.Array, w: jax.Array, *, backend: str) -> jax.Array:
    """x [T, H, K] float32 times w [H, N, K], head by head -> [T, H, N] float32; types and backend as in `linear`."""
    if backend not in MATMUL_BACKENDS:
        raise ValueError(f"matmul backend: got {backend!r}; allowed: {', '.join(MATMUL_BACKENDS)}")
    num_tokens, num_heads, columns = x.shape
    if backend in ("cpu_ffi", "cpu_int8"):
        # Loaded only here: they need numba, which other platforms do without.
        from jaxserve.pallas_kernels.grouped_matmul.cpu_ffi import grouped_matmul_cpu
        from jaxserve.pallas_kernels.matmul.cpu_ffi import MAX_ROWS, STEP

        if 0 < num_tokens <= MAX_ROWS[w.dtype.name] and columns and columns % STEP == 0:
            rows = x.swapaxes(0, 1).reshape(num_heads * num_tokens, columns)
            out = grouped_matmul_cpu(rows, w, jnp.full((num_heads,), num_tokens, jnp.int32))
            return out.reshape(num_heads, num_tokens, -1).swapaxes(0, 1)
    if num_tokens < _MIN_XLA_ROWS:
        x = jnp.pad(x, ((0, _MIN_XLA_ROWS - num_tokens), (0, 0), (0, 0)))
    out = lax.dot_general(x.astype(w.dtype), w, (((2,), (2,)), ((1,), (0,))), preferred_element_type=jnp.float32)
    return out.swapaxes(0, 1)[:num_tokens]


def linear_xla(x: jax.Array, w: jax.Array) -> jax.Array:
    """`linear` by XLA's dot_general, on at least _MIN_XLA_ROWS rows."""
    num_tokens = x.shape[0]
    if num_tokens < _MIN_XLA_ROWS:
        x = jnp.pad(x, ((0, _MIN_XLA_ROWS - num_tokens), (0, 0)))
    out = lax.dot_general(
        x.astype(w.dtype),
        w,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return out[:num_tokens]
