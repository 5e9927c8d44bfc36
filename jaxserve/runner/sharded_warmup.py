"""First calls of a mesh's programs, and the view of them that deterministic.py probes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from jaxserve.runner.batch_builder import StepBuffer
from jaxserve.runner.planned_step import PlannedSamples
from jaxserve.runner.sample_builder import SampleBuilder, StagedSamples
from jaxserve.runner.sharded_device import ShardedStepRunner
from jaxserve.runner.sharded_step import DEVICES, RANKS, VOCAB, ShardedPrograms
from jaxserve.runner.step import COPIES_PER_CALL
from jaxserve.scheduler.decision import RowWork, SampleWork, StepDecision

_NUM_DIFFERENCES = itertools.count()


class ShardedFirstCall:
    """Runs each program of a mesh once; as warmup.FirstCall. All hosts must make the same calls in the same order."""

    def __init__(self, runner: ShardedStepRunner, programs: ShardedPrograms) -> None:
        self.runner = runner
        self._described = programs

    def __call__(self, key: tuple[Any, ...]) -> None:
        """Call the program of `key` and wait for it."""
        jax.block_until_ready(self._call(*key))

    def _call(self, name: str, size: int = 0) -> Any:
        runner, state, place = self.runner, self.runner.state, self.runner.place
        ranks, program = runner.num_ranks, runner.programs[(name, size) if size else (name,)]
        if name == "forward":
            bucket, packed = runner.planner.batch(self._decisions(size), size)
            assert bucket == size
            hidden, _, state.pages, state.load = program(
                runner.leaves, state.pages, state.last_token, place(packed, RANKS), state.load
            )
            return hidden
        if name == "copy":
            state.pages = program(state.pages, place(np.zeros(ranks * (1 + 2 * COPIES_PER_CALL), np.int32), RANKS))
            return state.pages
        if name in ("set_counts", "set_bias"):
            table = state.counts if name == "set_counts" else state.bias
            row = runner.planner.row_values(0, 0, np.zeros(runner.shapes.vocab_size, table.dtype))
            table = program(table, place(row.rows, RANKS), place(row.values, VOCAB))
            if name == "set_counts":
                state.counts = table
            else:
                state.bias = table
            return table
        # Arrays that other programs make: zeros of the same kind.
        described = self._described.program((name, size) if size else (name,)).arguments
        if name == "head":
            return program(runner.leaves, _zeros(described[1]))
        if name in ("publish", "publish_logprobs", "publish_pooled", "logprobs"):
            return program(*_zeros(described))
        neutral = runner.planner.samples[0].neutral(size)
        samples = place(np.tile(neutral.packed, ranks), RANKS)
        if name == "count":
            state.counts = program(state.counts, samples, _zeros(described[2]))
            return state.counts
        logits = _zeros(described[0])
        if name == "adjust":
            words = np.full(ranks * runner.planner.tensor * size * runner.planner.local_mask_words, -1, np.int32)
            mask, forbidden = place(words, DEVICES), place(np.tile(neutral.forbidden, ranks), RANKS)
            return program(logits, samples, state.counts, state.bias, mask, state.last_token, forbidden)
        drawn, state.last_token = program(logits, samples, state.last_token)
        return drawn

    def _decisions(self, size: int) -> list[StepDecision | None]:
        shapes = self.runner.shapes
        room = min(shapes.pages_per_row, shapes.num_pages - 1)
        tokens = np.zeros(min(size, room * shapes.page_size), np.int32)
        row = RowWork(0, 0, 0, tokens, np.arange(1, 1 + room, dtype=np.int32))
        return [StepDecision(0, (row,), 0, ())] * self.runner.num_ranks


def _zeros(struct: Any) -> Any:
    """A global array of zeros (or several) like the struct of a program's argument."""

    def one(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: np.zeros(shape, leaf.dtype))

    return jax.tree.map(one, struct)


