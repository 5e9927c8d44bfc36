"""The programs of step.py over a mesh: the same functions under shard_map, each device with its part.

Arrays of a rank are joined along their first axis (`ranks`, or `devices` for pages), so that a device sees exactly the
shapes that a single-device engine has: one rank's packed step, its pages, its tables. Logits and the tables over the
vocabulary are split over `tensor` along their second axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.moe import expert_counts
from jaxserve.runner import batch_builder, sample_builder, sampling, sharded_sampling, step
from jaxserve.runner.step import COPIES_PER_CALL, Leaves, Program, StepPrograms
from jaxserve.sampling_params import MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS
from jaxserve.sharding.rules import spec
from jaxserve.sharding.shape import MeshShape

RANKS = spec("ranks")
DEVICES = spec("devices")
ROWS_BY_VOCAB = spec("ranks", "vocab")
VOCAB = spec("vocab")
EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class ShardedPrograms(StepPrograms):
    """StepPrograms over `mesh`. pages are those of one device; shapes.vocab_size is that of the whole model.

    local_vocab    tokens of one device's part of the vocabulary
    load_shape     layers with experts, experts: what is counted of choices ((1, 1) without any)
    publishes      tokens are also made available on every host
    """

    mesh: Mesh
    shape: MeshShape
    load_shape: tuple[int, int]
    local_vocab: int
    publishes: bool

    def all_keys(self) -> Iterator[tuple[Any, ...]]:
        yield from super().all_keys()
        if self.publishes:
            for size in reversed(self.shapes.sample_buckets):
                yield ("publish", size)
                yield ("publish_logprobs", size)
            yield ("publish_pooled",)

    def global_struct(self, struct: jax.ShapeDtypeStruct, part: PartitionSpec) -> jax.ShapeDtypeStruct:
        """The array whose part on one device is `struct`."""
        shape = list(struct.shape)
        for dimension, axes in enumerate(part):
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                shape[dimension] *= self.mesh.shape[axis]
        return jax.ShapeDtypeStruct(tuple(shape), struct.dtype, sharding=NamedSharding(self.mesh, part))

    def _global_structs(self, structs: Any, part: PartitionSpec) -> Any:
        return jax.tree.map(lambda struct: self.global_struct(struct, part), structs)

    def state_structs(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
        """(page arrays, (last-token table, token counts, biases, expert load)) as global arrays."""
        tables = (self._table(), self._rows(jnp.int16), self._rows(jnp.float32), self._load())
        specs = (RANKS, ROWS_BY_VOCAB, ROWS_BY_VOCAB, RANKS)
        return (
            self._global_structs(self.pages, DEVICES),
            tuple(self.global_struct(table, part) for table, part in zip(tables, specs)),
        )

    def _over_mesh(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[tuple[Any, PartitionSpec], ...],  # what one device sees, and how it is split
        out_specs: Any,
        *,
        donate: tuple[int, ...] = (),
        has_leaves: bool = False,
    ) -> Program:
        """A program whose arguments are given by one device's part; with has_leaves the model comes first."""
        structs = tuple(self._global_structs(struct, part) for struct, part in arguments)
        in_specs = tuple(part for _, part in arguments)
        if has_leaves:
            leaves = self.model.leaves
            structs = (tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves), *structs)
            in_specs = (tuple(x.sharding.spec for x in leaves), *in_specs)  # type: ignore[union-attr]
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return Program(name, mapped, structs, donate)

    def _forward(self, num_tokens: int) -> Program:
        layout = batch_builder.StepLayout(self.shapes)
        return self._over_mesh(
            f"forward {num_tokens}",
            functools.partial(forward, self, layout, num_tokens),
            (
                (self.pages, DEVICES),
                (self._table(), RANKS),
                (_int32(layout.size(num_tokens)), RANKS),
                (self._load(), RANKS),
            ),
            (RANKS, RANKS, DEVICES, RANKS),
            donate=(1, 4),
            has_leaves=True,
        )

    def _head(self, num_samples: int) -> Program:
        hidden = jax.ShapeDtypeStruct((self.shapes.max_num_samples, self.hidden_size), jnp.float32)
        function = functools.partial(head, self, num_samples)
        return self._over_mesh(f"head {num_samples}", function, ((hidden, RANKS),), ROWS_BY_VOCAB, has_leaves=True)

    def _adjust(self, num_samples: int) -> Program:
        return self._over_mesh(
            f"adjust {num_samples}",
            functools.partial(adjust, self.shape, num_samples),
            (
                (self._logits(num_samples), ROWS_BY_VOCAB),
                (self._packed_samples(num_samples), RANKS),
                (self._rows(jnp.int16), ROWS_BY_VOCAB),
                (self._rows(jnp.float32), ROWS_BY_VOCAB),
                (_int32(num_samples * self.local_mask_words), DEVICES),
                (self._table(), RANKS),
                (_int32(num_samples * MAX_BAD_WORDS * 2), RANKS),
            ),
            ROWS_BY_VOCAB,
        )

    def _greedy(self, num_samples: int) -> Program:
        return self._sample(f"greedy {num_samples}", num_samples, functools.partial(sample_greedy, self, num_samples))

    def _random(self, num_samples: int) -> Program:
        return self._sample(f"random {num_samples}", num_samples, functools.partial(sample_random, self, num_samples))

    def _sample(self, name: str, num_samples: int, function: Callable[..., Any]) -> Program:
        arguments = (
            (self._logits(num_samples), ROWS_BY_VOCAB),
            (self._packed_samples(num_samples), RANKS),
            (self._table(), RANKS),
        )
        return self._over_mesh(name, function, arguments, (RANKS, RANKS), donate=(2,))

    def _count(self, num_samples: int) -> Program:
        arguments = (
            (self._rows(jnp.int16), ROWS_BY_VOCAB),
            (self._packed_samples(num_samples), RANKS),
            (_int32(num_samples), RANKS),
        )
        function = functools.partial(count, self.shape, num_samples)
        return self._over_mesh(f"count {num_samples}", function, arguments, ROWS_BY_VOCAB, donate=(0,))

    def _logprobs(self, num_samples: int) -> Program:
        def function(logits: jax.Array, tokens: jax.Array, named: jax.Array) -> sampling.Logprobs:
            return sharded_sampling.token_logprobs(logits, tokens, named, self.shapes.vocab_size, self.shape)

        arguments = (
            (self._logits(num_samples), ROWS_BY_VOCAB),
            (_int32(num_samples), RANKS),
            (_int32(num_samples * MAX_LOGPROB_TOKEN_IDS), RANKS),
        )
        return self._over_mesh(f"logprobs {num_samples}", function, arguments, RANKS)

    def _copy(self) -> Program:
        function = functools.partial(step.copy_pages, self.attention)
        arguments = ((self.pages, DEVICES), (_int32(1 + 2 * COPIES_PER_CALL), RANKS))
        return self._over_mesh("copy", function, arguments, DEVICES, donate=(0,))

    def _set_row(self, name: str, dtype: Any) -> Program:
        values = jax.ShapeDtypeStruct((self.local_vocab,), dtype)
        arguments = ((self._rows(dtype), ROWS_BY_VOCAB), (_int32(1), RANKS), (values, VOCAB))
        return self._over_mesh(name, set_row, arguments, ROWS_BY_VOCAB, donate=(0,))

    def _publish(self, num_samples: int) -> Program:
        return self._over_mesh(f"publish {num_samples}", publish, ((_int32(num_samples), RANKS),), EVERYWHERE)

    def _publish_logprobs(self, num_samples: int) -> Program:
        found = jax.eval_shape(
            sampling.token_logprobs,
            jax.ShapeDtypeStruct((num_samples, self.shapes.vocab_size), jnp.float32),
            _int32(num_samples),
            _int32(num_samples * MAX_LOGPROB_TOKEN_IDS),
        )
        # Plain tuples: the parts of an argument are split alike.
        function = functools.partial(jax.tree.map, publish)
        return self._over_mesh(f"publish logprobs {num_samples}", function, ((tuple(found), RANKS),), EVERYWHERE)

    def _publish_pooled(self) -> Program:
        pooled = jax.ShapeDtypeStruct((self.shapes.max_num_rows, self.hidden_size), jnp.float32)
        return self._over_mesh("publish pooled", publish, ((pooled, RANKS),), EVERYWHERE)

    @property
    def local_mask_words(self) -> int:
        """int32 words of one row's mask on one device."""
        return -(-self.local_vocab // 32)

    def _load(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.load_shape, jnp.int32)

    def _rows(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.shapes.max_num_rows, self.local_vocab), dtype)

    def _logits(self, num_samples: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_samples, self.local_vocab), jnp.float32)


