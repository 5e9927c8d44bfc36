"""Runs a model over paged K/V as the engine does, with as little else as possible."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve.models.contract import KVPages, StepInputs
from jaxserve.models.decoder import Decoder
from jaxserve.pallas_kernels.pages import page_array_shape
from jaxserve.pallas_kernels.ragged import RaggedBatch


@dataclasses.dataclass
class Sequence:
    """One request: its pages in order, and how many of its tokens they hold."""

    pages: list[int]
    num_cached: int = 0


class PagedSteps:
    """Steps of one fixed shape: `num_tokens` tokens of up to `num_rows` rows. Pages are handed out in an order that
    mixes the sequences; unused pages hold NaN, so that reading one shows. states: what embeddings are pooled from
    instead of logits."""

    def __init__(
        self, model: Decoder, *, num_tokens: int = 48, num_rows: int = 6, pages_per_row: int = 8, states: bool = False
    ) -> None:
        self.model = model
        self.size, self.rows, self.pages_per_row = num_tokens, num_rows, pages_per_row
        options = model.options
        self.page_size = options.page_size
        self.num_pages = 1 + num_rows * pages_per_row
        self.dtype = jnp.dtype(options.page_dtype)
        self.shapes = [
            page_array_shape(spec, self.num_pages, self.page_size, options.attention) for spec in model.attention_specs
        ]
        self.clear()
        graph, self.state = nnx.split(model)

        def step(state: nnx.State, inputs: StepInputs, pages: KVPages) -> tuple[jax.Array, KVPages]:
            merged = nnx.merge(graph, state)
            hidden, pages = merged(inputs, pages)
            return merged.compute_embeddings(hidden) if states else merged.compute_logits(hidden), pages

        self._step = jax.jit(step, donate_argnums=2)

    def clear(self) -> PagedSteps:
        """Forget all sequences; every page holds NaN again."""
        self.free = list(np.random.default_rng(5).permutation(np.arange(1, self.num_pages)))
        self.pages = KVPages(tuple(jnp.full(shape, jnp.nan, self.dtype) for shape in self.shapes))
        return self

    def start(self) -> Sequence:
        return Sequence([int(self.free.pop()) for _ in range(self.pages_per_row)])

    def forget(self, sequence: Sequence) -> None:
        """Take a sequence's pages away: they hold NaN again and go to whoever starts next."""
        lost = jnp.asarray(sequence.pages)
        self.pages = KVPages(tuple(layer.at[lost].set(jnp.nan) for layer in self.pages.layers))
        self.free.extend(sequence.pages)
        sequence.pages = []

    def run(self, work: list[tuple[Sequence, list[int]]]) -> list[np.ndarray]:
        """Compute the given new tokens of each sequence in one step. Returns their logits [tokens, V] per sequence."""
        size, rows, page_size = self.size, self.rows, self.page_size
        total = sum(len(tokens) for _, tokens in work)
        assert total <= size and len(work) <= rows
        token_ids, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        row_of_token = np.full(size, rows, np.int32)
        write_slot = np.full(size, self.num_pages * page_size, np.int32)
        query_start = np.full(rows + 1, total, np.int32)
        seq_len, table = np.zeros(rows, np.int32), np.zeros((rows, self.pages_per_row), np.int32)
        at = 0
        for row, (sequence, tokens) in enumerate(work):
            query_start[row] = at
            for token in tokens:
                position = sequence.num_cached
                token_ids[at], positions[at], row_of_token[at] = token, position, row
                write_slot[at] = sequence.pages[position // page_size] * page_size + position % page_size
                sequence.num_cached += 1
                at += 1
            seq_len[row] = sequence.num_cached
            table[row] = sequence.pages
        batch = RaggedBatch(
            positions=jnp.asarray(positions),
            row_of_token=jnp.asarray(row_of_token),
            write_slot=jnp.asarray(write_slot),
            query_start=jnp.asarray(query_start),
            seq_len=jnp.asarray(seq_len),
            page_table=jnp.asarray(table),
            num_rows=jnp.asarray([len(work)], jnp.int32),
        )
        inputs = StepInputs(jnp.asarray(token_ids), batch, jnp.zeros(rows, jnp.int32))
        logits, self.pages = self._step(self.state, inputs, self.pages)
        values = np.asarray(logits)
        return [values[query_start[row] : query_start[row] + len(tokens)] for row, (_, tokens) in enumerate(work)]
