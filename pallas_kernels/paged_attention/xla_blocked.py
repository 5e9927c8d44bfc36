"""Ragged paged attention in jax.numpy with static shapes and run-time trip counts.

The last resort on every platform. Contexts are walked in blocks of pages with an online softmax, so the cost
follows the lengths that are there and memory does not grow with the context. Rows that decode go through one
vectorised pass over all rows; rows with more tokens are cut into tiles of one row each. With
`deterministic` every token takes the first form, in groups of a fixed size, so that its arithmetic does not
depend on the kind or the size of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.paged_attention.token_major import write_kv
from jaxserve.pallas_kernels.ragged import RaggedBatch

BLOCK_TOKENS = 128  # context tokens per step of the online softmax
TILE_TOKENS = 32  # query tokens of one row per tile
DETERMINISTIC_GROUP = 8  # query tokens computed at once when deterministic
_MASKED = -1e30  # finite, so that a block with nothing visible gives weights of zero and not NaN

# (running maximum [..., G], running sum [..., G], accumulated values [..., G, E])
_Softmax = tuple[jax.Array, jax.Array, jax.Array]


def paged_attention_xla(
    q: jax.Array,  # [T, H, D] float32
    k: jax.Array,  # [T, KV, D] float32
    v: jax.Array,  # [T, KV, D] float32
    pages: jax.Array,  # [num_pages, page_size, 2, KV, D]
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    deterministic: bool = False,
    sinks: jax.Array | None = None,  # [H] float32
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [T, H, D] float32, updated pages)."""
    pages = write_kv(k, v, pages, batch.write_slot)
    num_tokens = q.shape[0]
    grouped = q.reshape(num_tokens, spec.num_kv_heads, spec.group_size, spec.head_dim) * spec.scale
    sink = None if sinks is None else sinks.reshape(spec.num_kv_heads, spec.group_size)
    view = BlockView(spec.head_dim, lambda block: (block[..., 0, :, :], block[..., 1, :, :]))
    out = attend(grouped, pages, batch, spec, view, deterministic=deterministic, sink=sink)
    return out.reshape(q.shape), pages


@dataclasses.dataclass(frozen=True)
class BlockView:
    """What pages [num_pages, page_size, ...] hold.

    value_dim   E, of a value
    split       block [..., tokens, *one token's shape] -> keys [..., tokens, KV, D], values [..., tokens, KV, E]
    """

    value_dim: int
    split: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend(
    q: jax.Array,  # [T, KV, G, D], scaled
    pages: jax.Array,  # [num_pages, page_size, ...], this step's tokens written
    batch: RaggedBatch,
    spec: AttentionSpec,
    view: BlockView,
    *,
    deterministic: bool,
    sink: jax.Array | None = None,  # [KV, G]
) -> jax.Array:
    """Attention of every token to its row's pages. Returns [T, KV, G, E]; tokens past the last row give zeros."""
    if deterministic:
        return _all_tokens_in_groups(q, pages, batch, spec, view, sink)
    out = _decode_rows(q, pages, batch, spec, view, sink)
    return _chunk_tiles(out, q, pages, batch, spec, view, sink) if q.shape[0] > 1 else out


def _decode_rows(
    q: jax.Array, pages: jax.Array, batch: RaggedBatch, spec: AttentionSpec, view: BlockView, sink: jax.Array | None
) -> jax.Array:
    """Rows with exactly one token, all at once; zeros everywhere else. Returns [T, KV, G, E]."""
    first = batch.query_start[:-1]
    is_decode = batch.query_start[1:] - first == 1
    token = jnp.where(is_decode, first, 0)
    out = _attend_each(q[token], batch.page_table, batch.positions[token], is_decode, pages, spec, view, sink)
    return _zeros(q, view).at[jnp.where(is_decode, first, q.shape[0])].set(out, mode="drop")


