"""What every attention backend needs to know about a layer, and how each of them stores pages."""

from __future__ import annotations

import dataclasses

# [page, token, 2, kv_head, head_dim]: one token is one contiguous run, which XLA's scatter and gather want.
TOKEN_MAJOR = "token_major"
# [page, kv_head, 2, token, head_dim]: a kernel that walks one head's pages reads contiguous memory.
HEAD_MAJOR = "head_major"
# The same with head_dim padded to a multiple of 64, which shared-memory layouts of the GPU want.
PADDED_HEAD_MAJOR = "padded_head_major"
PADDED_COLUMNS = 64

PAGE_DTYPES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention layer; static in every program.

    num_heads       query heads H
    num_kv_heads    key/value heads KV; H is a multiple of it, query head h reads kv head h // (H // KV)
    head_dim        D, of queries, keys and values alike
    scale           factor on q . k
    sliding_window  0: none; w: a token sees the last w positions, itself included
    logit_softcap   0: none; c: a score s becomes c * tanh(s / c) before masking
    has_sinks       one learned logit per head takes part in the softmax and adds nothing to the sum

    Raises ValueError naming the field, the value seen and the values allowed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int = 0
    logit_softcap: float = 0.0
    has_sinks: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: got {self.num_heads} with num_kv_heads {self.num_kv_heads}; "
                "allowed: a positive multiple of num_kv_heads"
            )
        if self.head_dim < 1:
            raise ValueError(f"head_dim: got {self.head_dim}; allowed: 1 or more")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window: got {self.sliding_window}; allowed: 0 (none) or more")
        if not self.logit_softcap >= 0.0:
            raise ValueError(f"logit_softcap: got {self.logit_softcap}; allowed: 0 (none) or more")

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless `page_size` is a power of two."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size: got {page_size}; allowed: a power of two")


def page_array_shape_of(layout: str, spec: AttentionSpec, num_pages: int, page_size: int) -> tuple[int, ...]:
    """Shape of one layer's page array under `layout`; the page is the leading axis."""
    if layout in (HEAD_MAJOR, PADDED_HEAD_MAJOR):
        padding = -spec.head_dim % PADDED_COLUMNS if layout == PADDED_HEAD_MAJOR else 0
        return (num_pages, spec.num_kv_heads, 2, page_size, spec.head_dim + padding)
    return (num_pages, page_size, 2, spec.num_kv_heads, spec.head_dim)


def element_bytes(page_dtype: str) -> int:
    """Bytes of one stored value. Raises ValueError for an unknown `page_dtype`."""
    if page_dtype not in PAGE_DTYPES:
        raise ValueError(f"page_dtype: got {page_dtype!r}; allowed: {', '.join(PAGE_DTYPES)}")
    return PAGE_DTYPES[page_dtype]
