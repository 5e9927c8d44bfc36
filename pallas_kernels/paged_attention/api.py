"""The one entry to attention over paged K/V, whatever the backend."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.backend import attention_backend_for, mosaic_reason
from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES, Pages, QuantizedPages, code_kind
from jaxserve.pallas_kernels.paged_attention.reference import paged_attention_reference
from jaxserve.pallas_kernels.paged_attention.spec import (
    HEAD_MAJOR,
    PADDED_HEAD_MAJOR,
    PAGE_DTYPES,
    TOKEN_MAJOR,
    AttentionSpec,
    check_page_size,
    element_bytes,
    page_array_shape_of,
)
from jaxserve.pallas_kernels.paged_attention.xla_blocked import paged_attention_xla
from jaxserve.pallas_kernels.ragged import RaggedBatch

__all__ = ["AttentionSpec", "page_array_shape", "page_bytes", "paged_attention", "writes_in_place"]


_LAYOUTS = {"cpu_ffi": HEAD_MAJOR, "mosaic": PADDED_HEAD_MAJOR, "interpret": PADDED_HEAD_MAJOR}


def page_array_shape(spec: AttentionSpec, num_pages: int, page_size: int, backend: str) -> tuple[int, ...]:
    """Shape of one layer's array of `num_pages` pages for `backend`. The page is the leading axis; the rest
    belongs to the backend. Raises ValueError for an unknown backend or a page size that is no power of two."""
    check_page_size(page_size)
    layout = _LAYOUTS.get(attention_backend_for(backend, spec.head_dim, page_size), TOKEN_MAJOR)
    return page_array_shape_of(layout, spec, num_pages, page_size)


def page_bytes(spec: AttentionSpec, page_size: int, page_dtype: str, backend: str = "xla") -> int:
    """Bytes of one page (K and V, scales included) of one layer. Raises ValueError for an unknown `page_dtype`."""
    shape = page_array_shape(spec, 1, page_size, backend)
    scales = 4 * math.prod(shape[:-1]) if page_dtype in CODES else 0
    return math.prod(shape) * element_bytes(page_dtype) + scales


def writes_in_place(spec: AttentionSpec, page_size: int, page_dtype: str, backend: str, platform: str) -> bool:
    """Whether new K/V go into donated pages without a copy of the whole array. Only the XLA forms on CPU copy, with
    bfloat16 and fp8 pages: choose float32 or int8 there."""
    chosen = attention_backend_for(backend, spec.head_dim, page_size)
    return chosen in _LAYOUTS or platform != "cpu" or page_dtype in ("float32", "int8")


def paged_attention(
    q: jax.Array,  # [T, H, D] float32
    k: jax.Array,  # [T, KV, D] float32
    v: jax.Array,  # [T, KV, D] float32
    pages: Pages,  # page_array_shape(...), float32, bfloat16 or codes; for mosaic float16 too, not float32
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    page_size: int,
    backend: str,
    deterministic: bool = False,
    cascade: bool = True,
    sinks: jax.Array | None = None,  # [H] float32
) -> tuple[jax.Array, Pages]:
    """Write this step's K/V into the pages, then attend to them. Returns (out [T, H, D] float32, pages).

    Donate `pages`: the returned array is then the same memory. Tokens past the last row give zeros.
    With `deterministic` a query token's result is bitwise the same whether it decodes or lies anywhere in a
    chunk, whatever the other rows, the padding and the number of threads.

    With `cascade` decode rows that share pages read them together, where the backend can.

    Raises ValueError when shapes, page dtype or `sinks` do not agree with `spec`.
    """
    expected = page_array_shape(spec, pages.shape[0], page_size, backend)
    heads, kv = (spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
    for name, array, allowed in (("q", q, heads), ("k", k, kv), ("v", v, kv)):
        if array.ndim != 3 or array.shape[1:] != allowed:
            raise ValueError(f"{name}: got shape {array.shape}; allowed: [tokens, {allowed[0]}, {allowed[1]}]")
    if pages.shape != expected:
        raise ValueError(f"pages: got shape {pages.shape}; allowed for backend {backend!r}: {expected}")
    chosen = attention_backend_for(backend, spec.head_dim, page_size)
    page_dtype = code_kind(pages.dtype) if isinstance(pages, QuantizedPages) else pages.dtype.name
    if page_dtype in CODES and not isinstance(pages, QuantizedPages):
        raise ValueError(f"pages: got an array of {page_dtype}; allowed: QuantizedPages, with scales")
    if chosen in ("mosaic", "interpret"):
        if reason := mosaic_reason(spec.head_dim, page_size, page_dtype):
            raise ValueError(f"pages: {reason}")
    elif page_dtype not in PAGE_DTYPES:
        raise ValueError(f"pages: got dtype {page_dtype}; allowed: {', '.join(PAGE_DTYPES)}")
    if spec.has_sinks != (sinks is not None):
        raise ValueError(f"sinks: got {'none' if sinks is None else 'an array'} with has_sinks={spec.has_sinks}")
    if sinks is not None and sinks.shape != (spec.num_heads,):
        raise ValueError(f"sinks: got shape {sinks.shape}; allowed: ({spec.num_heads},)")

    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if chosen == "cpu_ffi":
        # Loaded only here: it needs numba, which other platforms do without.
        from jaxserve.pallas_kernels.paged_attention.cpu_ffi import paged_attention_cpu

        return paged_attention_cpu(q, k, v, pages, batch, spec, cascade=cascade, sinks=sinks)
    if chosen in ("mosaic", "interpret"):
        # Loaded only here: it needs JAX 0.12.
        from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params
        from jaxserve.pallas_kernels.paged_attention.mosaic import paged_attention_mosaic

        interpret = interpreter_params() if chosen == "interpret" else None
        return paged_attention_mosaic(
            q, k, v, pages, batch, spec,
            deterministic=deterministic, cascade=cascade, sinks=sinks, interpret=interpret,
        )  # fmt: skip
    if chosen == "reference":
        return paged_attention_reference(q, k, v, pages, batch, spec, sinks=sinks)
    return paged_attention_xla(q, k, v, pages, batch, spec, deterministic=deterministic, sinks=sinks)
