"""The compiled programs of an engine: what they compute, and their fixed signatures.

A step is forward (tokens -> hidden states of the sampled positions), head (-> logits), greedy or random (-> tokens,
stored in the last-token table) and, when a row asks for it, adjust (penalties, bias, mask) between head and draw,
count and logprobs at the end. Small families instead of one fused program make the number of compilations a sum of
buckets and options instead of a product, and a mask may arrive after forward has started.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.models.contract import KVPages, Model, StepInputs
from jaxserve.pallas_kernels import page_copy
from jaxserve.pallas_kernels.paged_attention.quantized_pages import Pages as LayerPages
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.runner import batch_builder, sample_builder, sampling
from jaxserve.runner.buckets import StepShapes
from jaxserve.sampling_params import MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS
from jaxserve.scheduler.decision import POOL_SUM

COPIES_PER_CALL = 64  # page copies that one call of the copy program takes
# Pages fill the device by design. Above 80 % of its memory XLA computes values again, all-gathers of tokens among them,
# rather than keep them: it finds megabytes where the weights and the pages take all the room.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}

Pages = tuple[LayerPages, ...]
Leaves = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model as a flat tuple of arrays and the function that puts it together again inside a program.

    Programs take the tuple as it is: flattening a module's tree costs more host time per step than the rest of
    the dispatch.
    """

    leaves: Leaves
    rebuild: Callable[[Leaves], Model]


def split_model(model: Model) -> SplitModel:
    """model: an nnx module, or any registered pytree."""
    if isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        return SplitModel(tuple(leaves), lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves)))
    leaves, structure = jax.tree.flatten(model)
    return SplitModel(tuple(leaves), lambda leaves: jax.tree.unflatten(structure, leaves))


