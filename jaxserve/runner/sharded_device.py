"""The compiled programs and the device state of a mesh, and how one step runs through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.memory import allocate
from jaxserve.runner.planned_step import PlannedSamples, PlannedStep, StepPlanner
from jaxserve.runner.sample_builder import StagedSamples
from jaxserve.runner.sampling import Logprobs
from jaxserve.runner.sharded_step import DEVICES, RANKS, VOCAB, ShardedPrograms
from jaxserve.runner.step import Leaves, Pages
from jaxserve.scheduler.decision import RankedDecision, RankedResult, StepConstraints, StepDecision, StepResult

Compiled = Callable[..., Any]


class ShardedState:
    """As device.DeviceState, over a mesh."""

    def __init__(self, programs: ShardedPrograms) -> None:
        pages, tables = programs.state_structs()
        self.pages: Pages = allocate(pages)
        self.last_token, self.counts, self.bias, self.load = allocate(tables)


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedHandle:
    """A step on its way. Tokens and log-probabilities hold a bucket of values for each rank.

    staged   each rank's samples, with which a constrained step goes on
    """

    decision: RankedDecision
    staged: tuple[StagedSamples, ...]
    outputs: Outputs


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """What a step has computed so far: hidden [ranks * max_num_samples, H], logits [ranks * bucket, V] until they are
    sampled, tokens, log-probabilities, pooled [ranks * rows, H]."""

    hidden: jax.Array
    pooled: jax.Array | None = None
    logits: jax.Array | None = None
    tokens: jax.Array | None = None
    logprobs: Logprobs | None = None


class Placer:
    """Hands a step's numpy arrays to the devices.

    With one host a program takes them as they are. With several, each host gives its devices their part of the array,
    which all hosts have.
    """

    def __init__(self, programs: ShardedPrograms) -> None:
        self._mesh = programs.mesh
        self._is_one_host = not programs.mesh.is_multi_process
        self._parts: dict[tuple[PartitionSpec, int], tuple[NamedSharding, slice]] = {}

    def __call__(self, values: np.ndarray, part: PartitionSpec) -> Any:
        if self._is_one_host:
            return values
        sharding, own = self._part(part, len(values))
        return jax.make_array_from_process_local_data(sharding, values[own], values.shape)

    def _part(self, part: PartitionSpec, size: int) -> tuple[NamedSharding, slice]:
        found = self._parts.get((part, size))
        if found is None:
            sharding = NamedSharding(self._mesh, part)
            places = [
                index[0].indices(size)[:2] for index in sharding.addressable_devices_indices_map((size,)).values()
            ]
            own = slice(min(start for start, _ in places), max(stop for _, stop in places))
            if sum(stop - start for start, stop in set(places)) != own.stop - own.start:
                raise ValueError(f"mesh {self._mesh.shape}: the ranks of one host are not neighbours")
            found = self._parts[part, size] = sharding, own
        return found


class ShardedStepRunner:
    """Runs planned steps through compiled programs. Not thread-safe: one thread dispatches and collects.

    on_plan  called with each step, and with the samples of a constrained one, before this host runs it: the other hosts
             get it there
    """

    def __init__(
        self,
        compiled: dict[tuple[Any, ...], Compiled],
        leaves: Leaves,
        state: ShardedState,
        shapes: StepShapes,
        eos_token_ids: frozenset[int],
        programs: ShardedPrograms,
        on_plan: Callable[[PlannedStep | PlannedSamples], None] | None = None,
    ) -> None:
        self.programs = compiled
        self.hidden_size = programs.hidden_size
        self.leaves = leaves
        self.state = state
        self.shapes = shapes
        self.num_ranks = programs.shape.num_ranks
        self.planner = StepPlanner(
            shapes,
            eos_token_ids,
            num_ranks=self.num_ranks,
            tensor=programs.shape.tensor,
            local_vocab=programs.local_vocab,
        )
        self.place = Placer(programs)
        self._publishes = programs.publishes
        self._on_plan = on_plan

    def dispatch(self, decision: RankedDecision | StepDecision) -> ShardedHandle:
        """Start a step; with one rank its StepDecision. Raises ValueError, with nothing changed on the devices, for one
        that does not fit."""
        if isinstance(decision, StepDecision):
            decision = RankedDecision(decision.step_id, (decision,))
        planned, staged = self.planner.plan(decision)
        if self._on_plan is not None:
            self._on_plan(planned)
        return ShardedHandle(decision, staged, self.run(planned))

    def constrain(self, handle: ShardedHandle, constraints: StepConstraints) -> ShardedHandle:
        """Start the sampling of a constrained step."""
        samples = self.planner.constrain(handle.decision, handle.staged, constraints)
        if self._on_plan is not None:
            self._on_plan(samples)
        return dataclasses.replace(handle, outputs=self.run_samples(handle.outputs, samples))

    def run(self, planned: PlannedStep) -> Outputs:
        """Start a planned step."""
        state, programs, place = self.state, self.programs, self.place
        for reset in planned.count_resets:
            rows, values = place(reset.rows, RANKS), place(reset.values, VOCAB)
            state.counts = programs["set_counts",](state.counts, rows, values)
        for bias in planned.biases:
            rows, values = place(bias.rows, RANKS), place(bias.values, VOCAB)
            state.bias = programs["set_bias",](state.bias, rows, values)
        for pairs in planned.copies:
            state.pages = programs["copy",](state.pages, place(pairs, RANKS))
        forward, packed = programs["forward", planned.token_bucket], place(planned.packed, RANKS)
        hidden, pooled, state.pages, state.load = forward(
            self.leaves, state.pages, state.last_token, packed, state.load
        )
        if planned.wants_pooled and self._publishes:
            pooled = programs["publish_pooled",](pooled)
        outputs = Outputs(hidden, pooled if planned.wants_pooled else None)
        if not planned.sample_bucket:
            return outputs
        logits = programs["head", planned.sample_bucket](self.leaves, hidden)
        outputs = dataclasses.replace(outputs, logits=logits)
        return outputs if planned.samples is None else self.run_samples(outputs, planned.samples)

    def run_samples(self, outputs: Outputs, samples: PlannedSamples) -> Outputs:
        """Start the sampling of a step whose logits are on their way."""
        programs, logits = self.programs, outputs.logits
        assert logits is not None
        tokens = self.sample(samples, logits)
        logprobs = None
        if samples.logprob_ids is not None:
            named = self.place(samples.logprob_ids, RANKS)
            logprobs = programs["logprobs", samples.bucket](logits, tokens, named)
        if self._publishes:
            tokens = programs["publish", samples.bucket](tokens)
            if logprobs is not None:
                logprobs = Logprobs(*programs["publish_logprobs", samples.bucket](tuple(logprobs)))
        return dataclasses.replace(outputs, logits=None, tokens=tokens, logprobs=logprobs)

    def sample(self, samples: PlannedSamples, logits: jax.Array) -> jax.Array:
        """tokens [ranks * bucket], also written to the last-token tables."""
        state, programs, bucket, place = self.state, self.programs, samples.bucket, self.place
        packed = place(samples.packed, RANKS)
        if samples.mask is not None and samples.forbidden is not None:
            mask, forbidden = place(samples.mask, DEVICES), place(samples.forbidden, RANKS)
            logits = programs["adjust", bucket](
                logits, packed, state.counts, state.bias, mask, state.last_token, forbidden
            )
        program = programs["random" if samples.is_random else "greedy", bucket]
        tokens, state.last_token = program(logits, packed, state.last_token)
        if samples.counts_tokens:
            state.counts = programs["count", bucket](state.counts, packed, tokens)
        return tokens

    def expert_load(self) -> np.ndarray:
        """[layers with experts, E] int64: choices of all tokens so far, over the ranks of this host. Waits for the
        devices; warm-up is counted too."""
        by_rank = {shard.index[0].start or 0: shard.data for shard in self.state.load.addressable_shards}
        return np.sum([np.asarray(part, np.int64) for part in by_rank.values()], axis=0)

    def collect(self, handle: ShardedHandle) -> RankedResult | StepResult:
        """Wait for a step and read what each rank sampled; with one rank its StepResult."""
        decision, outputs = handle.decision, handle.outputs
        if outputs.tokens is None:
            assert not handle.staged, "a constrained step has to be sampled before it is collected"
            jax.block_until_ready(outputs.hidden)
        arrays = () if outputs.tokens is None else (outputs.tokens, *(outputs.logprobs or ()))
        read = [values.reshape(self.num_ranks, -1, *values.shape[1:]) for values in jax.device_get(arrays)]
        results: list[StepResult | None] = []
        for rank, part in enumerate(decision.ranks):
            if part is None:
                results.append(None)
            elif not read:
                results.append(StepResult(part.step_id, np.zeros(0, np.int32)))
            else:
                results.append(StepResult(part.step_id, *(values[rank, : len(part.samples)] for values in read)))
        pooled = None
        if outputs.pooled is not None:
            rows = np.asarray(outputs.pooled).reshape(self.num_ranks, self.shapes.max_num_rows, -1)
            parts = [rows[rank, : len(part.rows)] for rank, part in enumerate(decision.ranks) if part is not None]
            pooled = np.concatenate(parts)
        if self.num_ranks == 1:
            assert results[0] is not None
            return dataclasses.replace(results[0], pooled=pooled)
        return RankedResult(decision.step_id, tuple(results), pooled)
