"""The engine's state of one continuation of one prompt. No jax.

A prompt with n > 1 becomes n Requests; those with index > 0 name index 0 as `parent` and fork from its pages.
The scheduler alone changes a Request; others read it.
"""

from __future__ import annotations

import dataclasses
import enum

import msgspec
import numpy as np

from jaxserve.messages import ProgramPart
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.constraint import Constraint

ALONE = ProgramPart()


class Status(enum.Enum):
    WAITING = "waiting"  # not in the device tables (new, preempted, or a fork whose parent still prefills)
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """number is unique in the engine; prompt is int32 [num_prompt_tokens], never changed.

    output_ids          tokens known to the host, in order (the device may be one or two ahead)
    max_total_tokens    prompt + output at most (max_tokens and the context limit, whichever is smaller)
    admitted            when it was first given a row, by time.monotonic(); None: not yet
    num_cached_tokens   prompt tokens whose K/V came from the cache at the first admission
    pooling             of an embedding: "last", "mean"; "" for a text to continue
    part                its place in a program, see messages.ProgramPart
    keep_as             name under which its pages stay when it has ended; "": they do not
    constraint          its place in params.grammar
    finish_reason       see messages.FINISH_*; stop_reason: the stop string or stop token, None for eos
    """

    number: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    index: int = 0
    parent: Request | None = None
    namespace: str = ""
    priority: int = 0
    arrival: float = 0.0
    admitted: float | None = None
    pooling: str = ""
    part: ProgramPart = ALONE
    keep_as: str = ""
    status: Status = Status.WAITING
    output_ids: list[int] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    constraint: Constraint | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """What scheduler.apply() tells of one request, in order.

    token_id       the new token (already appended to request.output_ids); for a prompt score: the prompt token
    prompt_index   >= 1: this is the score of prompt token `prompt_index`, not a new token; num_prompt_tokens: of a
                   token of next_ids, in their order
    logprob, rank, top, named   if asked for; top is [(token id, logprob), ...] best first, exactly as many as asked;
                         named those of logprob_token_ids
    The request's finish_reason is set when this was its last token.
    """

    request: Request
    token_id: int
    prompt_index: int = 0
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    named: tuple[tuple[int, float], ...] = ()
