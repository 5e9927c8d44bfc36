"""A decision for all ranks -> the arrays of one step, and nothing that a device has to do with.

The scheduler's host makes these; every host of an engine runs them through the same programs (sharded_device.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxserve.runner.batch_builder import BatchBuilder, StepBuffer
from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.sample_builder import SampleBuilder
from jaxserve.runner.step import COPIES_PER_CALL
from jaxserve.scheduler.decision import RankedDecision, RowReset, StepDecision


@dataclasses.dataclass(frozen=True, slots=True)
class RowValues:
    """New values of one row of a table over the vocabulary: rows [ranks] int32 is the row on its rank and past the end
    on all others, values [padded V] int16 or float32."""

    rows: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """Everything that a step hands to the programs. Arrays join the ranks' parts, one after the other.

    packed          [ranks * words of a step with token_bucket tokens] int32
    copies          one [ranks * (1 + 2 * COPIES_PER_CALL)] int32 for each call of the copy program
    sample_bucket   0: nothing is sampled
    samples         [ranks * words of sample_bucket samples] int32
    mask            [devices of a data group * sample_bucket * mask words of a device] int32, or None: no row needs it
    """

    step_id: int
    token_bucket: int
    packed: np.ndarray
    count_resets: tuple[RowValues, ...] = ()
    biases: tuple[RowValues, ...] = ()
    copies: tuple[np.ndarray, ...] = ()
    sample_bucket: int = 0
    samples: np.ndarray | None = None
    mask: np.ndarray | None = None
    is_random: bool = False
    counts_tokens: bool = False
    wants_logprobs: bool = False


class StepPlanner:
    """Makes PlannedSteps. Keeps what the builders of each rank keep between steps.

    local_vocab   tokens of one tensor device's part of the vocabulary
    """

    def __init__(
        self, shapes: StepShapes, eos_token_ids: frozenset[int], *, num_ranks: int, tensor: int, local_vocab: int
    ) -> None:
        self.shapes, self.num_ranks, self.tensor = shapes, num_ranks, tensor
        self.padded_vocab = local_vocab * tensor if tensor > 1 else shapes.vocab_size
        self.local_mask_words = -(-local_vocab // 32)
        self.batches = BatchBuilder(shapes)
        self.samples = tuple(SampleBuilder(shapes, eos_token_ids) for _ in range(num_ranks))
        self._buffers = tuple(StepBuffer(self.batches.layout) for _ in range(num_ranks))

    def plan(self, decision: RankedDecision, *, at_least: int = 1, sample_bucket: int = 0) -> PlannedStep:
        """Raises ValueError for a decision that does not fit the shapes or names a page or row that does not exist.

        at_least, sample_bucket: smallest buckets to take (for warm-up and probes).
        """
        ranks = decision.ranks
        if len(ranks) != self.num_ranks or all(part is None for part in ranks):
            raise ValueError(f"ranks of a step: got {len(ranks)}; allowed: {self.num_ranks}, at least one with work")
        bucket, packed = self.batch(ranks, at_least)
        biases = self._biases(ranks)
        planned = PlannedStep(
            step_id=decision.step_id,
            token_bucket=bucket,
            packed=packed,
            count_resets=self._resets(ranks),
            biases=biases,
            copies=self._copies(ranks),
        )
        most = max(len(part.samples) for part in ranks if part is not None)
        if not most and not sample_bucket:
            return planned
        return self._with_samples(planned, ranks, max(most, sample_bucket))

    def batch(self, ranks: Sequence[StepDecision | None], at_least: int = 1) -> tuple[int, np.ndarray]:
        """(token bucket, packed words of all ranks): a fresh array."""
        most = max(part.num_tokens for part in ranks if part is not None)
        bucket = self.shapes.token_bucket(max(most, at_least))
        parts = [
            self.batches.build_idle(buffer, bucket)
            if part is None
            else self.batches.build(part, buffer, at_least=bucket)[0]
            for part, buffer in zip(ranks, self._buffers, strict=True)
        ]
        return bucket, np.concatenate(parts)

    def _with_samples(self, planned: PlannedStep, ranks: Sequence[StepDecision | None], at_least: int) -> PlannedStep:
        staged = [
            builder.build(() if part is None else part.samples, at_least=at_least)
            for part, builder in zip(ranks, self.samples, strict=True)
        ]
        bucket = staged[0].bucket
        mask = None
        if any(one.mask is not None for one in staged):
            masks = [
                builder.neutral_mask(bucket) if one.mask is None else one.mask
                for one, builder in zip(staged, self.samples)
            ]
            mask = np.concatenate([self._split_mask(one, bucket) for one in masks])
        return dataclasses.replace(
            planned,
            sample_bucket=bucket,
            samples=np.concatenate([one.packed for one in staged]),
            mask=mask,
            is_random=any(one.is_random for one in staged),
            counts_tokens=any(one.counts_tokens for one in staged),
            wants_logprobs=any(one.wants_logprobs for one in staged),
        )

    def _split_mask(self, mask: np.ndarray, bucket: int) -> np.ndarray:
        """[bucket * words] -> [tensor * bucket * words of a device]; tokens past the vocabulary are not allowed."""
        if self.tensor == 1:
            return mask
        words = mask.reshape(bucket, -1)
        words = np.pad(words, ((0, 0), (0, self.tensor * self.local_mask_words - words.shape[1])))
        parts = words.reshape(bucket, self.tensor, self.local_mask_words)
        return np.ascontiguousarray(parts.transpose(1, 0, 2)).reshape(-1)

    def _resets(self, ranks: Sequence[StepDecision | None]) -> tuple[RowValues, ...]:
        return tuple(
            self.row_values(rank, reset.row, self._counts(rank, reset))
            for rank, part in enumerate(ranks)
            if part is not None
            for reset in part.resets
        )

    def _counts(self, rank: int, reset: RowReset) -> np.ndarray:
        return self.samples[rank].counts_row(reset)

    def _biases(self, ranks: Sequence[StepDecision | None]) -> tuple[RowValues, ...]:
        return tuple(
            self.row_values(rank, row, values)
            for rank, part in enumerate(ranks)
            if part is not None
            for row, values in self.samples[rank].adopt(part.samples)
        )

    def row_values(self, rank: int, row: int, values: np.ndarray) -> RowValues:
        """values [V] for one row of one rank."""
        if not 0 <= row < self.shapes.max_num_rows:
            raise ValueError(f"row: got {row}; allowed: 0 to {self.shapes.max_num_rows - 1}")
        rows = np.full(self.num_ranks, self.shapes.max_num_rows, np.int32)
        rows[rank] = row
        return RowValues(rows, np.pad(values, (0, self.padded_vocab - len(values))))

    def _copies(self, ranks: Sequence[StepDecision | None]) -> tuple[np.ndarray, ...]:
        """Each rank's copies in its order; a call takes COPIES_PER_CALL of each."""
        wanted = [[] if part is None else [(c.source, c.target) for c in part.copies] for part in ranks]
        calls = []
        for first in itertools.count(0, COPIES_PER_CALL):
            if all(len(pairs) <= first for pairs in wanted):
                return tuple(calls)
            packed = np.zeros((self.num_ranks, 1 + 2 * COPIES_PER_CALL), np.int32)
            for out, pairs in zip(packed, wanted):
                chunk = np.array(pairs[first : first + COPIES_PER_CALL], np.int32).reshape(-1, 2)
                if len(chunk) and (chunk.min() < 0 or chunk.max() >= self.shapes.num_pages):
                    raise ValueError(f"pages copied: got {chunk.tolist()}; allowed: 0 to {self.shapes.num_pages - 1}")
                out[0] = len(chunk)
                out[1 : 1 + len(chunk)] = chunk[:, 0]
                out[1 + COPIES_PER_CALL : 1 + COPIES_PER_CALL + len(chunk)] = chunk[:, 1]
            calls.append(packed.reshape(-1))
        raise AssertionError
