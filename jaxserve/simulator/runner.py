"""A runner without a device: same dispatch and collect, real pages of token ids, a virtual clock. No jax.

What it "samples" is a hash of every token it reads back through the page table, so a page given away too early, a copy
on write forgotten or a token lost changes the tokens that come out. expected_tokens() computes the same without pages.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxserve.scheduler.decision import LAST_TOKEN, CacheGeometry, SampleWork, StepConstraints, StepDecision, StepResult

_MAX_POSITIONS = 1 << 17
_WEIGHTS = np.random.default_rng(20261129).integers(1, 2**63, _MAX_POSITIONS, dtype=np.uint64) | np.uint64(1)
_MASK = 2**64 - 1
_NEVER_WRITTEN = np.int32(-2)
# Operands of whole arrays: numpy converts a Python number, or a scalar of its own, anew each time.
_SHIFT, _HALF, _FACTOR, _LOW, _LOGPROB_SHIFT = (
    np.array(value, np.uint64) for value in (29, 32, 0xBF58476D1CE4E5B9, 0xFFFFFFFF, 40)
)
_LOGPROB_UNIT = np.array(-(2**20), np.float32)


def history_sums(history: np.ndarray) -> np.ndarray:
    """uint64 [n]: entry i identifies history[: i + 1], every token with its position."""
    return np.cumsum(history.astype(np.uint64) * _WEIGHTS[: len(history)])


def _mixed(history_sum: int, seed: int) -> int:
    mixed = history_sum ^ seed
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ (mixed >> 32)


def expected_tokens(prompt: np.ndarray, seed: int, count: int, vocab_size: int) -> list[int]:
    """What a request must produce, computed directly: each token depends on all before it and on the seed."""
    total = int(history_sums(prompt)[-1])
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        token = (_mixed(total, seed) & 0xFFFFFFFF) % vocab_size
        tokens.append(token)
        total = (total + token * int(_WEIGHTS[position])) & _MASK
    return tokens


def expected_scores(prompt: np.ndarray, seed: int) -> list[float]:
    """The log-probabilities that prompt scoring must report, for each prompt token after the first."""
    return [_logprob(_mixed(int(total), seed)) for total in history_sums(prompt)[:-1]]


def _logprob(mixed: int) -> float:
    return -(mixed >> 40) / 2**20  # a multiple of 2**-20 above -16: exact in float32


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of a step: fixed + per computed token + per token of context read by its rows."""

    step: float = 5e-3
    token: float = 1e-3
    context_token: float = 1e-6

    def seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        return self.step + self.token * num_tokens + self.context_token * num_context_tokens


class _Unsampled(NamedTuple):
    """A constrained step before its sampling; the arguments of SimulatedRunner._sample."""

    decision: StepDecision
    positions: np.ndarray
    history: np.ndarray


