"""What grammars add to an engine: compiling before admission, masks and forced tokens of a step. No jax.

Rows under a grammar do not slow a step down: its forward is dispatched like any other; when the tokens of the step
before are known, the masks are filled while the device computes, and sampling is dispatched then.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import llguidance
import numpy as np

from jaxserve.messages import AddRequest
from jaxserve.request import Request
from jaxserve.scheduler.decision import StepConstraints, StepDecision
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.structured.constraint import Constraint, fill_masks, make_gate
from jaxserve.structured.grammar import Grammar, GrammarError

_MIN_CORES = 4  # to fill masks in parallel
COMPILE_SECONDS = 30.0  # what a grammar may take until its request is refused; limits end it much sooner


class Compiled(NamedTuple):
    """A request whose grammar is ready, or is known to be wrong."""

    message: AddRequest
    arrival: float
    error: str | None


class _Waiting(NamedTuple):
    message: AddRequest
    arrival: float
    future: concurrent.futures.Future[llguidance.LLMatcher]


class GrammarStage:
    """Belongs to one engine and its thread.

    vocab_size    of the model's logits
    may_jump      whether forced tokens may be computed as one chunk
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int], *, may_jump: bool) -> None:
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._may_jump = may_jump
        self._waiting: dict[str, _Waiting] = {}
        self._executor: llguidance.LLExecutor | None = None
        self.num_forced_tokens = self.num_jumped_tokens = 0

    def prepare(self) -> None:
        """Read the vocabulary now, so that no request has to wait for it."""
        _ = self._compiler.vocabulary

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def num_cached(self) -> int:
        return self._compiler.num_cached

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def submit(self, message: AddRequest, arrival: float) -> Compiled | None:
        """Compile a request's grammar. None: not ready yet, take_ready() will have it."""
        grammar = message.params.grammar
        assert grammar is not None
        if not grammar.text:
            return Compiled(message, arrival, None)
        future = self._compiler.submit(grammar)
        if future.done():
            return _result(message, arrival, future)
        self._waiting[message.request_id] = _Waiting(message, arrival, future)
        return None

    def take_ready(self, now: float) -> list[Compiled]:
        ready = []
        for request_id, (message, arrival, future) in list(self._waiting.items()):
            if future.done():
                ready.append(_result(message, arrival, future))
            elif now - arrival > COMPILE_SECONDS:
                ready.append(Compiled(message, arrival, f"not compiled within {COMPILE_SECONDS:g} s"))
            else:
                continue
            del self._waiting[request_id]
        return ready

    def drop(self, request_id: str) -> AddRequest | None:
        """Forget a request that is being compiled for."""
        waiting = self._waiting.pop(request_id, None)
        return None if waiting is None else waiting.message

    def drop_all(self) -> list[AddRequest]:
        messages = [waiting.message for waiting in self._waiting.values()]
        self._waiting.clear()
        return messages

    def constrain(self, requests: Iterable[Request], grammar: Grammar) -> None:
        """Give each of n continuations its own place in the grammar, which has been compiled."""
        vocabulary = self._compiler.vocabulary
        prototype = self._compiler.submit(grammar).result() if grammar.text else None
        for request in requests:
            matcher = None if prototype is None else prototype.deep_copy()
            gate = make_gate(grammar, vocabulary)
            request.constraint = Constraint(matcher, vocabulary, self._eos_token_ids, gate)

    def decide(
        self, decision: StepDecision, find: Callable[[int], Request | None]
    ) -> tuple[StepConstraints, list[tuple[int, list[int]]]]:
        """(what limits a step's samples, (request number, forced tokens) of those that jump).

        Every token before the samples must be known. find: number -> request, None if it has ended.
        """
        indices: list[int] = []
        limited: list[Constraint] = []
        matchers: list[llguidance.LLMatcher] = []
        going_on: list[int] = []
        forced: dict[int, int] = {}
        jumps = []
        for index, work in enumerate(decision.samples):
            if work.is_score or work.params.grammar is None:
                continue
            request = find(work.request_id)
            constraint = None if request is None else request.constraint
            if request is None or constraint is None or constraint.error is not None:
                continue
            if constraint.forced >= 0:
                forced[index] = constraint.forced
                num_taken = 1
                if self._may_jump and _may_jump(request):
                    tokens = constraint.take_forced(request.max_total_tokens - request.num_tokens)
                    num_taken = len(tokens)
                    jumps.append((work.request_id, tokens))
                self.num_forced_tokens += num_taken
                self.num_jumped_tokens += num_taken - 1
            elif constraint.must_go_on:
                going_on.append(index)
            elif constraint.limits_next is not None:
                indices.append(index)
                limited.append(constraint)
                matchers.append(constraint.limits_next)
        masks = np.empty((0, self._num_words), np.int32)
        if matchers:
            masks = fill_masks(self._threads(), matchers, self._num_words)
            for constraint in limited:
                constraint.check()
        if going_on:
            masks = np.concatenate((masks, np.tile(self._all_but_ends(), (len(going_on), 1))))
        return StepConstraints(np.array(indices + going_on, np.int64), masks, forced), jumps

    def close(self) -> None:
        self._compiler.close()

    def _all_but_ends(self) -> np.ndarray:
        mask = np.full(self._num_words, -1, np.int32)
        for token in self._eos_token_ids:
            mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))
        return mask

    def _threads(self) -> llguidance.LLExecutor | None:
        """None on a few cores: the executor would have one thread or two there, and take cores from a device that
        computes on the same ones."""
        if (os.cpu_count() or 1) < _MIN_CORES:
            return None
        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        return self._executor


def _may_jump(request: Request) -> bool:
    """Scores of a token need a sample of its own."""
    return request.params.logprobs is None and request.params.prompt_logprobs is None


def _result(message: AddRequest, arrival: float, future: concurrent.futures.Future[Any]) -> Compiled:
    try:
        future.result()
    except GrammarError as error:
        return Compiled(message, arrival, str(error))
    return Compiled(message, arrival, None)
