"""The page arrays of a layer, whatever its kind of attention."""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.mla_attention.spec import MLASpec, latent_page_bytes, latent_page_shape
from jaxserve.pallas_kernels.paged_attention import api as paged_attention
from jaxserve.pallas_kernels.paged_attention.quantized_pages import page_struct
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec, check_page_size

LayerSpec = AttentionSpec | MLASpec


def page_array_shape(spec: LayerSpec, num_pages: int, page_size: int, backend: str) -> tuple[int, ...]:
    """Shape of one layer's array of `num_pages` pages for `backend`. The page is the leading axis; the rest
    belongs to the backend. Raises ValueError for an unknown backend or a page size that is no power of two."""
    if isinstance(spec, MLASpec):
        check_page_size(page_size)
        return latent_page_shape(spec, num_pages, page_size)
    return paged_attention.page_array_shape(spec, num_pages, page_size, backend)


def abstract_pages(spec: LayerSpec, num_pages: int, page_size: int, page_dtype: str, backend: str) -> Any:
    """Shapes and types of one layer's pages: one array, or the codes and scales of a quantised page_dtype."""
    page_bytes(spec, page_size, page_dtype, backend)  # raises where there are no such pages
    return page_struct(page_array_shape(spec, num_pages, page_size, backend), page_dtype)


def page_bytes(spec: LayerSpec, page_size: int, page_dtype: str, backend: str = "xla") -> int:
    """Bytes of one page of one layer. Raises ValueError for an unknown `page_dtype`."""
    if isinstance(spec, MLASpec):
        return latent_page_bytes(spec, page_size, page_dtype)
    return paged_attention.page_bytes(spec, page_size, page_dtype, backend)


def writes_in_place(spec: LayerSpec, page_size: int, page_dtype: str, backend: str, platform: str) -> bool:
    """Whether new entries go into donated pages without a copy of the whole array. Only the XLA forms on CPU with
    bfloat16 pages copy: choose float32 pages there."""
    if isinstance(spec, MLASpec):
        return platform != "cpu" or page_dtype == "float32" or backend == "interpret"
    return paged_attention.writes_in_place(spec, page_size, page_dtype, backend, platform)
