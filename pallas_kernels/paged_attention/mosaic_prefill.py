"""Prefill: ragged causal query chunks over paged K/V, for Hopper GPUs (Pallas Mosaic GPU).

Queries of several rows lie one after the other in a flat token axis; the keys and values of each row, old and new,
are already in its pages. Queries are cut into tiles that never straddle rows (`plan_prefill`). Two warpgroups of a
block compute, each 64 queries of one head, over pages that a third one copies with TMA once for both: two heads of
one kv head and a tile of 64 tokens where the group is even, else one head and a tile of 128.

Online softmax after Dao et al., "FlashAttention" (2022), in the warp-specialised form of "FlashAttention-3" (2024).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.mosaic.hopper import (
    ALIGN,
    COMPUTING_REGISTERS,
    COPYING_REGISTERS,
    LOG2E,
    LOWEST,
    add_product,
    clear_tail,
    launch,
    product,
    soft_cap,
    swizzled,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_pages import (
    code_rings,
    convert_steps,
    copy_steps,
    full_barrier,
    operand_stages,
    page_rings,
)
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, QuantizedPages
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec

TILE = 64  # query tokens of one computing warpgroup
COMPUTING = 2  # computing warpgroups of a block
OUT_COLUMNS = 128  # columns of a result that pass through shared memory at once


@dataclasses.dataclass(frozen=True)
class PrefillBlocks:
    """Block sizes of the prefill kernel.

    keys    keys of one softmax step, a multiple of 64
    stages  steps of K and V in flight
    """

    keys: int = 128
    stages: int = 2


def heads_per_block(spec: AttentionSpec) -> int:
    """Query heads of one block; they share a kv head."""
    return 2 if spec.group_size % 2 == 0 else 1


def tile_tokens(spec: AttentionSpec) -> int:
    """Query tokens of one block's tile."""
    return TILE * COMPUTING // heads_per_block(spec)


