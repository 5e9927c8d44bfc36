"""Kernels at serving shapes: what gpu_compile.py compiles without a card and gpu_kernels.py runs on one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.mla_attention.mosaic import mla_attention_mosaic
from jaxserve.pallas_kernels.mla_attention.spec import MLASpec
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, page_array_shape, page_bytes
from jaxserve.pallas_kernels.paged_attention.mosaic import paged_attention_mosaic
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages, page_struct
from jaxserve.pallas_kernels.ragged import RaggedBatch


@dataclasses.dataclass(frozen=True)
class Work:
    """Rows of one step: `decodes` rows with `context` cached tokens and one new one, then `chunks` rows with
    `context` cached and `chunk` new tokens. The first `shared` tokens of all rows lie on the same pages."""

    decodes: int
    chunks: int
    chunk: int
    context: int
    shared: int = 0

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunks * self.chunk

    def pages_per_row(self, page_size: int) -> int:
        return -(-(self.context + max(self.chunk, 1)) // page_size)

    def batch(self, page_size: int) -> RaggedBatch:
        """The step, every page of a row at a random place."""
        width = self.pages_per_row(page_size)
        new = np.array([1] * self.decodes + [self.chunk] * self.chunks)
        start = np.concatenate([[0], np.cumsum(new)])
        table = np.random.default_rng(0).permutation(self.rows * width).reshape(self.rows, width) + 1
        table[:, : self.shared // page_size] = table[0, : self.shared // page_size]
        row = np.repeat(np.arange(self.rows), new)
        positions = self.context + np.arange(self.tokens) - start[row]
        slots = table[row, positions // page_size] * page_size + positions % page_size
        fields = (positions, row, slots, start, self.context + new, table, np.array([self.rows]))
        return RaggedBatch(*(jnp.asarray(field, jnp.int32) for field in fields))

    def abstract_batch(self, page_size: int) -> RaggedBatch:
        tokens, rows = self.tokens, self.rows
        shapes = (
            (tokens,), (tokens,), (tokens,), (rows + 1,), (rows,), (rows, self.pages_per_row(page_size)), (1,)
        )  # fmt: skip
        return RaggedBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))

    def seen(self, window: int = 0) -> tuple[int, int]:
        """(query-key pairs, tokens of context read once per row)."""
        limit = window or math.inf
        pairs = sum(min(self.context + i + 1, limit) for i in range(self.chunk)) * self.chunks
        pairs += self.decodes * min(self.context + 1, limit)
        read = self.decodes * min(self.context + 1, limit)
        read += self.chunks * min(self.context + self.chunk, limit + self.chunk)
        read -= max(self.decodes - 1, 0) * self.shared
        return int(pairs), int(read)


DECODE = Work(64, 0, 0, 4096)
PREFILL = Work(0, 4, 512, 8192)
MIXED = Work(48, 2, 512, 4096)
CASCADE = Work(64, 0, 0, 4096, shared=2048)


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of one layer.

    name      "<model> <work>"
    function  (arrays ..., pages, batch) -> (out, pages)
    arrays    shapes of the float32 arguments before the pages
    pages     shapes and dtypes of the pages, which are donated
    flops, bytes   what the step needs at least
    needs     instructions that the machine code of its kernels must contain
    """

    name: str
    function: Callable[..., Any]
    arrays: tuple[tuple[int, ...], ...]
    pages: Pages  # abstract
    work: Work
    page_size: int
    flops: int
    bytes: int
    needs: tuple[str, ...]
    spec: AttentionSpec | MLASpec

    def abstract_arguments(self) -> tuple[Any, ...]:
        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.arrays)
        return (*arrays, self.pages, self.work.abstract_batch(self.page_size))


