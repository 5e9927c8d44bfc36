"""What the scheduler decides for one step, and what a runner answers. No jax.

scheduler.schedule() -> StepDecision -> runner.dispatch() -> handle -> runner.collect() -> StepResult
-> scheduler.apply(decision, result). Two steps may be in flight: decision n + 1 is made before result n is known.

What is made for every row of every step is a msgspec.Struct: frozen like a frozen dataclass, ten times faster to make.

Where a row is under a grammar (decision.is_constrained), dispatch() starts everything but sampling, and
runner.sample(handle, constraints) follows as soon as the tokens before are known, before the next dispatch().
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxserve.sampling_params import SamplingParams

POOL_NONE, POOL_LAST, POOL_SUM = range(3)  # in RowWork.pooling
LAST_TOKEN = -1  # in RowWork.token_ids: the token last sampled for this row, which only the device knows yet


class RowWork(msgspec.Struct, frozen=True, gc=False):
    """One request's tokens in one step.

    request_id  the engine's own number of the request
    row         the request's place in the device tables, 0 <= row < max_num_rows; kept while it runs
    start       position of the first token computed here = tokens of the request already in the cache
    token_ids   int32 [num_tokens]; LAST_TOKEN only as the single token of a decoding row
    pages       int32 [>= ceil((start + num_tokens) / page_size)]: the request's pages in order. A snapshot: the
                scheduler does not change it afterwards
    pooling     POOL_LAST, POOL_SUM: StepResult.pooled is wanted, of the last token or summed over all
    """

    request_id: int
    row: int
    start: int
    token_ids: np.ndarray
    pages: np.ndarray
    pooling: int = POOL_NONE

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class SampleWork(msgspec.Struct, frozen=True, gc=False):
    """One row of logits to turn into one token (or one score).

    request_id    whose token it is; with n > 1 the children sample from their parent's last prompt token
    row           place in the last-token table that receives the token; ignored when is_score
    token_index   flat index of the token in this step (tokens of decision.rows, one row after another)
    position      position that the sampled token will take in its sequence: with seed it fixes the draw
    seed          0 .. 2**64 - 1, of this continuation (made from the request's seed and the index of n)
    num_outputs   tokens of this request sampled before this one (min_tokens looks at it)
    params        validated options of the request
    forced_token  >= 0: take this token instead of sampling; its log-probability is reported all the same
    is_score      only the log-probabilities are wanted (prompt scoring): the table is left alone
    recent_ids    with bad words: the newest output tokens that the host knows, oldest first
    is_behind     one more output token, which only the device's last-token table knows, follows recent_ids
    """

    request_id: int
    row: int
    token_index: int
    position: int
    seed: int
    num_outputs: int
    params: SamplingParams
    forced_token: int = -1
    is_score: bool = False
    recent_ids: tuple[int, ...] = ()
    is_behind: bool = False


class PageCopy(msgspec.Struct, frozen=True, gc=False):
    """Copy page `source` to `target` in every layer before this step's forward (copy on write)."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowReset:
    """A row begins to belong to a request that uses penalties: the device's token counts start from these.

    prompt_ids and output_ids are int32; output_ids is not empty after a preemption. For rows without penalties
    no reset is sent: their counts are never read.
    """

    row: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class StepDecision:
    """Rows that decode come first (num_decodes of them, one token each), then prefill chunks."""

    step_id: int
    rows: tuple[RowWork, ...]
    num_decodes: int
    samples: tuple[SampleWork, ...]
    copies: tuple[PageCopy, ...] = ()
    resets: tuple[RowReset, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def is_constrained(self) -> bool:
        """Whether sampling waits for StepConstraints."""
        return any(work.params.grammar is not None and not work.is_score for work in self.samples)


@dataclasses.dataclass(frozen=True, slots=True)
class StepConstraints:
    """What grammars say about the samples of one step.

    indices  int [n]: samples that are limited;  masks  int32 [n, ceil(V / 32)]: their allowed tokens, 32 a word,
             at least one in each
    forced   sample -> the token it takes
    """

    indices: np.ndarray
    masks: np.ndarray
    forced: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of one step, in the order of decision.samples.

    token_ids      int32 [n]
    logprobs       float32 [n] or None: log-softmax of the raw logits at the token (None: nobody asked)
    ranks          int32 [n] or None: how many tokens of the vocabulary score higher, plus 1
    top_ids        int32 [n, K] or None, best first;  top_logprobs float32 [n, K] or None
    named_logprobs float32 [n, MAX_LOGPROB_TOKEN_IDS] or None: those of params.logprob_token_ids, in that order
    pooled         float32 [rows of the step, hidden] or None: hidden states behind the final norm, as RowWork.pooling
                   says; rows that did not ask hold anything
    """

    step_id: int
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    named_logprobs: np.ndarray | None = None
    pooled: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RankedDecision:
    """One step of all data ranks: rows and pages are those of each rank. None: the rank has no work in this step and
    runs padding. At least one rank has work. Rows and samples are listed rank after rank."""

    step_id: int
    ranks: tuple[StepDecision | None, ...]

    @property
    def busy(self) -> tuple[StepDecision, ...]:
        """The decisions of ranks with work."""
        return tuple(decision for decision in self.ranks if decision is not None)

    @property
    def rows(self) -> tuple[RowWork, ...]:
        return tuple(row for decision in self.busy for row in decision.rows)

    @property
    def samples(self) -> tuple[SampleWork, ...]:
        return tuple(sample for decision in self.busy for sample in decision.samples)

    @property
    def num_decodes(self) -> int:
        return sum(decision.num_decodes for decision in self.busy)

    @property
    def num_tokens(self) -> int:
        return sum(decision.num_tokens for decision in self.busy)

    @property
    def is_constrained(self) -> bool:
        return any(decision.is_constrained for decision in self.busy)


@dataclasses.dataclass(frozen=True, slots=True)
class RankedResult:
    """What each rank sampled, in the order of RankedDecision.ranks; None where there was no work. pooled is that of all
    rows, in the order of RankedDecision.rows."""

    step_id: int
    ranks: tuple[StepResult | None, ...]
    pooled: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What the scheduler must know of the device, resolved once by the runner. All but num_ranks are per rank: with
    more than one, decisions are RankedDecision and results RankedResult.

    num_pages includes the dummy page 0; usable pages are 1 .. num_pages - 1. max_num_samples bounds
    len(decision.samples), max_num_rows bounds len(decision.rows), max_step_tokens bounds num_tokens.
    """

    num_pages: int
    page_size: int
    max_num_rows: int
    max_num_samples: int
    max_step_tokens: int
    max_model_len: int
    num_ranks: int = 1


class Runner(Protocol):
    """The device, or the simulator's stand-in for it."""

    geometry: CacheGeometry

    def dispatch(self, decision: Any) -> Any:
        """Start the step (StepDecision; RankedDecision with several ranks) without waiting for it; steps run in the
        order of dispatch."""
        ...

    def sample(self, handle: Any, constraints: StepConstraints) -> Any:
        """Start the sampling of a constrained step, once, before anything else is dispatched. Returns its handle."""
        ...

    def collect(self, handle: Any) -> Any:
        """Wait for a dispatched step and read its tokens (StepResult; RankedResult with several ranks).
        Called once per handle, in order."""
        ...