def _int32(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)


def forward(
    programs: ShardedPrograms,
    layout: batch_builder.StepLayout,
    num_tokens: int,
    leaves: Leaves,
    pages: step.Pages,  # donated
    last_token: jax.Array,
    packed: jax.Array,
    load: jax.Array,  # [layers with experts, E] int32, donated
) -> tuple[jax.Array, jax.Array, step.Pages, jax.Array]:
    """As step.forward; besides, `load` with the choices of this step's tokens."""
    built: list[Any] = []

    def rebuild(leaves: Leaves) -> Any:
        built.append(programs.model.rebuild(leaves))
        return built[-1]

    hidden, pooled, pages = step.forward(rebuild, layout, num_tokens, leaves, pages, last_token, packed)
    counted = expert_counts(layer.mlp for layer in built[0].layers)
    return hidden, pooled, pages, load if counted is None else load + counted


def head(programs: ShardedPrograms, num_samples: int, leaves: Leaves, hidden: jax.Array) -> jax.Array:
    """hidden [max_num_samples, hidden_size] -> logits [num_samples, V of this device]."""
    logits = step.head(programs.model.rebuild, num_samples, leaves, hidden)
    return sharded_sampling.mask_padding(logits, programs.shapes.vocab_size, programs.shape)


def adjust(
    shape: MeshShape,
    num_samples: int,
    logits: jax.Array,  # [S, V of this device], as counts, bias and mask
    packed: jax.Array,
    counts: jax.Array,
    bias: jax.Array,
    mask: jax.Array,
    last_token: jax.Array,
    forbidden: jax.Array,
) -> jax.Array:
    """As step.adjust."""
    forbidden = sharded_sampling.localize_forbidden(forbidden, logits.shape[1], shape)
    return step.adjust(num_samples, logits, packed, counts, bias, mask, last_token, forbidden)