def _prefill_kernel(
    q_ref, pages_ref, table_ref, seq_len_ref, tiles_ref, sinks_ref, out_ref,
    q_out_smem, k_smem, v_smem, p_smem, q_ready, k_ready, v_ready, k_free, v_free, tail_ready, queries_read,
    codes,
    *, spec: AttentionSpec, num_heads: int, interpret: bool,
):  # fmt: skip
    # q_ref [T, H, D]; out_ref the same in float32; pages_ref [pages, KV, 2, page_size, D]; sinks_ref [H], base 2;
    # codes: code_rings.
    q_smem, out_smem = q_out_smem
    stages, keys, head_dim = k_smem.shape
    page_size = pages_ref.shape[3]
    tile, head_block, warpgroup = (lax.axis_index(name) for name in ("tile", "head_block", "warpgroup"))
    row, load, first, count, position = (tiles_ref[tile, column] for column in range(5))
    load_start = load * ALIGN
    kv_len = position + count  # keys that the last query of the tile sees
    begin = lax.div(jnp.maximum(position - (spec.sliding_window - 1), 0), keys) if spec.sliding_window else 0
    steps = lax.div(kv_len + (keys - 1), keys) - begin
    buffers = (k_smem, k_ready, k_free), (v_smem, v_ready, v_free)

    @pl.when(jnp.logical_and(warpgroup == COMPUTING, count > 0))
    def _copy_pages():
        plgpu.set_max_registers(24 if codes else COPYING_REGISTERS, action="decrease")
        kv_head = lax.div(head_block * num_heads, spec.group_size)
        last_page = lax.div(kv_len - 1, page_size)
        copy_steps(
            page_rings(pages_ref, kv_head, buffers, codes), lambda i: table_ref[row, i],
            page_size=page_size, first=begin, steps=steps, last_page=last_page,
        )  # fmt: skip

    if codes:

        @pl.when(jnp.logical_and(warpgroup == COMPUTING + 1, count > 0))
        def _convert():
            plgpu.set_max_registers(88, action="decrease")  # 24 + 88 + 2 * 200 = 4 * 128, what four start with
            convert_steps(codes, buffers, steps)

    @pl.when(jnp.logical_and(warpgroup < COMPUTING, count > 0))
    def _compute():
        plgpu.set_max_registers(200 if codes else COMPUTING_REGISTERS, action="increase")
        layout = plgpu.Layout.WGMMA
        # This warpgroup's 64 queries: a head of the tile, or a half of it.
        head = head_block * num_heads + (warpgroup if num_heads > 1 else 0)
        shift = 0 if num_heads > 1 else warpgroup * TILE
        begin_query = jnp.clip(first - shift, 0, TILE)
        end_query = jnp.clip(first + count - shift, 0, TILE)
        load_token = pl.multiple_of(load_start + shift, ALIGN)
        tokens = pl.ds(load_token, TILE)
        seq_len = seq_len_ref[row]
        plgpu.copy_gmem_to_smem(q_ref.at[tokens, head], q_smem.at[warpgroup], q_ready.at[warpgroup])
        plgpu.barrier_wait(q_ready.at[warpgroup])
        factor = LOG2E if spec.logit_softcap else spec.scale * LOG2E

        def clear_values(slot, first_bad):
            plgpu.barrier_wait(v_ready.at[slot])

            @pl.when(warpgroup == 0)
            def _first_clears():
                clear_tail(v_smem.at[slot], first_bad)
                plgpu.barrier_arrive(tail_ready)

            @pl.when(warpgroup > 0)
            def _other_waits():
                plgpu.barrier_wait(tail_ready)

        def step_body(step, carry, *, is_masked: bool):
            acc, m, norm = carry  # [TILE, D], [TILE], [TILE]
            slot = lax.rem(step, stages)
            start = (begin + step) * keys
            # In front of everything else, while few registers are in use.
            has_tail = start + keys > seq_len
            if is_masked:
                pl.when(has_tail)(lambda: clear_values(slot, seq_len - start))
            plgpu.barrier_wait(k_ready.at[slot])
            s = product((TILE, keys), q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)))
            plgpu.barrier_arrive(k_free.at[slot])
            if spec.logit_softcap:
                s = soft_cap(s, spec.scale, spec.logit_softcap)
            if is_masked:
                query = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=layout) + (position - first + shift)
                key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout) + start
                visible = key <= query
                if spec.sliding_window:
                    visible &= key > query - spec.sliding_window
                s = jnp.where(visible, s, -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=1) * factor)
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
            norm = norm * alpha + p.sum(axis=1)
            p = p.astype(k_smem.dtype)
            if interpret:
                p_smem.at[warpgroup][...] = p
                plgpu.commit_smem()
                p = p_smem.at[warpgroup]
            if is_masked:

                @pl.when(jnp.logical_not(has_tail))
                def _wait_values():
                    plgpu.barrier_wait(v_ready.at[slot])
            else:
                plgpu.barrier_wait(v_ready.at[slot])
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
            acc = add_product(acc, p, v_smem.at[slot], interpret=interpret)
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, m_new, norm

        carry = (
            plgpu.layout_cast(jnp.zeros((TILE, head_dim), jnp.float32), layout),
            plgpu.layout_cast(jnp.full((TILE,), LOWEST, jnp.float32), layout.reduce(1)),
            plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), layout.reduce(1)),
        )
        # Steps that lie entirely before the tile's first query need no mask, unless a window cuts into them.
        plain = 0
        # With large heads one loop is all that the registers hold.
        if not spec.sliding_window and head_dim <= 128:
            plain = lax.div(position, keys)
            carry = lax.fori_loop(0, plain, lambda step, c: step_body(step, c, is_masked=False), carry)
        acc, m, norm = lax.fori_loop(plain, steps, lambda step, c: step_body(step, c, is_masked=True), carry)

        # Results take the place of the queries, and one warpgroup's results that of the other's queries.
        plgpu.barrier_arrive(queries_read)
        plgpu.barrier_wait(queries_read)
        if spec.has_sinks:
            norm = norm + jnp.exp2(sinks_ref[head] - m)
        # A surplus query may have seen nothing: its 0 / 0 is dropped.
        acc = acc * lax.broadcast_in_dim(1.0 / norm, acc.shape, [0])
        out = out_smem.at[warpgroup]
        for column in range(0, head_dim, OUT_COLUMNS):
            width = min(OUT_COLUMNS, head_dim - column)
            piece = out if width == OUT_COLUMNS else out.at[:, pl.ds(0, width)]
            piece[...] = acc if width == head_dim else acc[:, column : column + width]
            plgpu.commit_smem()
            columns = pl.ds(column, width)

            @pl.when(end_query - begin_query == TILE)
            def _store_tile(piece=piece, columns=columns):
                plgpu.copy_smem_to_gmem(piece, out_ref.at[tokens, head, columns])

            # The tokens around a short tile belong to other rows: store one by one.
            @pl.when(end_query - begin_query < TILE)
            def _store_tokens(piece=piece, columns=columns):
                @pl.loop(begin_query, end_query)
                def _(i):
                    plgpu.copy_smem_to_gmem(piece.at[pl.ds(i, 1)], out_ref.at[pl.ds(load_token + i, 1), head, columns])

            plgpu.wait_smem_to_gmem(0)


