"""Decode: one query token per row over the row's pages, for Hopper GPUs (Pallas Mosaic GPU).

One block computes one kv head of one run of a row's context, for all query heads of that kv head's group at once.
The scores are computed transposed. Hopper's wgmma takes M in steps of 64 but N in steps of 8, and a decode step
has only a few queries per kv head, so the keys take the M side and the queries the N side:

    S^T [64 keys, N]  = K [64, D]    @ Q^T [D, N]
    O^T [D, N]       += V^T [D, 64]  @ P^T [64 keys, N]          N: the group, padded to a multiple of 8

Warpgroup 1 copies pages with TMA into a ring of buffers, warpgroup 0 computes; a third one converts pages of codes. The
partial results of a row are merged by a second kernel (split-KV: Dao et al., "Flash-Decoding for long-context
inference", 2023).
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
    COMPUTING_REGISTERS,
    COPYING_REGISTERS,
    LOG2E,
    LOWEST,
    MMA_N,
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
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import KEYS, DecodePlan
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """Block sizes of the decode kernel.

    stages         blocks of 64 keys (K and V) in flight
    min_blocks     blocks of 64 keys that one GPU block computes at least
    waves          GPU blocks to aim for, in multiples of what runs at once
    blocks_per_sm  GPU blocks that run at once on one SM with these sizes
    """

    stages: int = 3
    min_blocks: int = 8
    waves: int = 4
    blocks_per_sm: int = 2


def padded_group(spec: AttentionSpec) -> int:
    """The N of the decode products: query heads per kv head, a multiple of 8."""
    return -(-spec.group_size // MMA_N) * MMA_N


def _decode_kernel(
    q_ref, pages_ref, table_ref, seq_len_ref, items_ref, out_ref, lse_ref,
    q_smem, k_smem, v_smem, p_smem, out_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free, codes,
    *, spec: AttentionSpec, interpret: bool,
):  # fmt: skip
    # q_ref [R, KV, N, D]; pages_ref [pages, KV, 2, page_size, D]; out_ref [items, KV, D, N] float32, each item
    # normalised by itself; lse_ref [items, KV, N] float32, base-2 logarithm of the item's softmax sum;
    # codes: code_rings.
    num_queries, head_dim = q_smem.shape
    page_size, stages = pages_ref.shape[3], k_smem.shape[0]
    item, kv_head, warpgroup = (lax.axis_index(name) for name in ("item", "kv_head", "warpgroup"))
    row, first, steps = (items_ref[item, column] for column in range(3))
    seq_len = seq_len_ref[row]
    buffers = (k_smem, k_ready, k_free), (v_smem, v_ready, v_free)

    def share_registers(count: int, action: str) -> None:
        # A third warpgroup leaves too few for the sums of many queries.
        if codes and num_queries > 16:
            plgpu.set_max_registers(count, action=action)

    @pl.when(jnp.logical_and(warpgroup == 1, steps > 0))
    def _copy_pages():
        share_registers(COPYING_REGISTERS, "decrease")
        last_page = lax.div(seq_len + (page_size - 1), page_size) - 1
        copy_steps(
            page_rings(pages_ref, kv_head, buffers, codes), lambda i: table_ref[row, i],
            page_size=page_size, first=first, steps=steps, last_page=last_page,
        )  # fmt: skip

    if codes:

        @pl.when(jnp.logical_and(warpgroup == 2, steps > 0))
        def _convert():
            share_registers(88, "decrease")
            convert_steps(codes, buffers, steps)

    @pl.when(jnp.logical_and(warpgroup == 0, steps > 0))
    def _compute():
        share_registers(COMPUTING_REGISTERS, "increase")
        layout = plgpu.Layout.WGMMA
        plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head], q_smem, q_ready)
        plgpu.barrier_wait(q_ready)
        factor = LOG2E if spec.logit_softcap else spec.scale * LOG2E

        def step_body(step, carry, *, is_masked: bool):
            acc, m, norm = carry  # O^T [D, N]; max [N]; sum per key slot [64, N]
            slot = lax.rem(step, stages)
            start = (first + step) * KEYS
            plgpu.barrier_wait(k_ready.at[slot])
            s = product((KEYS, num_queries), k_smem.at[slot], q_smem.transpose((1, 0)))
            plgpu.barrier_arrive(k_free.at[slot])
            if spec.logit_softcap:
                s = soft_cap(s, spec.scale, spec.logit_softcap)
            if is_masked:
                position = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=layout) + start
                visible = position < seq_len
                if spec.sliding_window:
                    visible &= position >= seq_len - spec.sliding_window
                s = jnp.where(visible, s, -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=0) * factor)
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [1]))
            rounded = p.astype(p_smem.dtype)
            # The sum is that of the rounded weights, so that they add up to one.
            norm = norm * lax.broadcast_in_dim(alpha, norm.shape, [1]) + rounded.astype(jnp.float32)
            p_smem.transpose((1, 0))[...] = rounded
            plgpu.commit_smem()
            plgpu.barrier_wait(v_ready.at[slot])
            if is_masked:

                @pl.when(start + KEYS > seq_len)
                def _clear():
                    clear_tail(v_smem.at[slot], seq_len - start)

            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
            acc = add_product(acc, v_smem.at[slot].transpose((1, 0)), p_smem.transpose((1, 0)), interpret=interpret)
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, m_new, norm

        carry = (
            plgpu.layout_cast(jnp.zeros((head_dim, num_queries), jnp.float32), layout),
            plgpu.layout_cast(jnp.full((num_queries,), LOWEST, jnp.float32), layout.reduce(0)),
            plgpu.layout_cast(jnp.zeros((KEYS, num_queries), jnp.float32), layout),
        )
        # Only the row's last block can hold positions past its end; a window also cuts into the first.
        plain = 0
        if not spec.sliding_window:
            plain = jnp.clip(lax.div(seq_len, KEYS) - first, 0, steps)
            carry = lax.fori_loop(0, plain, lambda step, c: step_body(step, c, is_masked=False), carry)
        acc, m, norm = lax.fori_loop(plain, steps, lambda step, c: step_body(step, c, is_masked=True), carry)

        total = norm.sum(axis=0)
        out_smem[...] = acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [1])
        lse_smem[...] = m + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[item, kv_head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[item, kv_head])
        plgpu.wait_smem_to_gmem(0)


def decode_parts(
    q: jax.Array,  # [R, KV, N, D] page dtype; float16 over codes
    pages: Pages,  # [num_pages, KV, 2, page_size, D] bfloat16, float16 or codes
    page_table: jax.Array,  # [R, P] int32
    seq_len: jax.Array,  # [R] int32
    plan: DecodePlan,
    spec: AttentionSpec,
    blocks: DecodeBlocks,
    *,
    name: str = "paged_decode",
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Partial results of every item: (out [items, KV, D, N] float32, lse [items, KV, N] float32, base 2)."""
    num_items, (_, kv_heads, num_queries, head_dim) = plan.items.shape[0], q.shape
    dtype, codes = q.dtype, code_rings(pages, KEYS)
    stages = operand_stages(pages, blocks.stages)

    def kernel(*refs):
        _decode_kernel(*refs, spec=spec, interpret=interpret is not None)

    ring = swizzled(stages, KEYS, head_dim, dtype=dtype)
    ready = full_barrier(pages, KEYS, stages)
    free = plgpu.Barrier(num_barriers=stages)
    return launch(
        kernel,
        name,
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((num_items, kv_heads, head_dim, num_queries), jnp.float32),
            jax.ShapeDtypeStruct((num_items, kv_heads, num_queries), jnp.float32),
        ),
        grid=(num_items, kv_heads),
        grid_names=("item", "kv_head"),
        num_threads=3 if codes else 2,
        scratch_types=[
            swizzled(num_queries, head_dim, dtype=dtype),
            ring,
            ring,
            swizzled(num_queries, KEYS, dtype=dtype),
            plgpu.SMEM((head_dim, num_queries), jnp.float32),
            plgpu.SMEM((num_queries,), jnp.float32),
            plgpu.Barrier(),
            ready,
            ready,
            free,
            free,
            codes,
        ],
    )(q, pages, page_table, seq_len, plan.items)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedParts:
    """Parts that belong to several rows: row r's are the columns from column[r] on of num_items[r] items from
    first_item[r] on.

    parts [items, KV, D, tile] float32; lse [items, KV, tile] float32, base 2; the others [R] int32.
    """

    parts: jax.Array
    lse: jax.Array
    first_item: jax.Array
    num_items: jax.Array
    column: jax.Array


