"""One step while it is being decided: budgets, rows, samples. No jax."""

from __future__ import annotations

import numpy as np

from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS
from jaxserve.scheduler import policy
from jaxserve.scheduler.decision import (
    LAST_TOKEN,
    POOL_LAST,
    POOL_NONE,
    POOL_SUM,
    CacheGeometry,
    PageCopy,
    RowReset,
    RowWork,
    SampleWork,
    StepDecision,
)
from jaxserve.scheduler.sequence import Sequence

_LAST = np.full(1, LAST_TOKEN, np.int32)


class StepPlan:
    """Rows that decode and prefill chunks are kept apart, since the decision lists the former first.

    reserve(n) sets tokens and samples aside for n more decoding rows, so that prefill does not take them.
    max_tokens bounds the tokens of this step further than the geometry does; it holds for prefill only.
    """

    def __init__(self, geometry: CacheGeometry, max_tokens: int | None = None) -> None:
        self._geometry = geometry
        self._max_tokens = min(geometry.max_step_tokens, max_tokens or geometry.max_step_tokens)
        self._decodes: list[RowWork] = []
        self._decode_samples: list[SampleWork] = []
        self._prefills: list[RowWork] = []
        self._prefill_samples: list[tuple[int, SampleWork]] = []  # with the token's index among prefill tokens
        self._copies: list[PageCopy] = []
        self._resets: list[RowReset] = []
        self.num_prefill_tokens = 0
        self._reserved = 0

    @property
    def is_empty(self) -> bool:
        return not self._decodes and not self._prefills

    @property
    def num_prefill_rows(self) -> int:
        return len(self._prefills)

    @property
    def free_tokens(self) -> int:
        """Tokens that prefill may still take."""
        return self._max_tokens - self._reserved - self.num_prefill_tokens

    @property
    def free_samples(self) -> int:
        return self._geometry.max_num_samples - self._reserved - len(self._prefill_samples)

    def reserve(self, num_decodes: int) -> None:
        self._reserved += num_decodes

    def unreserve(self) -> None:
        """A decoding row that had been reserved for will not run in this step."""
        self._reserved -= 1

    def chunk_for(self, sequence: Sequence) -> int:
        return self.chunk_of(sequence, sequence.num_missing)

    def chunk_of(self, sequence: Sequence, missing: int) -> int:
        """How many of its `missing` last tokens a prefill may compute in this step."""
        return policy.chunk_size(
            missing, self.free_tokens, self.free_samples, sequence.wants_scores, sequence.num_samples_at_end
        )

    def copy_page(self, source: int, target: int) -> None:
        self._copies.append(PageCopy(source, target))

    def reset_row(self, sequence: Sequence) -> None:
        """The device counts tokens for penalties from these on (what is pending it has counted itself)."""
        prompt = sequence.request.prompt
        self._resets.append(RowReset(sequence.row, prompt, sequence.tokens[len(prompt) : sequence.num_known].copy()))

    def add_decode(self, sequence: Sequence) -> None:
        """Compute the one token that is missing, whose page the sequence has, and sample the next."""
        start = sequence.num_computed
        token_ids = _LAST if sequence.num_pending else sequence.tokens[start : start + 1]
        self._decode_samples.append(self._sample(sequence, len(self._decodes)))
        self._decodes.append(self._row(sequence, start, token_ids))
        sequence.num_computed = start + 1

    def add_chunk(self, sequence: Sequence, size: int) -> bool:
        """Compute the next `size` tokens, whose pages the sequence has; advances it.

        Returns whether a token is sampled at their end.
        """
        start = sequence.num_computed
        work = self._row(sequence, start, sequence.tokens[start : start + size])
        sequence.num_computed = start + size
        ends = sequence.num_computed == sequence.length and sequence.may_grow
        if sequence.wants_scores:
            self._score(sequence, start, size)
        if sequence.num_computed == sequence.num_prompt:
            self._score_next(sequence, size)
        self._prefills.append(work)
        self.num_prefill_tokens += size
        if ends:
            self._prefill_samples.append((self.num_prefill_tokens - 1, self._sample(sequence, 0)))
        return ends

    def add_fork(self, sequence: Sequence) -> None:
        """Sample a first token for a fork from the last token planned, which is its parent's."""
        self._prefill_samples.append((self.num_prefill_tokens - 1, self._sample(sequence, 0)))
        if sequence.request.params.has_penalties:
            self._resets.append(RowReset(sequence.row, sequence.request.prompt, np.empty(0, np.int32)))

    def decision(self, step_id: int) -> StepDecision:
        offset = len(self._decodes)
        samples = self._decode_samples + [_at(work, offset + index) for index, work in self._prefill_samples]
        return StepDecision(
            step_id=step_id,
            rows=tuple(self._decodes + self._prefills),
            num_decodes=offset,
            samples=tuple(samples),
            copies=tuple(self._copies),
            resets=tuple(self._resets),
        )

    def _row(self, sequence: Sequence, start: int, token_ids: np.ndarray) -> RowWork:
        request = sequence.request
        pages = sequence.pages[: sequence.num_pages]
        pooling = _pooling(sequence, start + len(token_ids)) if request.pooling else POOL_NONE
        return RowWork(request.number, sequence.row, start, token_ids, pages, pooling)

    def _sample(self, sequence: Sequence, token_index: int) -> SampleWork:
        request, num_pending = sequence.request, sequence.num_pending
        params = request.params
        recent: tuple[int, ...] = ()
        if params.bad_word_ids:
            assert num_pending <= 1  # a third step in flight would need two unknown tokens
            recent = tuple(request.output_ids[-MAX_BAD_WORD_TOKENS:])
        position = sequence.num_known + num_pending
        sequence.num_pending = num_pending + 1
        return SampleWork(
            request_id=request.number,
            row=sequence.row,
            token_index=token_index,
            position=position,
            seed=request.seed,
            num_outputs=position - sequence.num_prompt,
            params=params,
            recent_ids=recent,
            is_behind=num_pending > 0,
        )

    def _score(self, sequence: Sequence, start: int, size: int) -> None:
        """Ask for the score of each prompt token that follows one of this chunk and has none yet."""
        request = sequence.request
        for index in range(max(start + 1, sequence.num_scored), min(start + size + 1, request.num_prompt_tokens)):
            work = _score_work(sequence, index, int(request.prompt[index]))
            self._prefill_samples.append((self.num_prefill_tokens + index - 1 - start, work))
            sequence.num_scored = index + 1

    def _score_next(self, sequence: Sequence, size: int) -> None:
        """Ask for the score of each token of next_ids after the prompt, which this chunk ends."""
        for token in sequence.request.part.next_ids:
            work = _score_work(sequence, sequence.num_prompt, token)
            self._prefill_samples.append((self.num_prefill_tokens + size - 1, work))


def _score_work(sequence: Sequence, position: int, token: int) -> SampleWork:
    request = sequence.request
    return SampleWork(
        request_id=request.number,
        row=sequence.row,
        token_index=0,
        position=position,
        seed=request.seed,
        num_outputs=0,
        params=request.params,
        forced_token=token,
        is_score=True,
    )


def _pooling(sequence: Sequence, end: int) -> int:
    """What an embedding wants of the tokens before `end`."""
    if sequence.request.pooling == "mean":
        return POOL_SUM
    return POOL_LAST if end == sequence.num_prompt else POOL_NONE


def _at(work: SampleWork, token_index: int) -> SampleWork:
    return SampleWork(
        work.request_id, work.row, token_index, work.position, work.seed, work.num_outputs, work.params,
        work.forced_token, work.is_score, work.recent_ids, work.is_behind,
    )  # fmt: skip