def prefill(
    q: jax.Array,  # [T, H, D] page dtype, float16 over codes; T reaches a whole tile past the start of the last one
    pages: Pages,  # [num_pages, KV, 2, page_size, D] bfloat16, float16 or codes
    page_table: jax.Array,  # [R, P] int32
    seq_len: jax.Array,  # [R] int32
    tiles: jax.Array,  # [n, 5] int32, see plan_prefill
    sinks: jax.Array | None,  # [H] float32
    spec: AttentionSpec,
    blocks: PrefillBlocks,
    *,
    interpret: Any = None,
) -> jax.Array:
    """[T, H, D] float32. Tokens of no tile are left unwritten."""
    dtype, head_dim = q.dtype, pages.shape[4]
    if isinstance(pages, QuantizedPages):
        blocks = dataclasses.replace(blocks, keys=64)  # the codes' buffers take room from the others
    codes, stages = code_rings(pages, blocks.keys), operand_stages(pages, blocks.stages)
    num_heads = heads_per_block(spec)
    scaled = jnp.zeros((spec.num_heads,), jnp.float32) if sinks is None else sinks * LOG2E

    def kernel(*refs):
        _prefill_kernel(*refs, spec=spec, num_heads=num_heads, interpret=interpret is not None)

    ring = swizzled(stages, blocks.keys, head_dim, dtype=dtype)
    ready = full_barrier(pages, blocks.keys, stages)
    free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages)
    # On a GPU the weights reach the second product through registers: the buffer is for the interpreter.
    p_shape = (1, ALIGN, 64) if interpret is None else (COMPUTING, TILE, blocks.keys)
    return launch(
        kernel,
        "paged_prefill",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(tiles.shape[0], spec.num_heads // num_heads),
        grid_names=("tile", "head_block"),
        num_threads=COMPUTING + (2 if codes else 1),
        scratch_types=[
            plgpu.RefUnion(
                swizzled(COMPUTING, TILE, head_dim, dtype=dtype),
                plgpu.SMEM((COMPUTING, TILE, min(head_dim, OUT_COLUMNS)), jnp.float32),
            ),
            ring,
            ring,
            swizzled(*p_shape, dtype=dtype),
            plgpu.Barrier(num_barriers=COMPUTING),
            ready,
            ready,
            free,
            free,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=COMPUTING),
            codes,
        ],
    )(q, pages, page_table, seq_len, tiles, scaled)
