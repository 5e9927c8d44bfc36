"""Latent attention written plainly: gather the whole context of every token. Slow, and meant to be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.ragged import RaggedBatch


def write_latents(new: jax.Array, pages: jax.Array, write_slot: jax.Array) -> jax.Array:
    """new [T, R + P] float32 into pages [num_pages, page_size, R + P], in place when the caller donates them."""
    flat = pages.reshape(-1, pages.shape[-1])
    return flat.at[write_slot].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)


def mla_attention_reference(
    q: jax.Array,  # [T, H, R + P] float32
    new: jax.Array,  # [T, R + P] float32
    pages: jax.Array,  # [num_pages, page_size, R + P]
    batch: RaggedBatch,
    spec: MLASpec,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [T, H, R] float32, updated pages). Memory grows with T * P * page_size."""
    num_tokens, num_rows = q.shape[0], batch.page_table.shape[0]
    pages = write_latents(new, pages, batch.write_slot)
    row = jnp.minimum(batch.row_of_token, num_rows - 1)
    context = pages[batch.page_table[row]].reshape(num_tokens, -1, spec.head_dim).astype(jnp.float32)

    is_used = jnp.arange(num_tokens) < batch.query_start[-1]
    visible = (jnp.arange(context.shape[1])[None, :] <= batch.positions[:, None]) & is_used[:, None]
    # Zeroed, not only masked: a slot that was never written may hold NaN, and 0 * NaN is NaN.
    context = jnp.where(visible[:, :, None], context, 0.0)
    scores = jnp.einsum("thd,tnd->thn", q * spec.scale, context, precision="highest")
    weights = jax.nn.softmax(jnp.where(visible[:, None, :], scores, -1e30), axis=-1)
    out = jnp.einsum("thn,tnd->thd", weights, context[..., : spec.latent_dim], precision="highest")
    return jnp.where(is_used[:, None, None], out, 0.0), pages