def _combine_kernel(*refs, has_sinks: bool, has_shared: bool):
    # parts_ref [items, KV, D, N]; lse_ref [items, KV, N]; sinks_ref [KV, N] base 2; out_ref [R, KV, D, N].
    parts_ref, lse_ref, first_ref, count_ref, sinks_ref, *shared_refs, out_ref = refs
    row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
    first, count = first_ref[row], count_ref[row]
    layout = plgpu.Layout.WGMMA

    @pl.when(count > 0)
    def _merge():
        shape = parts_ref.shape[2:]

        def merge(lse_ref, part_ref, carry):
            acc, m, norm = carry
            # Not whole cache lines per warp when N is small: the loads are still whole 32-byte sectors.
            lse = plgpu.load(lse_ref, layout=layout.reduce(0), optimized=False)
            part = plgpu.load(part_ref, layout=layout, optimized=False)
            m_new = jnp.maximum(m, lse)
            alpha, weight = jnp.exp2(m - m_new), jnp.exp2(lse - m_new)
            acc = acc * lax.broadcast_in_dim(alpha, shape, [1]) + part * lax.broadcast_in_dim(weight, shape, [1])
            return acc, m_new, norm * alpha + weight

        if has_sinks:
            m = plgpu.load(sinks_ref.at[kv_head], layout=layout.reduce(0), optimized=False)
            norm = plgpu.layout_cast(jnp.ones(shape[1:], jnp.float32), layout.reduce(0))
        else:
            m = plgpu.layout_cast(jnp.full(shape[1:], LOWEST, jnp.float32), layout.reduce(0))
            norm = plgpu.layout_cast(jnp.zeros(shape[1:], jnp.float32), layout.reduce(0))
        acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        carry = acc, m, norm
        if has_shared:
            shared_parts_ref, shared_lse_ref, *index_refs = shared_refs
            shared_first, shared_count, column = (ref[row] for ref in index_refs)
            columns = pl.ds(column, shape[1])

            def merge_shared(i, carry):
                at = shared_first + i
                return merge(
                    shared_lse_ref.at[at, kv_head, columns], shared_parts_ref.at[at, kv_head, :, columns], carry
                )

            carry = lax.fori_loop(0, shared_count, merge_shared, carry)

        def merge_own(i, carry):
            return merge(lse_ref.at[first + i, kv_head], parts_ref.at[first + i, kv_head], carry)

        acc, _, norm = lax.fori_loop(0, count, merge_own, carry)
        plgpu.store(out_ref.at[row, kv_head], acc * lax.broadcast_in_dim(1.0 / norm, shape, [1]), optimized=False)


def combine_parts(
    parts: jax.Array,  # [items, KV, D, N] float32
    lse: jax.Array,  # [items, KV, N] float32, base 2
    first_item: jax.Array,  # [R] int32
    num_items: jax.Array,  # [R] int32
    sinks: jax.Array | None,  # [KV, N] float32, natural logarithm
    shared: SharedParts | None = None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Merge the items of each row, in their order, behind those of `shared`. [R, KV, D, N] float32; rows without
    items of their own are not written."""
    num_rows, (_, kv_heads, head_dim, num_queries) = first_item.shape[0], parts.shape
    has_sinks = sinks is not None
    scaled = jnp.zeros((kv_heads, num_queries), jnp.float32) if sinks is None else sinks * LOG2E

    def kernel(*refs):
        _combine_kernel(*refs, has_sinks=has_sinks, has_shared=shared is not None)

    return launch(
        kernel,
        "combine_parts",
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((num_rows, kv_heads, head_dim, num_queries), jnp.float32),
        grid=(num_rows, kv_heads),
        grid_names=("row", "kv_head"),
        num_threads=1,
    )(parts, lse, first_item, num_items, scaled, *jax.tree.leaves(shared))
