"""What every backend of latent attention needs to know about a layer, and how its pages lie."""

from __future__ import annotations

import dataclasses

from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES
from jaxserve.pallas_kernels.paged_attention.spec import element_bytes


@dataclasses.dataclass(frozen=True)
class MLASpec:
    """One layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); static in every program.

    The up-projections of keys and values are absorbed into queries and output, so that all heads attend to one
    latent vector per token, which is key and, without its rotated part, value as well.

    num_heads   query heads H
    latent_dim  R, of the compressed keys and values
    rope_dim    P, of the rotated part of a key, shared by all heads
    scale       factor on q . k

    Raises ValueError naming the field, the value seen and the values allowed.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float

    def __post_init__(self) -> None:
        for name in ("num_heads", "latent_dim", "rope_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: 1 or more")

    @property
    def head_dim(self) -> int:
        """R + P: one token's vector in a page."""
        return self.latent_dim + self.rope_dim


def latent_page_shape(spec: MLASpec, num_pages: int, page_size: int) -> tuple[int, ...]:
    """One layer's pages: [page, token, latent then rotated part], for every backend."""
    return (num_pages, page_size, spec.head_dim)


def latent_page_bytes(spec: MLASpec, page_size: int, page_dtype: str) -> int:
    """Bytes of one page of one layer. Raises ValueError for an unknown `page_dtype`, and for quantised pages."""
    if page_dtype in CODES:
        raise ValueError(f"page_dtype: got {page_dtype!r} with latent attention; allowed: float32, bfloat16")
    return page_size * spec.head_dim * element_bytes(page_dtype)