class SimulatedRunner:
    """Implements scheduler.decision.Runner. Raises RuntimeError when a decision breaks a rule of the device.

    now   seconds of virtual time: the steps dispatched so far, one after another
    """

    def __init__(self, geometry: CacheGeometry, *, vocab_size: int = 1024, cost_model: CostModel | None = None) -> None:
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.cost_model = cost_model or CostModel()
        self._vocab_size = np.array(vocab_size, np.uint64)
        self.now = 0.0
        self.num_steps = 0
        self.num_computed_tokens = 0
        whole = len(_WEIGHTS) // geometry.page_size * geometry.page_size
        self._weights = _WEIGHTS[:whole].reshape(-1, geometry.page_size)  # [pages of a row, page_size]
        self._tokens = np.full(geometry.num_pages * geometry.page_size, _NEVER_WRITTEN)
        self._last_token = np.full(geometry.max_num_rows, _NEVER_WRITTEN)
        self._writer = np.zeros(geometry.num_pages, np.int64)
        self._waiting: int | None = None  # the step that has to be sampled next
        self._counted: dict[int, tuple[int, int]] = {}  # row -> (number, sum) of the tokens counted for penalties

    def dispatch(self, decision: StepDecision) -> StepResult | _Unsampled:
        if self._waiting is not None:
            raise RuntimeError(f"step {decision.step_id} is dispatched before step {self._waiting} was sampled")
        self._check(decision)
        page_size = self.geometry.page_size
        for copy in decision.copies:
            source, target = copy.source * page_size, copy.target * page_size
            self._tokens[target : target + page_size] = self._tokens[source : source + page_size]
        for reset in decision.resets:
            tokens = np.concatenate((reset.prompt_ids, reset.output_ids))
            self._counted[reset.row] = (len(tokens), int(history_sums(tokens)[-1]))
        lengths = np.array([len(row.token_ids) for row in decision.rows])
        ends = np.array([row.start for row in decision.rows]) + lengths
        pages, counts, first_page = self._page_tables(decision, ends)
        row_of_token = np.arange(len(lengths)).repeat(lengths)
        positions = np.arange(len(row_of_token)) + (ends - lengths.cumsum())[row_of_token]
        page_index, offset = np.divmod(positions, page_size)
        written = pages[first_page[row_of_token] + page_index]
        self._write(decision, lengths, row_of_token, written, written * page_size + offset)
        # Every row's tokens are written before any is read, as the device does layer by layer. Rows are read in whole
        # pages, one row after another: slot i of a row's pages holds the token at position i.
        page_of_row = np.arange(len(pages)) - first_page.repeat(counts)
        read = self._tokens.reshape(-1, page_size)[pages].astype(np.uint64) * self._weights[page_of_row]
        sums = np.zeros(read.size + 1, np.uint64)
        read.cumsum(out=sums[1:])
        index = np.array([work.token_index for work in decision.samples], np.int64)
        sampled_row, position = row_of_token[index], positions[index]
        first = first_page[sampled_row] * page_size
        history = sums[first + position + 1] - sums[first]
        self.now += self.cost_model.seconds(len(positions), int(ends.sum()))
        self.num_steps += 1
        self.num_computed_tokens += len(positions)
        if decision.is_constrained:
            self._waiting = decision.step_id
            return _Unsampled(decision, position + 1, history)
        return self._sample(decision, position + 1, history, None)

    def sample(self, handle: _Unsampled, constraints: StepConstraints) -> StepResult:
        self._waiting = None
        return self._sample(*handle, constraints)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def _check(self, decision: StepDecision) -> None:
        limits = self.geometry
        rows = [row.row for row in decision.rows]
        tables = [work.row for work in decision.samples if not work.is_score]
        broken = {
            "rows": len(rows) > limits.max_num_rows or len(set(rows)) != len(rows),
            "sampled rows": len(set(tables)) != len(tables),
            "samples": len(decision.samples) > limits.max_num_samples,
            "tokens": decision.num_tokens > limits.max_step_tokens,
            "decodes first": any([len(row.token_ids) != 1 for row in decision.rows[: decision.num_decodes]]),
            "length": max([row.start + len(row.token_ids) for row in decision.rows]) > limits.max_model_len,
        }
        if any(broken.values()):
            raise RuntimeError(f"step {decision.step_id} breaks: {[name for name, bad in broken.items() if bad]}")

    def _page_tables(self, decision: StepDecision, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All rows' pages one after another, how many each row has, and where they begin."""
        counts = -(-ends // self.geometry.page_size)
        tables = [row.pages[:count] for row, count in zip(decision.rows, counts.tolist())]
        pages = np.concatenate(tables).astype(np.intp)  # with which numpy indexes fastest
        if len(pages) != counts.sum():
            raise RuntimeError(f"step {decision.step_id}: a row has fewer pages than its tokens need")
        if pages.min() < 1 or pages.max() >= self.geometry.num_pages:
            raise RuntimeError(f"step {decision.step_id}: a page outside 1 to {self.geometry.num_pages - 1}")
        return pages, counts, counts.cumsum() - counts

    def _write(
        self,
        decision: StepDecision,
        lengths: np.ndarray,
        row_of_token: np.ndarray,
        pages: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        """Put the step's tokens into their slots; the arguments are of each token, but for lengths."""
        ids = np.concatenate([row.token_ids for row in decision.rows])
        rows = np.array([row.row for row in decision.rows])
        unknown = np.flatnonzero(ids == LAST_TOKEN)
        if (lengths[row_of_token[unknown]] != 1).any():
            raise RuntimeError(f"step {decision.step_id}: LAST_TOKEN in a chunk")
        ids[unknown] = self._last_token[rows[row_of_token[unknown]]]
        if ids.min() < 0:
            raise RuntimeError(f"step {decision.step_id}: a row computes a token that nobody has sampled")
        self._writer[pages] = row_of_token
        if (self._writer[pages] != row_of_token).any():
            raise RuntimeError(f"step {decision.step_id}: two rows write one page")
        self._tokens[slots] = ids

    def _sample(
        self, decision: StepDecision, positions: np.ndarray, history: np.ndarray, constraints: StepConstraints | None
    ) -> StepResult:
        samples = decision.samples
        wrong = np.flatnonzero(positions != np.array([work.position for work in samples], np.int64))
        if len(wrong):
            work = samples[wrong[0]]
            raise RuntimeError(f"request {work.request_id}: position {work.position}, not {positions[wrong[0]]}")
        mixed = history ^ np.array([work.seed for work in samples], np.uint64)
        mixed = (mixed ^ (mixed >> _SHIFT)) * _FACTOR
        mixed ^= mixed >> _HALF
        tokens = ((mixed & _LOW) % self._vocab_size).astype(np.int32)
        if constraints is not None:
            _constrain(tokens, mixed, constraints)
        for i, work in enumerate(samples):
            if work.forced_token >= 0:
                tokens[i] = work.forced_token
            if not work.is_score and work.params.has_penalties:
                self._count(work, int(history[i]), int(tokens[i]))
        sampled = np.array([not work.is_score for work in samples], bool)
        self._last_token[[work.row for work in samples if not work.is_score]] = tokens[sampled]
        logprobs = (mixed >> _LOGPROB_SHIFT).astype(np.float32) / _LOGPROB_UNIT
        return StepResult(decision.step_id, tokens, logprobs, np.ones(len(samples), np.int32))

    def _count(self, work: SampleWork, history: int, token: int) -> None:
        """The tokens counted for penalties must be those in the row's pages."""
        if self._counted.get(work.row) != (work.position, history):
            raise RuntimeError(f"request {work.request_id}: row {work.row} counts other tokens than it has")
        counted = (history + token * int(_WEIGHTS[work.position])) & _MASK
        self._counted[work.row] = (work.position + 1, counted)


def _constrain(tokens: np.ndarray, draws: np.ndarray, constraints: StepConstraints) -> None:
    """Let each limited sample draw among its allowed tokens."""
    for i, mask in zip(constraints.indices.tolist(), constraints.masks):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        tokens[i] = allowed[int(draws[i]) % len(allowed)]
    for i, token in constraints.forced.items():
        tokens[i] = token