def _attention(name: str, spec: AttentionSpec, work: Work, page_size: int = 64, page_dtype: str = "bfloat16") -> Case:
    num_pages = work.rows * work.pages_per_row(page_size) + 1
    pages = page_struct(page_array_shape(spec, num_pages, page_size, "mosaic"), page_dtype)
    heads, kv = (work.tokens, spec.num_heads, spec.head_dim), (work.tokens, spec.num_kv_heads, spec.head_dim)
    sinks = (spec.num_heads,) if spec.has_sinks else None

    def function(q, k, v, *rest):
        *some, pages, batch = rest
        return paged_attention_mosaic(q, k, v, pages, batch, spec, sinks=some[0] if some else None)

    pairs, read = work.seen(spec.sliding_window)
    per_token = page_bytes(spec, page_size, page_dtype, "mosaic") // page_size
    return Case(
        name, function, (heads, kv, kv, *([sinks] if sinks else [])), pages, work, page_size,
        flops=4 * pairs * spec.num_heads * spec.head_dim,
        bytes=read * per_token + work.tokens * (per_token + 6 * spec.num_heads * spec.head_dim),
        needs=("HGMMA", "UTMALDG"), spec=spec,
    )  # fmt: skip


def _latent(name: str, work: Work, page_size: int = 64) -> Case:
    spec = MLASpec(num_heads=128, latent_dim=512, rope_dim=64, scale=192**-0.5)
    num_pages = work.rows * work.pages_per_row(page_size) + 1
    pages = jax.ShapeDtypeStruct((num_pages, page_size, spec.head_dim), jnp.bfloat16)
    pairs, read = work.seen()

    def function(q, new, pages, batch):
        return mla_attention_mosaic(q, new, pages, batch, spec)

    return Case(
        name, function, ((work.tokens, spec.num_heads, spec.head_dim), (work.tokens, spec.head_dim)), pages, work,
        page_size, flops=2 * pairs * spec.num_heads * (spec.head_dim + spec.latent_dim),
        bytes=read * spec.head_dim * 2 + work.tokens * spec.num_heads * (2 * spec.head_dim + 4 * spec.latent_dim),
        needs=("HGMMA", "UTMALDG"), spec=spec,
    )  # fmt: skip


def _spec(heads: int, kv_heads: int, head_dim: int, **fields: Any) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, **fields)


def all_cases() -> list[Case]:
    """Every kernel at the shapes of the models in the table of docs/kernels.md."""
    llama, qwen = _spec(32, 8, 128), _spec(64, 8, 128)
    cases = [
        _attention(f"{model} {kind}", spec, work, page_size)
        for model, spec, page_size in (
            ("Llama-3-8B", llama, 64),
            ("Qwen3-32B", qwen, 64),
            ("Gemma-3 local", _spec(16, 8, 256, sliding_window=1024), 64),
            ("Gemma-3 global", _spec(16, 8, 256), 64),
            ("SmolLM2-135M", _spec(9, 3, 64), 16),
        )
        for kind, work in (("decode", DECODE), ("prefill", PREFILL), ("cascade", CASCADE))
        if kind != "cascade" or not spec.sliding_window
    ]
    cases.append(_attention("Llama-3-8B mixed", llama, MIXED))
    cases += [
        _attention(f"{model}, {page_dtype} pages, {kind}", spec, work, page_dtype=page_dtype)
        for model, spec, page_dtype in (
            ("Llama-3-8B", llama, "int8"),
            ("Qwen3-32B", qwen, "fp8"),
            ("gpt-oss-20b global", _spec(64, 8, 64, has_sinks=True), "int8"),
        )
        for kind, work in (("decode", DECODE), ("prefill", PREFILL), ("cascade", CASCADE))
    ]
    for kind, work in (("decode", DECODE), ("prefill", PREFILL)):
        cases.append(
            _attention(f"gpt-oss-20b local {kind}", _spec(64, 8, 64, sliding_window=128, has_sinks=True), work)
        )
        cases.append(_attention(f"gpt-oss-20b global {kind}", _spec(64, 8, 64, has_sinks=True), work))
        cases.append(_attention(f"Phi-2 (head_dim 80, pages of 32) {kind}", _spec(32, 32, 80), work, 32))
        cases.append(
            _attention(f"Phi-3-mini (head_dim 96, window) {kind}", _spec(32, 32, 96, sliding_window=2047), work)
        )
    cases.append(_attention("Gemma-2 cap prefill", _spec(16, 8, 256, logit_softcap=50.0), PREFILL))
    cases.append(_latent("DeepSeek-V3 decode", DECODE))
    cases.append(_latent("DeepSeek-V3 prefill", Work(0, 4, 256, 8192)))
    return cases
