"""The compiled programs and the device's state, and how one step runs through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxserve.runner.batch_builder import BatchBuilder, StepBuffer
from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.memory import allocate
from jaxserve.runner.sample_builder import SampleBuilder, StagedSamples
from jaxserve.runner.sampling import Logprobs
from jaxserve.runner.step import COPIES_PER_CALL, Leaves, Pages
from jaxserve.scheduler.decision import PageCopy, RowReset, SampleWork, StepConstraints, StepDecision, StepResult

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class StepHandle:
    """A step on its way. `hidden` and `pooled` are ready when forward has run, `tokens` when the step has.

    pooled           None unless a row asks for it
    staged, logits   None without samples. A constrained step has no tokens until it is sampled.
    """

    step_id: int
    samples: tuple[SampleWork, ...]
    staged: StagedSamples | None
    hidden: jax.Array
    pooled: jax.Array | None
    logits: jax.Array | None
    tokens: jax.Array | None
    logprobs: Logprobs | None
    buffer: StepBuffer


class DeviceState:
    """Everything on the device that steps change.

    Each program that changes a part takes it donated and returns the new one, so nobody else may keep a reference;
    the order of calls is the order on the device.
    """

    def __init__(self, pages: tuple[jax.ShapeDtypeStruct, ...], shapes: StepShapes) -> None:
        rows, vocab_size = shapes.max_num_rows, shapes.vocab_size
        self.pages: Pages = allocate(pages)
        table = jax.ShapeDtypeStruct((rows,), np.int32)
        counts = jax.ShapeDtypeStruct((rows, vocab_size), np.int16)
        bias = jax.ShapeDtypeStruct((rows, vocab_size), np.float32)
        self.last_token, self.counts, self.bias = allocate((table, counts, bias))


class StepRunner:
    """Runs decisions through compiled programs. Not thread-safe: one thread dispatches and collects.

    programs  key (see StepPrograms.all_keys) -> compiled program
    leaves    the model's arrays
    """

    def __init__(
        self,
        programs: dict[tuple[Any, ...], Compiled],
        leaves: Leaves,
        state: DeviceState,
        shapes: StepShapes,
        eos_token_ids: frozenset[int],
        *,
        hidden_size: int,
    ) -> None:
        self.programs = programs
        self.leaves = leaves
        self.state = state
        self.shapes = shapes
        self.hidden_size = hidden_size
        self.batches = BatchBuilder(shapes)
        self.samples = SampleBuilder(shapes, eos_token_ids)
        self._free_buffers: list[StepBuffer] = []

    def dispatch(self, decision: StepDecision) -> StepHandle:
        """Start a step. Raises ValueError, with nothing changed on the device, for one that does not fit."""
        buffer = self._free_buffers.pop() if self._free_buffers else StepBuffer(self.batches.layout)
        packed, bucket = self.batches.build(decision, buffer)
        biases = self.samples.adopt(decision.samples)
        at_least = 1 if decision.num_decodes else self.shapes.prefill_samples
        staged = self.samples.build(decision.samples, at_least=at_least) if decision.samples else None
        self.reset_rows(decision.resets)
        self.write_biases(biases)
        self.copy_pages(decision.copies)
        hidden, pooled = self.forward_pooled(bucket, packed)
        if not any(row.pooling for row in decision.rows):
            pooled = None
        logits = None if staged is None else self.head(staged.bucket, hidden)
        handle = StepHandle(decision.step_id, decision.samples, staged, hidden, pooled, logits, None, None, buffer)
        return handle if staged is None or decision.is_constrained else self._sampled(handle, staged)

    def constrain(self, handle: StepHandle, constraints: StepConstraints) -> StepHandle:
        """Start the sampling of a constrained step."""
        assert handle.staged is not None and handle.tokens is None
        return self._sampled(handle, self.samples.constrain(handle.staged, handle.samples, constraints))

    def _sampled(self, handle: StepHandle, staged: StagedSamples) -> StepHandle:
        assert handle.logits is not None
        tokens = self.sample(staged, handle.logits)
        logprobs = None
        if staged.logprob_ids is not None:
            logprobs = self.programs["logprobs", staged.bucket](handle.logits, tokens, staged.logprob_ids)
        return dataclasses.replace(handle, logits=None, tokens=tokens, logprobs=logprobs)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and read what it sampled."""
        count = len(handle.samples)
        if handle.tokens is None:
            assert not count, "a constrained step has to be sampled before it is collected"
            jax.block_until_ready(handle.hidden)
            result = StepResult(handle.step_id, np.zeros(0, np.int32))
        elif handle.logprobs is None:
            result = StepResult(handle.step_id, np.asarray(handle.tokens)[:count])
        else:
            tokens, found = jax.device_get((handle.tokens, handle.logprobs))
            result = StepResult(handle.step_id, tokens[:count], *(part[:count] for part in found))
        if handle.pooled is not None:
            result = dataclasses.replace(result, pooled=np.asarray(handle.pooled))
        # The step is over, so the device no longer reads its buffer.
        self._free_buffers.append(handle.buffer)
        return result

    def forward(self, bucket: int, packed: np.ndarray) -> jax.Array:
        """Run the model. Returns hidden [max_num_samples, hidden_size]."""
        return self.forward_pooled(bucket, packed)[0]

    def forward_pooled(self, bucket: int, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Run the model. Returns hidden [max_num_samples, hidden_size] and pooled [rows, hidden_size]."""
        state, program = self.state, self.programs["forward", bucket]
        hidden, pooled, state.pages = program(self.leaves, state.pages, state.last_token, packed)
        return hidden, pooled

    def head(self, bucket: int, hidden: jax.Array) -> jax.Array:
        """logits [bucket, V] of the first `bucket` hidden states."""
        return self.programs["head", bucket](self.leaves, hidden)

    def sample(self, staged: StagedSamples, logits: jax.Array) -> jax.Array:
        """tokens [bucket], also written to the last-token table."""
        state, programs, bucket = self.state, self.programs, staged.bucket
        if staged.mask is not None:
            logits = programs["adjust", bucket](
                logits, staged.packed, state.counts, state.bias, staged.mask, state.last_token, staged.forbidden
            )
        program = programs["random" if staged.is_random else "greedy", bucket]
        tokens, state.last_token = program(logits, staged.packed, state.last_token)
        if staged.counts_tokens:
            state.counts = programs["count", bucket](state.counts, staged.packed, tokens)
        return tokens

    def copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        """Copy pages in the order given."""
        for first in range(0, len(copies), COPIES_PER_CALL):
            part = copies[first : first + COPIES_PER_CALL]
            packed = np.zeros(1 + 2 * COPIES_PER_CALL, np.int32)
            packed[0] = len(part)
            packed[1 : 1 + len(part)] = [copy.source for copy in part]
            packed[1 + COPIES_PER_CALL : 1 + COPIES_PER_CALL + len(part)] = [copy.target for copy in part]
            if packed.min() < 0 or packed[1:].max() >= self.shapes.num_pages:
                raise ValueError(f"pages copied: got {part}; allowed: 0 to {self.shapes.num_pages - 1}")
            self.state.pages = self.programs["copy",](self.state.pages, packed)

    def reset_rows(self, resets: Iterable[RowReset]) -> None:
        """Start the token counts of rows."""
        for reset in resets:
            row = np.array([reset.row], np.int32)
            self.state.counts = self.programs["set_counts",](self.state.counts, row, self.samples.counts_row(reset))

    def write_biases(self, biases: Iterable[tuple[int, np.ndarray]]) -> None:
        """Set rows of the bias table: (row, bias [V])."""
        for row, values in biases:
            self.state.bias = self.programs["set_bias",](self.state.bias, np.array([row], np.int32), values)
