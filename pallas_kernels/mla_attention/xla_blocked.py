"""Latent attention in jax.numpy with static shapes and run-time trip counts, for every platform.

Latent attention is attention of all query heads to one shared head whose values are a part of its keys: the walk
over pages is that of paged_attention/xla_blocked.py, for decodes, chunks and any mixture.
"""

from __future__ import annotations

import jax
from jaxserve.pallas_kernels.mla_attention.reference import write_latents
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.paged_attention.xla_blocked import BlockView, attend
from jaxserve.pallas_kernels.ragged import RaggedBatch


def mla_attention_xla(
    q: jax.Array,  # [T, H, R + P] float32
    new: jax.Array,  # [T, R + P] float32
    pages: jax.Array,  # [num_pages, page_size, R + P]
    batch: RaggedBatch,
    spec: MLASpec,
    *,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [T, H, R] float32, updated pages)."""
    pages = write_latents(new, pages, batch.write_slot)
    latent_dim = spec.latent_dim
    view = BlockView(latent_dim, lambda block: (block[..., None, :], block[..., None, :latent_dim]))
    as_one_head = AttentionSpec(spec.num_heads, 1, spec.head_dim, spec.scale)
    out = attend(q[:, None] * spec.scale, pages, batch, as_one_head, view, deterministic=deterministic)
    return out[:, 0], pages
