"""What `jaxserve tune` times: one step of each kernel at a serving size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.grouped_matmul.mosaic import GroupedBlocks, grouped_matmul_mosaic
from jaxserve.pallas_kernels.matmul.mosaic import QuantBlocks, quant_matmul_mosaic
from jaxserve.pallas_kernels.matmul.quantized import PlanarWeight
from jaxserve.pallas_kernels.mla_attention.mosaic import MLABlocks, mla_attention_mosaic
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.paged_attention.mosaic import options_from, paged_attention_mosaic
from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.pallas_kernels.tuning import FALLBACK, block_sizes

PAGE_SIZE = 64
# A step takes the state of the one before it (pages, which it updates in place) and returns (result, state).
Step = tuple[Callable[[Any], tuple[jax.Array, Any]], Any]


def step(
    operation: str, shape_class: str, kind: str, sizes: dict[str, int], *, tiny: bool = False, interpret: Any = None
) -> Step:
    """(a step with these block sizes, its first state). tiny: as small as the kernel allows, for a test."""
    if operation == "paged_attention":
        return _paged(int(shape_class), kind, sizes, tiny, interpret)
    if operation == "mla_attention":
        return _latent(sizes, tiny, interpret)
    if operation == "grouped_matmul":
        return _experts(int(shape_class), sizes, tiny, interpret)
    return _quantized(shape_class, sizes, tiny, interpret)


def seconds(operation: str, shape_class: str, kind: str, sizes: dict[str, int]) -> float:
    """Median time of a step on the device at hand."""
    run, state = step(operation, shape_class, kind, sizes)
    compiled = jax.jit(run, donate_argnums=0)
    samples = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(5):
            out, state = compiled(state)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / 5)
    return statistics.median(samples[1:])


def _batch(rows: int, cached: int, new: int) -> tuple[RaggedBatch, int]:
    """(rows that have `cached` tokens and compute `new`, every page at a random place; number of pages)."""
    width = -(-(cached + new) // PAGE_SIZE)
    row = np.repeat(np.arange(rows), new)
    positions = cached + np.tile(np.arange(new), rows)
    table = np.random.default_rng(0).permutation(rows * width).reshape(rows, width) + 1
    slots = table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    start, lengths = np.arange(rows + 1) * new, np.full(rows, cached + new)
    fields = (positions, row, slots, start, lengths, table, np.array([rows]))
    return RaggedBatch(*(jnp.asarray(field, jnp.int32) for field in fields)), rows * width + 1


def _paged(head_dim: int, kind: str, sizes: dict[str, int], tiny: bool, interpret: Any) -> Step:
    """64 rows that decode at 4096 tokens, or 4 chunks of 512 behind 8192, with 32 query and 8 kv heads."""
    heads, kv_heads = (2, 1) if tiny else (32, 8)
    decode, prefill = ((2, 130, 1), (1, 70, 9)) if tiny else ((64, 4096, 1), (4, 8192, 512))
    rows, cached, new = decode if kind == "decode" else prefill
    batch, num_pages = _batch(rows, cached, new)
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    options = options_from(block_sizes(FALLBACK, "paged_attention", head_dim) | {kind: sizes})
    q, kv = jnp.ones((rows * new, heads, head_dim)), jnp.ones((rows * new, kv_heads, head_dim))
    pages = jnp.zeros((num_pages, kv_heads, 2, PAGE_SIZE, head_dim), jnp.bfloat16)

    def run(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return paged_attention_mosaic(q, kv, kv, pages, batch, spec, options=options, interpret=interpret)

    return run, pages


def _latent(sizes: dict[str, int], tiny: bool, interpret: Any) -> Step:
    """64 rows of DeepSeek-V3 that decode at 4096 tokens."""
    spec = MLASpec(2 if tiny else 128, 128 if tiny else 512, 64, 192**-0.5)
    rows = 2 if tiny else 64
    batch, num_pages = _batch(rows, 130 if tiny else 4096, 1)
    q, new = jnp.ones((rows, spec.num_heads, spec.head_dim)), jnp.ones((rows, spec.head_dim))

    def run(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mla_attention_mosaic(q, new, pages, batch, spec, blocks=MLABlocks(**sizes), interpret=interpret)

    return run, jnp.zeros((num_pages, PAGE_SIZE, spec.head_dim), jnp.bfloat16)


def _experts(multiple: int, sizes: dict[str, int], tiny: bool, interpret: Any) -> Step:
    """512 rows of 128 experts, 4 each."""
    rows, experts, outputs, inputs = (8, 2, multiple, 128) if tiny else (512, 128, 1536 + multiple, 2048)
    x, w = jnp.ones((rows, inputs)), jnp.ones((experts, outputs, inputs), jnp.bfloat16)
    groups = jnp.full((experts,), rows // experts, jnp.int32)

    def run(_: None) -> tuple[jax.Array, None]:
        return grouped_matmul_mosaic(x, w, groups, blocks=GroupedBlocks(**sizes), interpret=interpret), None

    return run, None


def _quantized(shape_class: str, sizes: dict[str, int], tiny: bool, interpret: Any) -> Step:
    """16 or 256 rows times a matrix [4096, 14336] of 4 bits."""
    rows = {"few": 3, "many": 33}[shape_class] if tiny else {"few": 16, "many": 256}[shape_class]
    outputs, inputs = (256, 256) if tiny else (4096, 14336)
    scales = jnp.ones((inputs // 32, outputs), jnp.float16)
    codes = jnp.zeros((outputs, inputs // 4), jnp.uint16)
    weight = PlanarWeight(codes, scales, scales, "int4", (outputs, inputs), 32)
    x = jnp.ones((rows, inputs))

    def run(_: None) -> tuple[jax.Array, None]:
        return quant_matmul_mosaic(x, weight, blocks=QuantBlocks(**sizes), interpret=interpret), None

    return run, None
