"""A runner without a device: same dispatch and collect, real pages of token ids, a virtual clock. No jax.

What it "samples" is a hash of every token it reads back through the page table, so a page given away too early, a copy
on write forgotten or a token lost changes the tokens that come out. expected_tokens() computes the same without pages.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.scheduler.decision import LAST_TOKEN, CacheGeometry, StepDecision, StepResult

_MAX_POSITIONS = 1 << 17
_WEIGHTS = np.random.default_rng(20261129).integers(1, 2**63, _MAX_POSITIONS, dtype=np.uint64) | np.uint64(1)
_NEVER_WRITTEN = np.int32(-2)


def next_token(history: np.ndarray, seed: int, vocab_size: int) -> int:
    """The pseudo-token that follows int32 `history`: depends on every token, its position and the seed."""
    mixed = int((history.astype(np.uint64) * _WEIGHTS[: len(history)]).sum(dtype=np.uint64)) ^ seed
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 32)) & 0xFFFFFFFF) % vocab_size


def expected_tokens(prompt: np.ndarray, seed: int, count: int, vocab_size: int) -> list[int]:
    """What a request must produce, computed directly."""
    history = np.empty(len(prompt) + count, np.int32)
    history[: len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + count):
        history[n] = next_token(history[:n], seed, vocab_size)
    return history[len(prompt) :].tolist()


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of a step: fixed + per computed token + per token of context read by its rows."""

    step: float = 5e-3
    token: float = 1e-3
    context_token: float = 1e-6

    def seconds(self, decision: StepDecision) -> float:
        context = sum(row.start + row.num_tokens for row in decision.rows)
        return self.step + self.token * decision.num_tokens + self.context_token * context


class SimulatedRunner:
    """Implements scheduler.decision.Runner. Raises RuntimeError when a decision breaks a rule of the device."""

    def __init__(self, geometry: CacheGeometry, *, vocab_size: int = 1024, cost_model: CostModel | None = None) -> None:
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.cost_model = cost_model or CostModel()
        self.now = 0.0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._tokens = np.full((geometry.num_pages, geometry.page_size), _NEVER_WRITTEN)
        self._last_token = np.full(geometry.max_num_rows, _NEVER_WRITTEN)

    def dispatch(self, decision: StepDecision) -> StepResult:
        self._check(decision)
        for copy in decision.copies:
            self._tokens[copy.target] = self._tokens[copy.source]
        self._write(decision)
        sampled = np.array([self._sample(decision, i) for i in range(len(decision.samples))], np.int32)
        for work, token in zip(decision.samples, sampled):
            if not work.is_score:
                self._last_token[work.row] = token
        self.now += self.cost_model.seconds(decision)
        self.num_steps += 1
        self.num_computed_tokens += decision.num_tokens
        scores = np.zeros(len(sampled), np.float32)
        return StepResult(decision.step_id, sampled, scores, np.ones(len(sampled), np.int32))

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def _check(self, decision: StepDecision) -> None:
        limits = self.geometry
        rows = [row.row for row in decision.rows]
        broken = {
            "rows": len(rows) > limits.max_num_rows or len(set(rows)) != len(rows),
            "samples": len(decision.samples) > limits.max_num_samples,
            "tokens": decision.num_tokens > limits.max_step_tokens,
            "decodes first": any(row.num_tokens != 1 for row in decision.rows[: decision.num_decodes]),
            "dummy page": any((row.pages == 0).any() for row in decision.rows),
            "length": any(row.start + row.num_tokens > limits.max_model_len for row in decision.rows),
        }
        if any(broken.values()):
            raise RuntimeError(f"step {decision.step_id} breaks: {[name for name, bad in broken.items() if bad]}")

    def _write(self, decision: StepDecision) -> None:
        """Write every row's tokens before any is read, as the device does layer by layer."""
        page_size = self.geometry.page_size
        written: set[int] = set()
        for row in decision.rows:
            ids = row.token_ids
            if ids[0] == LAST_TOKEN:
                ids = self._last_token[row.row : row.row + 1]
            if ids.min() < 0:
                raise RuntimeError(f"request {row.request_id} computes a token that nobody has sampled")
            first, last = row.start // page_size, (row.start + len(ids) - 1) // page_size
            pages = row.pages[first : last + 1].tolist()
            if len(pages) != last - first + 1:
                raise RuntimeError(f"request {row.request_id}: {len(row.pages)} pages for token {row.start + len(ids)}")
            if not written.isdisjoint(pages):
                raise RuntimeError(f"request {row.request_id} writes a page that another row writes")
            written.update(pages)
            slots = np.arange(row.start, row.start + len(ids))
            self._tokens[row.pages[slots // page_size], slots % page_size] = ids
        self._row_ends = np.cumsum([row.num_tokens for row in decision.rows])

    def _sample(self, decision: StepDecision, index: int) -> int:
        work = decision.samples[index]
        if work.forced_token >= 0:
            return work.forced_token
        which = int(np.searchsorted(self._row_ends, work.token_index, side="right"))
        row = decision.rows[which]
        length = row.start + row.num_tokens - (int(self._row_ends[which]) - 1 - work.token_index)
        if length != work.position:
            raise RuntimeError(f"request {work.request_id}: position {work.position}, {length} tokens before it")
        history = self._tokens[row.pages[: -(-length // self.geometry.page_size)]].reshape(-1)[:length]
        return next_token(history, work.seed, self.vocab_size)
