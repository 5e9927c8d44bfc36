"""Latent attention on Hopper GPUs (Pallas Mosaic GPU): absorbed decode and prefill over pages of latent vectors.

All query heads of a token attend to one vector per position, which is key and, without its rotated part, value:

    S [64 heads, 64 keys] = Q [64, R + P] @ C^T [R + P, 64 keys]
    O [64 heads, R]      += P [64, 64 keys] @ C[:, :R]

A block computes 64 heads of one token over a run of its context. The accumulator of 64 x R is more than the registers
of one warpgroup: two warpgroups compute, each one half of the columns. The first takes the scores and the softmax
and hands weights and scale factors to the second through shared memory (after DeepSeek's FlashMLA, 2025). A third
copies pages with TMA, each once for keys and values.

A prefill chunk is many tokens of that kind: its products fill the tensor cores already, and pages that its tokens
share come from the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.kv_write.mosaic import write_latents
from jaxserve.pallas_kernels.mla_attention.mosaic_plan import plan_items
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.mosaic.hopper import (
    COMPUTING_REGISTERS,
    COPYING_REGISTERS,
    LOG2E,
    LOWEST,
    MMA_M,
    add_product,
    clear_tail,
    launch,
    product,
    swizzled,
)
from jaxserve.pallas_kernels.paged_attention.mosaic_pages import Ring, copy_steps, parts_per_step
from jaxserve.pallas_kernels.paged_attention.mosaic_plan import KEYS
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.pallas_kernels.tuning import default_blocks

HALVES = 2  # computing warpgroups, each with its half of the output's columns
MERGED_COLUMNS = 128  # columns that one block of the merging kernel holds


@dataclasses.dataclass(frozen=True)
class MLABlocks:
    """Block sizes.

    stages      blocks of 64 keys in flight
    min_blocks  blocks of 64 keys that one GPU block computes at least
    waves       GPU blocks to aim for, in multiples of the SMs (one block runs on an SM)
    num_sms     SMs of the GPU
    """

    stages: int = 2
    min_blocks: int = 8
    waves: int = 2
    num_sms: int = 132


@functools.partial(jax.jit, static_argnames=("spec", "blocks", "deterministic", "interpret"))
def mla_attention_mosaic(
    q: jax.Array,  # [T, H, R + P]
    new: jax.Array,  # [T, R + P]
    pages: jax.Array,  # [num_pages, page_size, R + P], bfloat16 or float16
    batch: RaggedBatch,
    spec: MLASpec,
    *,
    blocks: MLABlocks | None = None,
    deterministic: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [T, H, R] float32, pages). With `deterministic` no context is split."""
    blocks = blocks or default_blocks(MLABlocks, "mla_attention", "any")
    num_tokens, num_heads, _ = q.shape
    pages = write_latents(new, pages, batch.write_slot, interpret=interpret)
    q = jnp.pad(q, ((0, 0), (0, -num_heads % MMA_M), (0, 0))).astype(pages.dtype)
    head_blocks = q.shape[1] // MMA_M
    plan = plan_items(
        batch,
        max_blocks=-(-batch.page_table.shape[1] * pages.shape[1] // KEYS),
        target_items=-(-blocks.num_sms * blocks.waves // head_blocks),
        min_blocks=blocks.min_blocks,
        split=not deterministic,
    )
    row = jnp.minimum(batch.row_of_token, batch.seq_len.shape[0] - 1)
    out, parts, lse = _attend(q, pages, batch.page_table, row, batch.positions, plan, spec, blocks, interpret)
    if not deterministic:
        out = _merge(out, parts, lse, plan.first_part, plan.num_parts, interpret)
    is_used = jnp.arange(num_tokens) < batch.query_start[-1]
    return jnp.where(is_used[:, None, None], out[:, :num_heads], 0.0), pages


def _attend_kernel(
    q_ref, pages_ref, table_ref, row_ref, position_ref, items_ref, out_ref, parts_ref, lse_ref,
    q_smem, c_smem, p_smem, factor_smem, q_ready, c_ready, c_free, p_ready, p_free,
    *, spec: MLASpec, interpret: bool,
):  # fmt: skip
    # q_ref [T, H, R + P]; out_ref [T, H, R] float32; parts_ref [parts, H, R] float32, each normalised by itself;
    # lse_ref [parts, H] float32, base 2.
    stages, page_size = c_smem.shape[0], pages_ref.shape[1]
    width = spec.latent_dim // HALVES
    item, head_block, warpgroup = (lax.axis_index(name) for name in ("item", "head_block", "warpgroup"))
    token, first, steps, part = (items_ref[item, column] for column in range(4))
    heads = pl.ds(head_block * MMA_M, MMA_M)
    length = position_ref[token] + 1
    layout = plgpu.Layout.WGMMA

    @pl.when(jnp.logical_and(warpgroup == HALVES, steps > 0))
    def _copy_pages():
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        row = row_ref[token]
        copy_steps(
            [Ring(((lambda page: pages_ref.at[page], c_smem),), c_ready, c_free)], lambda i: table_ref[row, i],
            page_size=page_size, first=first, steps=steps, last_page=lax.div(length - 1, page_size),
        )  # fmt: skip

    def values(slot, half):
        return c_smem.at[slot, :, pl.ds(half * width, width)]

    def scaled(acc, factor):
        return acc * lax.broadcast_in_dim(factor, acc.shape, [0])

    def store(acc, half):
        columns = pl.ds(half * width, width)

        @pl.when(part < 0)
        def _whole():
            plgpu.store(out_ref.at[token, heads, columns], acc, optimized=False)

        @pl.when(part >= 0)
        def _part():
            plgpu.store(parts_ref.at[part, heads, columns], acc, optimized=False)

    def empty():
        return plgpu.layout_cast(jnp.zeros((MMA_M, width), jnp.float32), layout)

    @pl.when(jnp.logical_and(warpgroup == 0, steps > 0))
    def _scores_and_first_half():
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        plgpu.copy_gmem_to_smem(q_ref.at[token, heads], q_smem, q_ready)
        plgpu.barrier_wait(q_ready)

        def step_body(step, carry):
            acc, m, norm = carry
            slot = lax.rem(step, stages)
            start = (first + step) * KEYS
            plgpu.barrier_wait(c_ready.at[slot])
            s = product((MMA_M, KEYS), q_smem, c_smem.at[slot].transpose((1, 0)))
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=layout) + start
            s = jnp.where(key < length, s, -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=1) * (spec.scale * LOG2E))
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s * (spec.scale * LOG2E) - lax.broadcast_in_dim(m_new, s.shape, [0])).astype(p_smem.dtype)
            # The sum is that of the rounded weights, so that they add up to one.
            norm = norm * alpha + p.astype(jnp.float32).sum(axis=1)

            @pl.when(step > 0)
            def _wait():
                plgpu.barrier_wait(p_free)

            p_smem[...] = p
            factor_smem[...] = alpha
            plgpu.commit_smem()

            @pl.when(start + KEYS > length)
            def _clear():
                clear_tail(c_smem.at[slot, :, pl.ds(0, spec.latent_dim)], length - start)

            plgpu.barrier_arrive(p_ready)
            acc = add_product(scaled(acc, alpha), p_smem, values(slot, 0), interpret=interpret)
            plgpu.barrier_arrive(c_free.at[slot])
            return acc, m_new, norm

        lowest = plgpu.layout_cast(jnp.full((MMA_M,), LOWEST, jnp.float32), layout.reduce(1))
        zeros = plgpu.layout_cast(jnp.zeros((MMA_M,), jnp.float32), layout.reduce(1))
        acc, m, norm = lax.fori_loop(0, steps, step_body, (empty(), lowest, zeros))
        inverse = 1.0 / norm
        plgpu.barrier_wait(p_free)
        factor_smem[...] = inverse
        plgpu.commit_smem()
        plgpu.barrier_arrive(p_ready)
        store(scaled(acc, inverse), 0)

        @pl.when(part >= 0)
        def _lse():
            plgpu.store(lse_ref.at[part, heads], m + jnp.log2(norm), optimized=False)

    @pl.when(jnp.logical_and(warpgroup == 1, steps > 0))
    def _second_half():
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")

        def factor():
            return plgpu.load(factor_smem, layout=layout.reduce(1))

        def step_body(step, acc):
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(c_ready.at[slot])
            plgpu.barrier_wait(p_ready)
            acc = add_product(scaled(acc, factor()), p_smem, values(slot, 1), interpret=interpret)
            plgpu.barrier_arrive(p_free)
            plgpu.barrier_arrive(c_free.at[slot])
            return acc

        acc = lax.fori_loop(0, steps, step_body, empty())
        plgpu.barrier_wait(p_ready)
        store(scaled(acc, factor()), 1)


