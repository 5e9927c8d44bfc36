"""Which shapes give bitwise equal rows, found by running the compiled programs.

A matrix product may sum in another order for another number of rows, so a token computed in a bucket of 8 can
differ in the last bits from the same token in a bucket of 256. Which sizes agree depends on the machine, the dtype
and the compiler: no table says it. So the programs themselves are asked, and only buckets that agree with the
largest stay.
"""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np

from jaxserve.runner.batch_builder import StepBuffer
from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.device import StepRunner
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import RowWork, SampleWork, StepDecision

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 32


class NotDeterministic(RuntimeError):
    """Even one shape gives results that depend on where a row lies in it."""


def keep_equal_buckets(runner: StepRunner, *, parts_decodes: bool) -> StepShapes:
    """The shapes with those buckets only whose programs give bitwise the rows of the largest bucket's.

    Writes pages: call it before any request. parts_decodes: a token sampled in a step of decodes is never sampled in
    one of prefill, which is how the scheduler plans for one device; ranks of a mesh differ in what they do. Raises
    NotDeterministic when a bucket disagrees with itself.
    """
    shapes = runner.shapes
    probe = _Probe(runner)
    tokens = shapes.token_buckets
    reference = probe.hidden(tokens[-1])
    if not probe.agrees(tokens[-1], reference):
        raise NotDeterministic(
            f"deterministic: the step of {tokens[-1]} tokens computes a token differently at another place in the "
            "batch; allowed: deterministic=False with this model and these backends"
        )
    kept_tokens = tuple(size for size in tokens[:-1] if probe.agrees(size, reference))
    hidden = reference[np.arange(shapes.max_num_samples) % len(reference)]
    # One size per kind of step: whether sums over a vocabulary round alike in two sizes depends on the very logits,
    # which no probe can cover. Decodes do without the room for scores.
    most = shapes.max_num_samples
    sizes = (shapes.sample_bucket(shapes.max_num_rows), most) if parts_decodes else (most,)
    for size in sizes:
        expected = probe.sampled(size, hidden, np.arange(most))
        if not all(_agrees(probe, size, hidden, expected, turn) for turn in sorted({0, 1, size // 3, size // 2})):
            raise NotDeterministic(
                f"deterministic: sampling {size} rows depends on their order; "
                "allowed: deterministic=False with this model and these backends"
            )
    tokens = (*kept_tokens, tokens[-1])
    kept = dataclasses.replace(shapes, token_buckets=tokens, sample_buckets=sizes, prefill_samples=most)
    logger.info("deterministic: steps of %s tokens, %s samples", kept.token_buckets, kept.sample_buckets)
    return kept


def _agrees(probe: _Probe, size: int, hidden: np.ndarray, expected: tuple[np.ndarray, ...], turn: int) -> bool:
    order = np.arange(len(hidden))
    order[:size] = np.roll(order[:size], turn)[::-1]
    found = probe.sampled(size, hidden, order)
    return all(_equal(was[order[:size]], now) for was, now in zip(expected, found))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Bitwise: NaN equals the same NaN, 0 does not equal -0."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


class _Probe:
    """One prompt of random tokens, computed in any bucket in chunks."""

    def __init__(self, runner: StepRunner) -> None:
        shapes = runner.shapes
        self.runner = runner
        self.buffer = StepBuffer(runner.batches.layout)
        room = shapes.pages_per_row * shapes.page_size
        self.num_tokens = min(_PROBE_TOKENS, shapes.max_step_tokens, shapes.max_num_samples, room)
        random = np.random.default_rng(0)
        self.tokens = random.integers(0, shapes.vocab_size, self.num_tokens, np.int32)
        self.filler = random.integers(0, shapes.vocab_size, shapes.max_step_tokens, np.int32)
        needed = -(-self.num_tokens // shapes.page_size)
        self.pages = np.arange(1, 1 + needed, dtype=np.int32)
        self.filler_pages = np.arange(1 + needed, shapes.num_pages, dtype=np.int32)[: shapes.pages_per_row]

    def agrees(self, bucket: int, reference: np.ndarray) -> bool:
        """Whether the probe's tokens come out as in `reference` wherever in a step of `bucket` tokens they lie.

        A product is computed in tiles of rows, and a row of the last, smaller tile may be summed in another order:
        so tokens are put at the first places, at the last ones and between.
        """
        places = {0, 1, 2, 3, bucket // 4, bucket // 2, 3 * bucket // 4, *range(bucket - 4, bucket)}
        for shift in sorted(place for place in places if 0 <= place < bucket):
            count = min(self.num_tokens, 2 * (bucket - shift)) if shift else self.num_tokens
            if not _equal(reference[:count], self.hidden(bucket, shift=shift, count=count)):
                return False
        return True

    def hidden(self, bucket: int, *, shift: int = 0, count: int | None = None) -> np.ndarray:
        """Hidden states of the probe's first `count` tokens [count, hidden_size], computed `bucket` tokens at a time
        behind `shift` tokens of another row (as many as fit it)."""
        count = self.num_tokens if count is None else count
        parts = []
        start = 0
        while start < count:
            rows = []
            if shift and self.runner.shapes.max_num_rows > 1:
                size = min(shift, len(self.filler_pages) * self.runner.shapes.page_size)
                if size:
                    rows.append(RowWork(0, 0, 0, self.filler[:size], self.filler_pages))
            before = sum(row.num_tokens for row in rows)
            chunk = self.tokens[start : min(count, start + bucket - before)]
            rows.append(RowWork(1, len(rows), start, chunk, self.pages))
            samples = tuple(_score(before + index) for index in range(len(chunk)))
            decision = StepDecision(0, tuple(rows), 0, samples)
            packed, chosen = self.runner.batches.build(decision, self.buffer, at_least=bucket)
            assert chosen == bucket
            found = self.runner.forward(bucket, packed)
            parts.append(np.asarray(found)[: len(chunk)])  # waits, so the buffer may be filled again
            start += len(chunk)
        return np.concatenate(parts)

    def sampled(self, bucket: int, hidden: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, ...]:
        """Logits, greedy and random tokens and log-probabilities of the first `bucket` of hidden[order]."""
        logits = self.runner.head(bucket, jax.device_put(hidden[order]))
        outputs = [logits]
        draws = (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, top_k=50))
        for number, params in enumerate(draws):
            # One request whose draws follow the order, so that a hidden state meets the same draw everywhere.
            samples = tuple(SampleWork(-1 - number, 0, 0, int(order[index]), 7, 0, params) for index in range(bucket))
            self.runner.samples.adopt(samples)
            outputs.append(self.runner.sample(self.runner.samples.build(samples), logits))
        ids = self.runner.samples.neutral(bucket).logprob_ids
        outputs.extend(self.runner.programs["logprobs", bucket](logits, outputs[1], ids))
        return tuple(np.asarray(output) for output in outputs)


def _score(token_index: int) -> SampleWork:
    return SampleWork(0, 0, token_index, 0, 0, 0, SamplingParams(temperature=0.0), is_score=True)
