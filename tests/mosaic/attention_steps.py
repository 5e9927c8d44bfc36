"""One step of paged attention by the GPU kernels in the interpreter, and what it must give."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from fixed_size import Sizes, assert_close, compiled_call, make_fixed
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params, races_raise
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec, page_array_shape
from jaxserve.pallas_kernels.paged_attention.mosaic import MosaicOptions, default_options, paged_attention_mosaic
from ragged_cases import Case, Row
from stored_pages import from_device, to_device


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static in one program."""

    spec: AttentionSpec
    page_size: int
    dtype: str = "bfloat16"
    tokens: int = 120
    context: int = 448
    rows: int = 4
    options: MosaicOptions | None = None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.page_size, self.tokens, self.rows, self.context)


def spec(heads: int, kv_heads: int, head_dim: int, **fields) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, **fields)


# Runs of two blocks of 64 keys, so that rows of a few hundred tokens are split and merged.
SPLIT = dataclasses.replace(
    default_options(64), decode=dataclasses.replace(default_options(64).decode, min_blocks=2, stages=2)
)


@functools.cache
def step_of(shape: Shape, deterministic: bool, cascade: bool):
    def step(q, k, v, pages, batch, sinks):
        return paged_attention_mosaic(
            q, k, v, pages, batch, shape.spec, deterministic=deterministic, cascade=cascade, sinks=sinks,
            options=shape.options, interpret=interpreter_params(detect_races=True),
        )  # fmt: skip

    return step


def make(shape: Shape, rows: list[Row], seed: int) -> Case:
    return make_fixed(shape.spec, shape.sizes, rows, seed, shape.dtype)


def run(
    shape: Shape, case: Case, *, deterministic: bool = False, cascade: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(out, pages as [page, token, 2, KV, D])."""
    wanted = page_array_shape(shape.spec, shape.sizes.num_pages, shape.page_size, "mosaic")
    pages = to_device(case.token_pages.transpose(0, 3, 2, 1, 4), shape.dtype, wanted[-1])
    assert pages.shape == wanted
    with races_raise():
        arguments = (case.q, case.k, case.v, pages, case.batch, case.sinks)
        out, pages = jax.block_until_ready(compiled_call(step_of(shape, deterministic, cascade), arguments))
    return np.asarray(out), from_device(pages, shape.spec.head_dim).transpose(0, 3, 2, 1, 4)


def assert_right(case: Case, out: np.ndarray, pages: np.ndarray) -> None:
    total = sum(row.new for row in case.rows)
    assert np.isfinite(out).all()
    assert not out[total:].any()
    assert pages.tobytes() == case.written_pages().tobytes()
    if total:
        assert_close(out[:total], case.oracle()[:total])