def _attend(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    row: jax.Array,
    positions: jax.Array,
    plan: Any,
    spec: MLASpec,
    blocks: MLABlocks,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out [T, H, R], parts [n, H, R], lse [n, H]), all float32; only what the plan names is written."""
    num_tokens, num_heads, head_dim = q.shape
    dtype = pages.dtype

    def kernel(*refs):
        _attend_kernel(*refs, spec=spec, interpret=interpret is not None)

    return launch(
        kernel,
        "mla_attention",
        interpret=interpret,
        scratch_bytes=512,  # rows are reduced within warps: shared memory is full otherwise
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, spec.latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((plan.max_parts, num_heads, spec.latent_dim), jnp.float32),
            jax.ShapeDtypeStruct((plan.max_parts, num_heads), jnp.float32),
        ),
        grid=(plan.items.shape[0], num_heads // MMA_M),
        grid_names=("item", "head_block"),
        num_threads=HALVES + 1,
        scratch_types=[
            swizzled(MMA_M, head_dim, dtype=dtype),
            swizzled(blocks.stages, KEYS, head_dim, dtype=dtype),
            swizzled(MMA_M, KEYS, dtype=dtype),
            plgpu.SMEM((MMA_M,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=parts_per_step(pages.shape[1], KEYS), num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=HALVES, num_barriers=blocks.stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
    )(q, pages, page_table, row, positions, plan.items)


def _merge(
    out: jax.Array, parts: jax.Array, lse: jax.Array, first: jax.Array, count: jax.Array, interpret: Any
) -> jax.Array:
    """Merge the parts of tokens whose context was split, into their rows of `out`."""
    num_tokens, num_heads, latent_dim = out.shape
    layout = plgpu.Layout.WGMMA
    columns = min(MERGED_COLUMNS, latent_dim)

    def kernel(parts_ref, lse_ref, first_ref, count_ref, out_ref):
        token, head_block, column = (lax.axis_index(name) for name in ("token", "head_block", "column"))
        first, count = first_ref[token], count_ref[token]
        where = (pl.ds(head_block * MMA_M, MMA_M), pl.ds(column * columns, columns))

        @pl.when(count > 0)
        def _merge_parts():
            def merge(i, carry):
                acc, m, norm = carry
                part_lse = plgpu.load(lse_ref.at[first + i, where[0]], layout=layout.reduce(1), optimized=False)
                part = plgpu.load(parts_ref.at[first + i, where[0], where[1]], layout=layout, optimized=False)
                m_new = jnp.maximum(m, part_lse)
                alpha, weight = jnp.exp2(m - m_new), jnp.exp2(part_lse - m_new)
                acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                return acc + part * lax.broadcast_in_dim(weight, acc.shape, [0]), m_new, norm * alpha + weight

            carry = (
                plgpu.layout_cast(jnp.zeros((MMA_M, columns), jnp.float32), layout),
                plgpu.layout_cast(jnp.full((MMA_M,), LOWEST, jnp.float32), layout.reduce(1)),
                plgpu.layout_cast(jnp.zeros((MMA_M,), jnp.float32), layout.reduce(1)),
            )
            acc, _, norm = lax.fori_loop(0, count, merge, carry)
            acc = acc * lax.broadcast_in_dim(1.0 / norm, acc.shape, [0])
            plgpu.store(out_ref.at[token, where[0], where[1]], acc, optimized=False)

    out_ref = jax.new_ref(out)
    launch(
        kernel,
        "merge_latent_parts",
        interpret=interpret,
        grid=(num_tokens, num_heads // MMA_M, latent_dim // columns),
        grid_names=("token", "head_block", "column"),
        num_threads=1,
    )(parts, lse, first, count, out_ref)
    return jax.freeze(out_ref)
