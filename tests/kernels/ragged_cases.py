"""Random ragged batches, and the float64 oracle that every backend is compared with."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.paged_attention.api import AttentionSpec
from jaxserve.pallas_kernels.ragged import RaggedBatch
from stored_pages import load, store, unwritten


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: `cached` tokens lie in its pages already, `new` are computed in this step."""

    cached: int
    new: int


@dataclasses.dataclass
class Case:
    """One step. `keys[r]` and `values[r]` are [cached + new, KV, D] as the pages hold them (float64)."""

    spec: AttentionSpec
    rows: list[Row]
    page_size: int
    q: np.ndarray  # [T, H, D] float32
    k: np.ndarray  # [T, KV, D] float32
    v: np.ndarray  # [T, KV, D] float32
    page_dtype: str
    token_pages: np.ndarray  # [num_pages, page_size, 2, KV, ...] as stored_pages has them, of [..., D]
    batch: RaggedBatch
    keys: list[np.ndarray]
    values: list[np.ndarray]
    sinks: np.ndarray | None

    def oracle(self) -> np.ndarray:
        """[T, H, D] float64; zeros for unused tokens."""
        out = np.zeros(self.q.shape)
        token = 0
        for row, keys, values in zip(self.rows, self.keys, self.values):
            for position in range(row.cached, row.cached + row.new):
                out[token] = self._attend(self.q[token].astype(np.float64), keys, values, position)
                token += 1
        return out

    def _attend(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int) -> np.ndarray:
        spec = self.spec
        first = max(0, position + 1 - spec.sliding_window) if spec.sliding_window else 0
        out = np.zeros(q.shape)
        for head in range(spec.num_heads):
            kv_head = head // spec.group_size
            scores = keys[first : position + 1, kv_head] @ q[head] * spec.scale
            if spec.logit_softcap:
                scores = spec.logit_softcap * np.tanh(scores / spec.logit_softcap)
            logits = scores if self.sinks is None else np.append(scores, np.float64(self.sinks[head]))
            weights = np.exp(scores - logits.max())
            out[head] = weights @ values[first : position + 1, kv_head] / np.exp(logits - logits.max()).sum()
        return out

    def written_pages(self) -> np.ndarray:
        """token_pages as the step must leave them: this step's K/V in, nothing else changed."""
        pages = self.token_pages.copy()
        flat = pages.reshape(-1, *pages.shape[2:])
        slots = np.asarray(self.batch.write_slot)
        for token in range(sum(row.new for row in self.rows)):
            flat[slots[token]] = store(np.stack([self.k[token], self.v[token]]), self.page_dtype)
        return pages


def make_case(
    rng: np.random.Generator,
    spec: AttentionSpec,
    rows: list[Row],
    page_size: int,
    page_dtype: str = "float32",
    *,
    extra_tokens: int = 0,
    extra_rows: int = 0,
    extra_pages: int = 0,
) -> Case:
    """Random contents for `rows`; the extra_* give the padding of T, R and P."""
    total = sum(row.new for row in rows)
    num_tokens, num_rows = max(1, total + extra_tokens), max(1, len(rows) + extra_rows)
    needed = [-(-(row.cached + row.new) // page_size) for row in rows]
    width = max([*needed, 1]) + extra_pages
    num_pages = 1 + sum(needed) + 2
    ids = rng.permutation(np.arange(1, num_pages))
    kv_shape = (spec.num_kv_heads, spec.head_dim)

    pages = unwritten((num_pages, page_size, 2, *kv_shape), page_dtype)
    flat = pages.reshape(num_pages * page_size, *pages.shape[2:])
    table = np.zeros((num_rows, width), np.int32)
    positions = np.zeros(num_tokens, np.int32)
    row_of_token = np.full(num_tokens, num_rows, np.int32)
    write_slot = np.full(num_tokens, num_pages * page_size, np.int32)
    query_start = np.full(num_rows + 1, total, np.int32)
    seq_len = np.zeros(num_rows, np.int32)
    q = rng.standard_normal((num_tokens, spec.num_heads, spec.head_dim), np.float32)
    k, v = (rng.standard_normal((num_tokens, *kv_shape), np.float32) for _ in range(2))
    q[total:], k[total:], v[total:] = np.nan, np.nan, np.nan

    keys, values, token, used = [], [], 0, 0
    for r, row in enumerate(rows):
        length = row.cached + row.new
        table[r, : needed[r]] = ids[used : used + needed[r]]
        used += needed[r]
        at = np.arange(length)
        slots = table[r, at // page_size] * page_size + at % page_size
        contents = store(rng.standard_normal((length, 2, *kv_shape), np.float32), page_dtype)
        flat[slots[: row.cached]] = contents[: row.cached]
        span = slice(token, token + row.new)
        contents[row.cached :] = store(np.stack([k[span], v[span]], axis=1), page_dtype)
        exact = load(contents, page_dtype)
        keys.append(exact[:, 0])
        values.append(exact[:, 1])
        positions[span], row_of_token[span] = at[row.cached :], r
        write_slot[span] = slots[row.cached :]
        query_start[r], seq_len[r] = token, length
        token += row.new
    batch = RaggedBatch(
        *(
            jnp.asarray(x)
            for x in (positions, row_of_token, write_slot, query_start, seq_len, table, np.int32([len(rows)]))
        )
    )
    sinks = rng.standard_normal(spec.num_heads).astype(np.float32) if spec.has_sinks else None
    return Case(spec, rows, page_size, q, k, v, page_dtype, pages, batch, keys, values, sinks)