@dataclasses.dataclass(frozen=True)
class Program:
    """One program before compilation: the function and the shapes it is called with."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    donate: tuple[int, ...] = ()

    def jitted(self) -> Any:
        """The function as jax.jit makes it; not traced yet."""
        return jax.jit(self.function, donate_argnums=self.donate, compiler_options=COMPILER_OPTIONS)

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower; compiling the result releases the GIL."""
        return self.jitted().lower(*self.arguments)


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """All programs that an engine of these shapes can use, by key.

    model       the split model (its leaves may be abstract)
    pages       shape and dtype of each layer's pages
    attention   backend that owns the pages
    """

    model: SplitModel
    shapes: StepShapes
    pages: tuple[Any, ...]
    hidden_size: int
    attention: str
    branch: bool  # see sampling.draw_tokens

    def all_keys(self) -> Iterator[tuple[Any, ...]]:
        """Every key, the slowest to compile first."""
        for size in reversed(self.shapes.token_buckets):
            yield ("forward", size)
        for size in reversed(self.shapes.sample_buckets):
            for name in ("random", "adjust", "greedy", "logprobs", "head", "count"):
                yield (name, size)
        yield ("copy",)
        yield ("set_counts",)
        yield ("set_bias",)

    def program(self, key: tuple[Any, ...]) -> Program:
        """The program of `key`."""
        return getattr(self, f"_{key[0]}")(*key[1:])

    def _forward(self, num_tokens: int) -> Program:
        layout = batch_builder.StepLayout(self.shapes)
        function = functools.partial(forward, self.model.rebuild, layout, num_tokens)
        arguments = (_abstract(self.model.leaves), self.pages, self._table(), _int32(layout.size(num_tokens)))
        return Program(f"forward {num_tokens}", function, arguments, donate=(1,))

    def _head(self, num_samples: int) -> Program:
        hidden = jax.ShapeDtypeStruct((self.shapes.max_num_samples, self.hidden_size), jnp.float32)
        function = functools.partial(head, self.model.rebuild, num_samples)
        return Program(f"head {num_samples}", function, (_abstract(self.model.leaves), hidden))

    def _adjust(self, num_samples: int) -> Program:
        arguments = (
            self._logits(num_samples),
            self._packed_samples(num_samples),
            self._rows(jnp.int16),
            self._rows(jnp.float32),
            _int32(num_samples * self.shapes.mask_words),
            self._table(),
            _int32(num_samples * MAX_BAD_WORDS * 2),
        )
        return Program(f"adjust {num_samples}", functools.partial(adjust, num_samples), arguments)

    def _greedy(self, num_samples: int) -> Program:
        arguments = (self._logits(num_samples), self._packed_samples(num_samples), self._table())
        function = functools.partial(sample_greedy, num_samples)
        return Program(f"greedy {num_samples}", function, arguments, donate=(2,))

    def _random(self, num_samples: int) -> Program:
        arguments = (self._logits(num_samples), self._packed_samples(num_samples), self._table())
        function = functools.partial(sample_random, num_samples, self.branch)
        return Program(f"random {num_samples}", function, arguments, donate=(2,))

    def _count(self, num_samples: int) -> Program:
        arguments = (self._rows(jnp.int16), self._packed_samples(num_samples), _int32(num_samples))
        return Program(f"count {num_samples}", functools.partial(count, num_samples), arguments, donate=(0,))

    def _logprobs(self, num_samples: int) -> Program:
        arguments = (self._logits(num_samples), _int32(num_samples), _int32(num_samples * MAX_LOGPROB_TOKEN_IDS))
        return Program(f"logprobs {num_samples}", sampling.token_logprobs, arguments)

    def _copy(self) -> Program:
        function = functools.partial(copy_pages, self.attention)
        return Program("copy", function, (self.pages, _int32(1 + 2 * COPIES_PER_CALL)), donate=(0,))

    def _set_counts(self) -> Program:
        return self._set_row("set counts", jnp.int16)

    def _set_bias(self) -> Program:
        return self._set_row("set bias", jnp.float32)

    def _set_row(self, name: str, dtype: Any) -> Program:
        values = jax.ShapeDtypeStruct((self.shapes.vocab_size,), dtype)
        return Program(name, set_row, (self._rows(dtype), _int32(1), values), donate=(0,))

    def _rows(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.shapes.max_num_rows, self.shapes.vocab_size), dtype)

    def _packed_samples(self, num_samples: int) -> jax.ShapeDtypeStruct:
        return _int32(sample_builder.packed_size(num_samples))

    def _table(self) -> jax.ShapeDtypeStruct:
        return _int32(self.shapes.max_num_rows)

    def _logits(self, num_samples: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_samples, self.shapes.vocab_size), jnp.float32)


def _int32(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)


def _abstract(leaves: Leaves) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)


def forward(
    rebuild: Callable[[Leaves], Model],
    layout: batch_builder.StepLayout,
    num_tokens: int,
    leaves: Leaves,
    pages: Pages,  # donated
    last_token: jax.Array,  # [rows of the device tables] int32
    packed: jax.Array,  # [layout.size(num_tokens)] int32
) -> tuple[jax.Array, jax.Array, Pages]:
    """Returns (hidden [max_num_samples, hidden_size] of the sampled positions, pooled [rows, hidden_size] of those
    that make embeddings, updated pages)."""
    inputs, table_row, pooling = batch_builder.unpack(layout, packed, num_tokens)
    row = jnp.minimum(inputs.batch.row_of_token, table_row.shape[0] - 1)
    tokens = jnp.where(inputs.token_ids < 0, last_token[table_row[row]], inputs.token_ids)
    inputs = StepInputs(tokens, inputs.batch, inputs.sample_index)
    model = rebuild(leaves)
    hidden, updated = model(inputs, KVPages(pages))
    return hidden[inputs.sample_index], pool(model, hidden, inputs.batch, pooling), updated.layers