def _all_tokens_in_groups(
    q: jax.Array, pages: jax.Array, batch: RaggedBatch, spec: AttentionSpec, view: BlockView, sink: jax.Array | None
) -> jax.Array:
    """Every token by the same program on DETERMINISTIC_GROUP tokens. Returns [T, KV, G, E]."""
    num_tokens, num_rows = q.shape[0], batch.page_table.shape[0]
    total = batch.query_start[-1]

    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = state
        token = start + jnp.arange(DETERMINISTIC_GROUP)
        is_used = token < total
        at = jnp.minimum(token, num_tokens - 1)
        tables = batch.page_table[jnp.minimum(batch.row_of_token[at], num_rows - 1)]
        part = _attend_each(q[at], tables, batch.positions[at], is_used, pages, spec, view, sink)
        out = out.at[jnp.where(is_used, token, num_tokens)].set(part, mode="drop")
        return start + DETERMINISTIC_GROUP, out

    start = jnp.zeros((), jnp.int32)
    return lax.while_loop(lambda state: state[0] < total, body, (start, _zeros(q, view)))[1]


def _attend_each(
    q: jax.Array,  # [N, KV, G, D], scaled
    tables: jax.Array,  # [N, P]
    positions: jax.Array,  # [N]
    is_used: jax.Array,  # [N] bool
    pages: jax.Array,
    spec: AttentionSpec,
    view: BlockView,
    sink: jax.Array | None,
) -> jax.Array:
    """N query tokens, each over its own page list. Returns [N, KV, G, E]; unused ones are zero."""
    page_size = pages.shape[1]
    block_pages = _block_pages(page_size)
    last = jnp.where(is_used, positions, -1)
    first = _first_visible(last, spec)

    def body(i: jax.Array, state: _Softmax) -> _Softmax:
        table = lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        block = pages[table]  # [N, block_pages, page_size, ...]
        block = block.reshape(q.shape[0], block_pages * page_size, *block.shape[3:]).astype(jnp.float32)
        position = i * block_pages * page_size + jnp.arange(block.shape[1])
        visible = (position <= last[:, None]) & (position >= first[:, None])  # [N, n]
        keys, values = view.split(jnp.where(visible.reshape(*visible.shape, *(1,) * (block.ndim - 2)), block, 0.0))
        scores = jnp.einsum("tkgd,tnkd->tkgn", q, keys, precision="highest")
        scores = _cap_and_mask(scores, visible[:, None, None, :], spec)
        return _online(state, scores, lambda w: jnp.einsum("tkgn,tnkd->tkgd", w, values, precision="highest"))

    tables = _pad_to_blocks(tables, block_pages)
    block_tokens = block_pages * page_size
    lowest = jnp.min(jnp.where(is_used, first, jnp.iinfo(jnp.int32).max)) // block_tokens
    stop = jnp.max(last) // block_tokens + 1
    return _finish(lax.fori_loop(jnp.minimum(lowest, stop), stop, body, _empty(q, view)), sink)


