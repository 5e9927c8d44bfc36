"""A decision for all ranks -> the arrays of one step, and nothing that a device has to do with.

The scheduler's host makes these; every host of an engine runs them through the same programs (sharded_device.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.runner.batch_builder import BatchBuilder, StepBuffer
from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.sample_builder import SampleBuilder, StagedSamples
from jaxserve.runner.step import COPIES_PER_CALL
from jaxserve.scheduler.decision import RankedDecision, RowReset, StepConstraints, StepDecision


@dataclasses.dataclass(frozen=True, slots=True)
class RowValues:
    """New values of one row of a table over the vocabulary: rows [ranks] int32 is the row on its rank and past the end
    on all others, values [padded V] int16 or float32."""

    rows: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedSamples:
    """What a step hands to the sampling programs; see sample_builder.StagedSamples. Arrays join the ranks' parts.

    mask   [ranks * tensor devices * bucket * mask words of a device] int32
    """

    bucket: int
    packed: np.ndarray
    is_random: bool = False
    mask: np.ndarray | None = None
    forbidden: np.ndarray | None = None
    counts_tokens: bool = False
    logprob_ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """Everything that a step hands to the programs. Arrays join the ranks' parts, one after the other.

    packed          [ranks * words of a step with token_bucket tokens] int32
    copies          one [ranks * (1 + 2 * COPIES_PER_CALL)] int32 for each call of the copy program
    sample_bucket   0: nothing is sampled
    samples         None without samples, and for a constrained step, whose samples follow by themselves
    wants_pooled    some row makes an embedding
    """

    step_id: int
    token_bucket: int
    packed: np.ndarray
    count_resets: tuple[RowValues, ...] = ()
    biases: tuple[RowValues, ...] = ()
    copies: tuple[np.ndarray, ...] = ()
    sample_bucket: int = 0
    samples: PlannedSamples | None = None
    wants_pooled: bool = False


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

    def plan(self, decision: RankedDecision) -> tuple[PlannedStep, tuple[StagedSamples, ...]]:
        """The step, and each rank's samples (empty without any).

        Raises ValueError for a decision that does not fit the shapes or names a page or row that does not exist.
        """
        ranks = decision.ranks
        if len(ranks) != self.num_ranks or not decision.busy:
            raise ValueError(f"ranks of a step: got {len(ranks)}; allowed: {self.num_ranks}, at least one with work")
        bucket, packed = self.batch(ranks)
        biases = self._biases(ranks)
        most = max(len(part.samples) for part in decision.busy)
        staged: tuple[StagedSamples, ...] = ()
        if most:
            staged = tuple(
                builder.build(() if part is None else part.samples, at_least=most)
                for part, builder in zip(ranks, self.samples)
            )
        planned = PlannedStep(
            step_id=decision.step_id,
            token_bucket=bucket,
            packed=packed,
            count_resets=self._resets(ranks),
            biases=biases,
            copies=self._copies(ranks),
            sample_bucket=staged[0].bucket if staged else 0,
            samples=None if not staged or decision.is_constrained else self._join(staged),
            wants_pooled=any(row.pooling for row in decision.rows),
        )
        return planned, staged

    def constrain(
        self, decision: RankedDecision, staged: tuple[StagedSamples, ...], constraints: StepConstraints
    ) -> PlannedSamples:
        """The samples of a constrained step. Constraints count the samples of all ranks, one rank after the other."""
        limited, first = [], 0
        for part, builder, one in zip(decision.ranks, self.samples, staged, strict=True):
            samples = () if part is None else part.samples
            chosen = (constraints.indices >= first) & (constraints.indices < first + len(samples))
            own = StepConstraints(
                constraints.indices[chosen] - first,
                constraints.masks[chosen],
                {
                    index - first: token
                    for index, token in constraints.forced.items()
                    if first <= index < first + len(samples)
                },
            )
            limited.append(builder.constrain(one, samples, own))
            first += len(samples)
        return self._join(tuple(limited))

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

    def _join(self, staged: tuple[StagedSamples, ...]) -> PlannedSamples:
        """All ranks' samples; a rank that needs nothing of what another one needs gets neutral values."""
        bucket = staged[0].bucket
        neutral = self.samples[0].neutral(bucket)
        is_adjusted = any(one.mask is not None for one in staged)
        reports = any(one.logprob_ids is not None for one in staged)

        def joined(arrays: Iterable[np.ndarray | None], instead: np.ndarray | None) -> np.ndarray:
            return np.concatenate([instead if array is None else array for array in arrays])

        mask = None
        if is_adjusted:
            masks = [neutral.mask if one.mask is None else one.mask for one in staged]
            mask = np.concatenate([self._split_mask(one, bucket) for one in masks if one is not None])
        return PlannedSamples(
            bucket=bucket,
            packed=np.concatenate([one.packed for one in staged]),
            is_random=any(one.is_random for one in staged),
            mask=mask,
            forbidden=joined((one.forbidden for one in staged), neutral.forbidden) if is_adjusted else None,
            counts_tokens=any(one.counts_tokens for one in staged),
            logprob_ids=joined((one.logprob_ids for one in staged), neutral.logprob_ids) if reports else None,
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