class SameOnAllRanks:
    """A mesh as deterministic.keep_equal_buckets sees an engine of one device: every rank computes the same step.

    What comes back reads as the first rank's result (see OfOneRank). In every other step the later ranks idle, so that
    what they do is shown not to matter.
    """

    def __init__(self, runner: ShardedStepRunner) -> None:
        self._runner = runner
        self._num_steps = 0
        self.shapes = runner.shapes
        self.batches = _Batches(self)
        self.samples = _Samples(runner.planner.samples)
        self.programs = {
            key: functools.partial(self.logprobs, key[1]) for key in runner.programs if key[0] == "logprobs"
        }

    def pack(self, decision: StepDecision, at_least: int) -> tuple[np.ndarray, int]:
        """The packed step of all ranks, and its bucket."""
        self._num_steps += 1
        others = decision if self._num_steps % 2 else None
        ranks = [decision, *[others] * (self._runner.num_ranks - 1)]
        bucket, packed = self._runner.planner.batch(ranks, at_least)
        return packed, bucket

    def forward(self, bucket: int, packed: np.ndarray) -> OfOneRank:
        """Hidden states [max_num_samples, hidden_size]."""
        runner, state = self._runner, self._runner.state
        forward = runner.programs["forward", bucket]
        hidden, _, state.pages, state.load = forward(
            runner.leaves, state.pages, state.last_token, runner.place(packed, RANKS), state.load
        )
        return OfOneRank(hidden, compares=bool(self._num_steps % 2))

    def head(self, bucket: int, hidden: jax.Array) -> OfOneRank:
        """Logits [bucket, V], each rank's for the same hidden states."""
        runner = self._runner
        hidden = runner.place(self._tile(np.asarray(hidden)), RANKS)
        return OfOneRank(runner.programs["head", bucket](runner.leaves, hidden))

    def sample(self, staged: StagedSamples, logits: OfOneRank) -> OfOneRank:
        """tokens [bucket]"""
        planned = PlannedSamples(staged.bucket, self._tile(staged.packed), is_random=staged.is_random)
        return OfOneRank(self._runner.sample(planned, logits.values))

    def logprobs(self, bucket: int, logits: OfOneRank, tokens: OfOneRank, named: np.ndarray) -> tuple[OfOneRank, ...]:
        """What sampling.token_logprobs returns."""
        named = self._runner.place(self._tile(named), RANKS)
        found = self._runner.programs["logprobs", bucket](logits.values, tokens.values, named)
        return tuple(OfOneRank(part) for part in found)

    def _tile(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values] * self._runner.num_ranks)


@dataclasses.dataclass(frozen=True)
class OfOneRank:
    """An array of all ranks that numpy reads as the first one's; as values that never come twice if
    another rank's has other bits."""

    values: jax.Array
    compares: bool = True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Along the second axis lie the tensor devices' parts of one rank.
        by_part: dict[int, list[np.ndarray]] = {}
        for shard in self.values.addressable_shards:
            start = (shard.index[1].start or 0) if len(shard.index) > 1 else 0
            by_part.setdefault(start, []).append(np.asarray(shard.data))
        first = [parts[0] for _, parts in sorted(by_part.items())]
        found = np.concatenate(first, axis=1) if len(first) > 1 else first[0]
        if self.compares and any(one.tobytes() != parts[0].tobytes() for parts in by_part.values() for one in parts):
            found = np.full_like(found, -2 - next(_NUM_DIFFERENCES))
        return found


@dataclasses.dataclass(frozen=True)
class _Batches:
    """BatchBuilder's part of the view."""

    view: SameOnAllRanks

    @property
    def layout(self) -> Any:
        return self.view._runner.planner.batches.layout

    def build(self, decision: StepDecision, buffer: StepBuffer, *, at_least: int = 1) -> tuple[np.ndarray, int]:
        return self.view.pack(decision, at_least)


@dataclasses.dataclass(frozen=True)
class _Samples:
    """SampleBuilder's part of the view: every rank adopts the same samples."""

    builders: tuple[SampleBuilder, ...]

    def adopt(self, samples: tuple[SampleWork, ...]) -> None:
        for builder in self.builders:
            builder.adopt(samples)

    def build(self, samples: tuple[SampleWork, ...]) -> StagedSamples:
        return self.builders[0].build(samples)

    def neutral(self, bucket: int) -> StagedSamples:
        return self.builders[0].neutral(bucket)