def sample_greedy(
    programs: ShardedPrograms,
    num_samples: int,
    logits: jax.Array,  # [S, V of this device]
    packed: jax.Array,
    last_token: jax.Array,  # donated
) -> tuple[jax.Array, jax.Array]:
    """As step.sample_greedy."""
    drawn = sharded_sampling.greedy_tokens(logits, programs.shapes.vocab_size, programs.shape)
    return step.store(sample_builder.unpack(packed, num_samples), drawn, last_token)


def sample_random(
    programs: ShardedPrograms, num_samples: int, logits: jax.Array, packed: jax.Array, last_token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As step.sample_random."""
    inputs = sample_builder.unpack(packed, num_samples)
    vocab_size, shape = programs.shapes.vocab_size, programs.shape
    drawn = sharded_sampling.draw_tokens(logits, inputs, vocab_size, shape, branch=programs.branch)
    return step.store(inputs, drawn, last_token)


def count(shape: MeshShape, num_samples: int, counts: jax.Array, packed: jax.Array, tokens: jax.Array) -> jax.Array:
    """As step.count."""
    inputs = sample_builder.unpack(packed, num_samples)
    return sharded_sampling.count_tokens(counts, inputs.count_row, tokens, shape)


def set_row(table: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """As step.set_row; a row past the end leaves the table alone (it is another rank's that is set)."""
    at = jnp.minimum(row[0], table.shape[0] - 1)
    old = lax.dynamic_slice_in_dim(table, at, 1)
    return lax.dynamic_update_slice_in_dim(table, jnp.where(row[0] < table.shape[0], values[None], old), at, 0)


def publish(values: jax.Array) -> jax.Array:
    """Every rank's values on every device, one rank after the other."""
    return lax.all_gather(values, ("data", "expert"), tiled=True)