def pool(model: Model, hidden: jax.Array, batch: RaggedBatch, pooling: jax.Array) -> jax.Array:
    """hidden [T, hidden_size] -> [R, hidden_size] float32 behind the final norm: of each row its last token (POOL_LAST)
    or the sum over its tokens (POOL_SUM); zeros, and hardly any time, in steps where no row asks (pooling [R])."""
    num_rows = pooling.shape[0]

    def compute() -> jax.Array:
        states = model.compute_embeddings(hidden)
        sums = jax.ops.segment_sum(states, batch.row_of_token, num_segments=num_rows)  # padding has no segment
        last = states[jnp.maximum(batch.query_start[1:] - 1, 0)]
        return jnp.where((pooling == POOL_SUM)[:, None], sums, last)

    return lax.cond(jnp.any(pooling != 0), compute, lambda: jnp.zeros((num_rows, hidden.shape[1]), jnp.float32))


def head(rebuild: Callable[[Leaves], Model], num_samples: int, leaves: Leaves, hidden: jax.Array) -> jax.Array:
    """hidden [max_num_samples, hidden_size] -> logits [num_samples, V]."""
    return rebuild(leaves).compute_logits(hidden[:num_samples])


def adjust(
    num_samples: int,
    logits: jax.Array,  # [S, V]
    packed: jax.Array,
    counts: jax.Array,  # [rows, V] int16
    bias: jax.Array,  # [rows, V] float32
    mask: jax.Array,  # [S * mask_words] int32
    last_token: jax.Array,
    forbidden: jax.Array,  # [S * MAX_BAD_WORDS * 2] int32
) -> jax.Array:
    """Logits [S, V] with penalties, bias, mask and bad words; rows without them bitwise as they were."""
    inputs = sample_builder.unpack(packed, num_samples)
    forbidden = forbidden.reshape(num_samples, -1, 2)
    return sampling.adjust_logits(logits, inputs, counts, bias, mask.reshape(num_samples, -1), last_token, forbidden)


def sample_greedy(
    num_samples: int,
    logits: jax.Array,  # [S, V]
    packed: jax.Array,
    last_token: jax.Array,  # donated
) -> tuple[jax.Array, jax.Array]:
    """Returns (tokens [S], updated last-token table)."""
    inputs = sample_builder.unpack(packed, num_samples)
    return store(inputs, sampling.greedy_tokens(logits), last_token)


def sample_random(
    num_samples: int, branch: bool, logits: jax.Array, packed: jax.Array, last_token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As sample_greedy, for steps where a row draws."""
    inputs = sample_builder.unpack(packed, num_samples)
    return store(inputs, sampling.draw_tokens(logits, inputs, branch=branch), last_token)


def count(num_samples: int, counts: jax.Array, packed: jax.Array, tokens: jax.Array) -> jax.Array:
    """counts (donated) with the new tokens [S] of rows that have penalties."""
    return sampling.count_tokens(counts, sample_builder.unpack(packed, num_samples).count_row, tokens)


def store(inputs: sampling.SampleInputs, drawn: jax.Array, last_token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Forced tokens in place of the drawn ones, and all of them in the last-token table (donated)."""
    tokens = jnp.where(inputs.forced >= 0, inputs.forced, drawn).astype(jnp.int32)
    return tokens, last_token.at[inputs.row].set(tokens, mode="drop")


def copy_pages(backend: str, pages: Pages, packed: jax.Array) -> Pages:
    """Copy pages one after the other. packed: count, COPIES_PER_CALL sources, COPIES_PER_CALL targets."""
    sources, targets = packed[1 : 1 + COPIES_PER_CALL], packed[1 + COPIES_PER_CALL :]
    return page_copy.copy_pages(pages, packed[0], sources, targets, backend=backend)


def set_row(table: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """table [rows, V] (donated), row [1] int32, values [V]."""
    return lax.dynamic_update_slice(table, values[None], (row[0], jnp.zeros((), jnp.int32)))
