"""Paged attention written plainly: gather the whole context of every token. Slow, and meant to be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.paged_attention.token_major import write_kv
from jaxserve.pallas_kernels.ragged import RaggedBatch


def paged_attention_reference(
    q: jax.Array,  # [T, H, D] float32
    k: jax.Array,  # [T, KV, D] float32
    v: jax.Array,  # [T, KV, D] float32
    pages: jax.Array,  # [num_pages, page_size, 2, KV, D]
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,  # [H] float32
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [T, H, D] float32, updated pages). Memory grows with T * P * page_size."""
    num_tokens, num_rows = q.shape[0], batch.page_table.shape[0]
    pages = write_kv(k, v, pages, batch.write_slot)
    row = jnp.minimum(batch.row_of_token, num_rows - 1)
    context = pages[batch.page_table[row]]  # [T, P, page_size, 2, KV, D]
    context = context.reshape(num_tokens, -1, *context.shape[3:]).astype(jnp.float32)

    key_position = jnp.arange(context.shape[1])[None, :]
    position = batch.positions[:, None]
    visible = (key_position <= position) & (jnp.arange(num_tokens) < batch.query_start[-1])[:, None]
    if spec.sliding_window:
        visible &= key_position > position - spec.sliding_window
    # Zeroed, not only masked: a slot that was never written may hold NaN, and 0 * NaN is NaN.
    context = jnp.where(visible[:, :, None, None, None], context, 0.0)

    grouped = q.reshape(num_tokens, spec.num_kv_heads, spec.group_size, spec.head_dim) * spec.scale
    scores = jnp.einsum("tkgd,tnkd->tkgn", grouped, context[:, :, 0], precision="highest")
    if spec.logit_softcap:
        scores = spec.logit_softcap * jnp.tanh(scores / spec.logit_softcap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1)  # [T, KV, G]
    sink = jnp.full_like(top, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.reshape(1, spec.num_kv_heads, spec.group_size), top.shape)
    top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)  # unused tokens see nothing
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1) + jnp.exp(sink - top)
    out = jnp.einsum("tkgn,tnkd->tkgd", weights, context[:, :, 1], precision="highest")
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(q.shape), pages
