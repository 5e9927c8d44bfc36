"""Steps padded to fixed sizes, so that an interpreted kernel is compiled once for many drawn batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec
from ragged_cases import Case, Row, make_case
from stored_pages import FLOATS, unwritten


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of one program."""

    page_size: int
    tokens: int = 120
    rows: int = 4
    context: int = 448  # tokens of a row at most

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def num_pages(self) -> int:
        return 3 + self.rows * self.pages_per_row


def make_fixed(spec: AttentionSpec, sizes: Sizes, rows: list[Row], seed: int, dtype: str) -> Case:
    """A random step of these rows with the given sizes; its queries rounded as a GPU gets them."""
    needed = max([-(-(row.cached + row.new) // sizes.page_size) for row in rows] + [1])
    total = sum(row.new for row in rows)
    case = make_case(
        np.random.default_rng(seed), spec, rows, sizes.page_size, dtype,
        extra_tokens=sizes.tokens - total, extra_rows=sizes.rows - len(rows),
        extra_pages=sizes.pages_per_row - needed,
    )  # fmt: skip
    old = case.token_pages
    pages = unwritten((sizes.num_pages, *old.shape[1:4], spec.head_dim), dtype)
    pages[: old.shape[0]] = old
    slots = np.full(sizes.tokens, sizes.num_pages * sizes.page_size, np.int32)
    slots[:total] = np.asarray(case.batch.write_slot)[:total]
    batch = dataclasses.replace(case.batch, write_slot=jnp.asarray(slots))
    q = case.q.astype(FLOATS.get(dtype, FLOATS["float16"])).astype(np.float32)
    return dataclasses.replace(case, q=q, token_pages=pages, batch=batch)


def compiled_call(step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """step(*arguments), compiled once per `step` and shapes: jax.jit would trace the interpreter anew in each call."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, arguments))
    compiled = _compile(step, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
    return compiled(*jax.tree.unflatten(treedef, leaves))


@functools.cache
def _compile(step: Callable[..., Any], treedef: Any, avals: tuple[Any, ...]) -> Any:
    leaves = [jax.ShapeDtypeStruct(*aval) for aval in avals]
    return jax.jit(step).lower(*jax.tree.unflatten(treedef, leaves)).compile()


def assert_close(out: np.ndarray, expected: np.ndarray) -> None:
    """Relative error at most 2e-3 over the whole step, and at most 6e-3 for one head of one token: the products take
    rounded softmax weights, and 2e-3 is half a unit in the last place of bfloat16."""
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error <= 2e-3, f"relative error {error:.2e}"
    each = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert each.max() <= 6e-3, f"relative error of one head of one token {each.max():.2e}"