def _chunk_tiles(
    out: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    spec: AttentionSpec,
    view: BlockView,
    sink: jax.Array | None,
) -> jax.Array:
    """Fill in rows with more than one token, tile by tile. `out` is [T, KV, G, E], `q` [T, KV, G, D]."""
    num_tokens, num_rows = q.shape[0], batch.page_table.shape[0]
    tile = min(TILE_TOKENS, num_tokens)
    counts = batch.query_start[1:] - batch.query_start[:-1]
    num_tiles = jnp.where(counts > 1, (counts + tile - 1) // tile, 0)
    tile_end = jnp.cumsum(num_tiles)  # [R]

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.minimum(jnp.searchsorted(tile_end, i, side="right"), num_rows - 1)
        index = i - (tile_end[row] - num_tiles[row])
        token = batch.query_start[row] + index * tile + jnp.arange(tile)
        is_used = token < batch.query_start[row + 1]
        at = jnp.minimum(token, num_tokens - 1)
        part = _attend_tile(q[at], batch.page_table[row], batch.positions[at], is_used, pages, spec, view, sink)
        return out.at[jnp.where(is_used, token, num_tokens)].set(part, mode="drop")

    return lax.fori_loop(0, tile_end[-1], body, out)


def _attend_tile(
    q: jax.Array,  # [N, KV, G, D], scaled
    table: jax.Array,  # [P]
    positions: jax.Array,  # [N]
    is_used: jax.Array,  # [N] bool
    pages: jax.Array,
    spec: AttentionSpec,
    view: BlockView,
    sink: jax.Array | None,
) -> jax.Array:
    """N query tokens of one row over its pages. Returns [N, KV, G, E]."""
    page_size = pages.shape[1]
    block_pages = _block_pages(page_size)
    last = jnp.where(is_used, positions, -1)
    first = _first_visible(last, spec)
    row_last = jnp.max(last)
    row_first = jnp.min(jnp.where(is_used, first, jnp.iinfo(jnp.int32).max))

    def body(i: jax.Array, state: _Softmax) -> _Softmax:
        ids = lax.dynamic_slice_in_dim(table, i * block_pages, block_pages)
        block = pages[ids]  # [block_pages, page_size, ...]
        block = block.reshape(block_pages * page_size, *block.shape[2:]).astype(jnp.float32)
        position = i * block_pages * page_size + jnp.arange(block.shape[0])
        written = (position <= row_last) & (position >= row_first)
        keys, values = view.split(jnp.where(written.reshape(-1, *(1,) * (block.ndim - 1)), block, 0.0))
        visible = (position <= last[:, None]) & (position >= first[:, None])  # [N, n]
        scores = jnp.einsum("tkgd,nkd->tkgn", q, keys, precision="highest")
        scores = _cap_and_mask(scores, visible[:, None, None, :], spec)
        return _online(state, scores, lambda w: jnp.einsum("tkgn,nkd->tkgd", w, values, precision="highest"))

    table = _pad_to_blocks(table, block_pages)
    block_tokens = block_pages * page_size
    stop = row_last // block_tokens + 1
    start = jnp.minimum(row_first // block_tokens, stop)
    return _finish(lax.fori_loop(start, stop, body, _empty(q, view)), sink)


def _block_pages(page_size: int) -> int:
    """Pages per block: BLOCK_TOKENS tokens, whatever the width of the table, so that blocks end at the same
    positions in every program."""
    return max(1, BLOCK_TOKENS // page_size)


def _pad_to_blocks(table: jax.Array, block_pages: int) -> jax.Array:
    """Pad the page axis (the last) with the dummy page: a slice past the end would shift, not clip."""
    missing = -table.shape[-1] % block_pages
    return jnp.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, missing)])


def _first_visible(last: jax.Array, spec: AttentionSpec) -> jax.Array:
    if spec.sliding_window:
        return jnp.maximum(last - (spec.sliding_window - 1), 0)
    return jnp.zeros_like(last)


def _cap_and_mask(scores: jax.Array, visible: jax.Array, spec: AttentionSpec) -> jax.Array:
    if spec.logit_softcap:
        scores = spec.logit_softcap * jnp.tanh(scores / spec.logit_softcap)
    return jnp.where(visible, scores, _MASKED)


def _zeros(q: jax.Array, view: BlockView) -> jax.Array:
    return jnp.zeros((*q.shape[:-1], view.value_dim), q.dtype)


def _empty(q: jax.Array, view: BlockView) -> _Softmax:
    return jnp.full(q.shape[:-1], _MASKED), jnp.zeros(q.shape[:-1]), _zeros(q, view)


def _online(state: _Softmax, scores: jax.Array, times_values: Callable[[jax.Array], jax.Array]) -> _Softmax:
    """Take one block of scores [..., n] into the running softmax."""
    top, total, values = state
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    keep = jnp.exp(top - new_top)
    weights = jnp.where(scores > 0.5 * _MASKED, jnp.exp(scores - new_top[..., None]), 0.0)
    return (
        new_top,
        total * keep + jnp.sum(weights, axis=-1),
        values * keep[..., None] + times_values(weights),
    )


def _finish(state: _Softmax, sink: jax.Array | None) -> jax.Array:
    top, total, values = state
    if sink is not None:
        new_top = jnp.maximum(top, sink)
        keep = jnp.exp(top - new_top)
        values, total = values * keep[..., None], total * keep + jnp.exp(sink - new_top)
    return values / jnp.maximum(total, 1e-30)[..., None]
