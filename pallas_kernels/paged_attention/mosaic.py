"""Paged attention on Hopper GPUs: write the step's K/V, then decode rows and prefill chunks, each by its kernel.

Pages are [page, kv_head, 2, token, head_dim] with head_dim padded to a multiple of 64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels.kv_write.mosaic import write_kv
from jaxserve.pallas_kernels.paged_attention.mosaic_cascade import (
    SharedRuns,
    find_runs,
    lay_out_queries,
    rows_per_tile,
    tile_queries,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_decode import (
    DecodeBlocks,
    SharedParts,
    combine_parts,
    decode_parts,
    padded_group,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import (
    KEYS,
    max_decode_items,
    plan_decode,
    plan_prefill,
    query_lengths,
    split_runs,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_prefill import PrefillBlocks, prefill, tile_tokens
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, QuantizedPages
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.pallas_kernels.tuning import block_sizes, card_name


@dataclasses.dataclass(frozen=True)
class MosaicOptions:
    """Block sizes, and the number of SMs that the split of decode rows aims to fill."""

    decode: DecodeBlocks
    prefill: PrefillBlocks
    num_sms: int = 132


def options_from(sizes: dict[str, Any]) -> MosaicOptions:
    """sizes: "decode" and "prefill" of a file under tuned/; what else stands there (times) is left out."""

    def pick(kind: str, cls: Any) -> Any:
        return cls(**{field.name: sizes[kind][field.name] for field in dataclasses.fields(cls)})

    return MosaicOptions(pick("decode", DecodeBlocks), pick("prefill", PrefillBlocks))


def default_options(head_dim: int) -> MosaicOptions:
    """Block sizes for `head_dim` (padded) on the device at hand."""
    return options_from(block_sizes(card_name(jax.devices()[0].device_kind), "paged_attention", head_dim))


# A program of its own inside the step: layers that are alike are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("spec", "deterministic", "cascade", "options", "interpret"))
def paged_attention_mosaic(
    q: jax.Array,  # [T, H, D]
    k: jax.Array,  # [T, KV, D]
    v: jax.Array,  # [T, KV, D]
    pages: Pages,  # [num_pages, KV, 2, page_size, padded D], bfloat16, float16 or codes
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    deterministic: bool = False,
    cascade: bool = True,
    sinks: jax.Array | None = None,  # [H] float32
    options: MosaicOptions | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, Pages]:
    """Returns (out [T, H, D] float32, pages).

    Codes are multiplied as float16: their values keep 11 bits there, and up to 65504 nothing overflows.

    With `cascade` rows that decode and share pages read them together; with a window each row's context begins
    elsewhere, and none do.

    With `deterministic` the prefill kernel computes every row: a query's result depends on nothing but its own
    context there, while decode cuts a row's context by what else is in the batch.
    """
    num_tokens, head_dim = q.shape[0], pages.shape[4]
    options = options or default_options(head_dim)
    widen = ((0, 0), (0, 0), (0, head_dim - spec.head_dim))
    q, k, v = (jnp.pad(x, widen) for x in (q, k, v))
    if isinstance(pages, QuantizedPages):
        q = q.astype(jnp.float16)
    else:
        q, k, v = (x.astype(pages.dtype) for x in (q, k, v))
    pages = write_kv(k, v, pages, batch.write_slot, interpret=interpret)
    if num_tokens > 1 or deterministic:
        out = _prefill(q, pages, batch, spec, sinks, options, 1 if deterministic else 2, interpret)
    else:
        out = jnp.zeros(q.shape, jnp.float32)
    if not deterministic:
        row = jnp.minimum(batch.row_of_token, batch.seq_len.shape[0] - 1)
        decodes = (query_lengths(batch) == 1)[row][:, None, None]
        decoded = _decode(q, pages, batch, spec, sinks, options, cascade, interpret)
        out = jnp.where(decodes, decoded[row], out)
    is_used = jnp.arange(num_tokens) < batch.query_start[-1]
    return jnp.where(is_used[:, None, None], out, 0.0)[..., : spec.head_dim], pages


def _decode(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    options: MosaicOptions,
    cascade: bool,
    interpret: Any,
) -> jax.Array:
    """[R, H, D] float32; anything for rows that do not decode."""
    num_rows, width = batch.page_table.shape
    kv_heads, page_size, head_dim = pages.shape[1], *pages.shape[3:]
    blocks = options.decode
    sizes = {
        "target_items": -(-options.num_sms * blocks.blocks_per_sm * blocks.waves // kv_heads),
        "min_blocks": blocks.min_blocks,
    }
    max_items = max_decode_items(min(num_rows, q.shape[0]), -(-width * page_size // KEYS), **sizes)

    token = jnp.minimum(batch.query_start[:-1], q.shape[0] - 1)
    grouped = q[token].reshape(num_rows, kv_heads, spec.group_size, head_dim)
    runs = shared = None
    # One token at most decodes in a step of one; a group so large is a tall matrix by itself.
    queries = tile_queries(head_dim)
    has_tiles = rows_per_tile(spec.group_size, queries) > 1
    if cascade and not spec.sliding_window and min(q.shape[0], num_rows) > 1 and has_tiles:
        runs = find_runs(batch, page_size=page_size, group_size=spec.group_size, queries=queries)
        shared = _shared_parts(lay_out_queries(grouped, runs, queries), pages, batch, spec, runs, options, interpret)
    plan = plan_decode(
        batch, window=spec.sliding_window, max_items=max_items, skipped=None if runs is None else runs.run, **sizes
    )

    missing = padded_group(spec) - spec.group_size
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, missing), (0, 0)))
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(kv_heads, spec.group_size), ((0, 0), (0, missing)))
    parts, lse = decode_parts(grouped, pages, batch.page_table, batch.seq_len, plan, spec, blocks, interpret=interpret)
    out = combine_parts(parts, lse, plan.first_item, plan.num_items, sinks, shared, interpret=interpret)
    out = out.swapaxes(2, 3)[:, :, : spec.group_size]
    return out.reshape(num_rows, spec.num_heads, head_dim)


def _shared_parts(
    q: jax.Array,  # [tiles, KV, queries, D]
    pages: Pages,
    batch: RaggedBatch,
    spec: AttentionSpec,
    runs: SharedRuns,
    options: MosaicOptions,
    interpret: Any,
) -> SharedParts:
    """The common runs of all groups, by the decode kernel: a tile of queries is one row, its context the run."""
    kv_heads, page_size = pages.shape[1], pages.shape[3]
    num_tiles, width = runs.leader.shape[0], batch.page_table.shape[1]
    blocks = dataclasses.replace(options.decode, blocks_per_sm=1, stages=2)
    sizes = {"target_items": -(-options.num_sms * blocks.waves // kv_heads), "min_blocks": blocks.min_blocks}
    max_items = max_decode_items(num_tiles, -(-width * page_size // KEYS), **sizes)
    plan = split_runs(runs.blocks, jnp.zeros_like(runs.blocks), max_items=max_items, **sizes)
    table, length = batch.page_table[runs.leader], runs.blocks * KEYS
    parts, lse = decode_parts(q, pages, table, length, plan, spec, blocks, name="paged_cascade", interpret=interpret)
    tile = jnp.minimum(runs.tile, num_tiles - 1)
    count = jnp.where(runs.run > 0, plan.num_items[tile], 0)
    return SharedParts(parts, lse, plan.first_item[tile], count, runs.column)


def _prefill(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    options: MosaicOptions,
    min_length: int,
    interpret: Any,
) -> jax.Array:
    """[T, H, D] float32; anything for tokens of rows with fewer than `min_length` tokens."""
    num_tokens = q.shape[0]
    tiles = plan_prefill(batch, num_tokens=num_tokens, tile_tokens=tile_tokens(spec), min_length=min_length)
    # A tile is loaded whole: the last one may reach past the last token.
    q = jnp.pad(q, ((0, tile_tokens(spec) + -num_tokens % 8), (0, 0), (0, 0)))
    out = prefill(q, pages, batch.page_table, batch.seq_len, tiles, sinks, spec, options.prefill, interpret=interpret)
    return out[:num_tokens]
