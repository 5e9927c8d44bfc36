"""How the work of latent attention is cut into blocks of a GPU: computed on the device from the batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import KEYS, split_runs
from jaxserve.pallas_kernels.ragged import RaggedBatch


@dataclasses.dataclass(frozen=True)
class MLAPlan:
    """items [n, 4] int32: token, first block of 64 keys, number of blocks, index of the partial result or -1 where
    the item is the whole context of its token. first_part, num_parts [T] int32: the partial results of each token
    (0 where there is one item or none). max_parts: length of the table of partial results."""

    items: jax.Array
    first_part: jax.Array
    num_parts: jax.Array
    max_parts: int


def plan_items(batch: RaggedBatch, *, max_blocks: int, target_items: int, min_blocks: int, split: bool) -> MLAPlan:
    """Cut every token's context into runs, about `target_items` in all; with `split` False into one run each."""
    num_tokens = batch.positions.shape[0]
    is_used = jnp.arange(num_tokens) < batch.query_start[-1]
    blocks = jnp.where(is_used, batch.positions // KEYS + 1, 0)
    max_items, max_parts = num_tokens, 1
    if split:
        max_items = min(num_tokens * -(-max_blocks // min_blocks), target_items + num_tokens)
        # A split token has more blocks than a run: fewer than target_items of them, and each adds one run at most.
        max_parts = max(1, min(max_items, 2 * target_items))
    plan = split_runs(
        blocks,
        jnp.zeros_like(blocks),
        target_items=target_items,
        min_blocks=min_blocks if split else max_blocks,
        max_items=max_items,
    )
    num_parts = jnp.where(plan.num_items > 1, plan.num_items, 0)
    first_part = jnp.cumsum(num_parts) - num_parts
    token = plan.items[:, 0]
    index = first_part[token] + jnp.arange(max_items, dtype=jnp.int32) - plan.first_item[token]
    part = jnp.where(num_parts[token] > 0, index, -1)
    return MLAPlan(
        jnp.concatenate([plan.items, part[:, None]], axis=1).astype(jnp.int32),
        first_part.astype(jnp.int32),
        num_parts.astype(jnp.int32),
        max_parts,
    )
