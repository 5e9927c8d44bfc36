"""Where one continuation stands in its grammar: which tokens may come next, and which must. No jax."""

from __future__ import annotations

import collections

import llguidance
import numpy as np

from jaxserve.structured.compiler import first_line
from jaxserve.structured.grammar import Grammar


class Gate:
    """Free text up to a marker (the end of a model's reasoning), with a budget.

    marker       bytes behind which the grammar begins
    start        a text that does not begin with this (white space aside) has no such part at all
    end_ids      tokens that lead to it, forced when the budget (of tokens) is used up
    """

    def __init__(self, marker: bytes, end_ids: list[int], budget: int | None, start: bytes = b"") -> None:
        self._marker = marker
        self._end_ids = end_ids
        self._budget = budget
        self._start = start  # empty once it has been seen
        self._tail = b""
        self._num_tokens = 0

    def take(self, word: bytes) -> bytes | None:
        """One more token of text. None while the gate is closed, else the bytes behind the marker."""
        self._num_tokens += 1
        text = self._tail + word
        if self._start:
            seen = text.lstrip()
            if self._start.startswith(seen):
                self._tail = text
                return None
            if not seen.startswith(self._start):
                return text
            self._start = b""
        at = text.find(self._marker)
        if at >= 0:
            return text[at + len(self._marker) :]
        self._tail = text[-len(self._marker) + 1 :] if len(self._marker) > 1 else b""
        return None

    @property
    def forced(self) -> list[int]:
        """What leads to the marker, once the budget is used up."""
        is_over = self._budget is not None and self._num_tokens >= self._budget and not self._start
        return self._end_ids if is_over else []


class Constraint:
    """One continuation. Tokens that the grammar forces are known ahead: `forced` is the next of them.

    A forced token is the one that the tokenizer itself would write, so tokens do not depend on whether forced ones
    are computed one by one or all at once. Where the grammar ends, an end-of-sequence token is forced.

    matcher   at the start of the grammar, owned by this object; None: every text is allowed
    error     set when a token or a limit broke the grammar; the request has to end
    is_finished   the text is complete
    """

    __slots__ = ("_eos", "_eos_ids", "_gate", "_matcher", "_queue", "_vocabulary", "error", "is_finished")

    def __init__(
        self,
        matcher: llguidance.LLMatcher | None,
        vocabulary: llguidance.LLTokenizer,
        eos_token_ids: frozenset[int],
        gate: Gate | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos_ids = eos_token_ids
        self._eos = min(eos_token_ids) if eos_token_ids else -1
        self._gate = gate
        self._queue: collections.deque[int] = collections.deque()
        self.error: str | None = None
        self.is_finished = False
        if gate is None:
            self._look_ahead()
        else:
            self._queue.extend(gate.forced)

    @property
    def forced(self) -> int:
        """The next token if there is only one, else -1."""
        return self._queue[0] if self._queue else -1

    @property
    def num_forced(self) -> int:
        return len(self._queue)

    @property
    def limits_next(self) -> llguidance.LLMatcher | None:
        """The matcher whose mask the next token needs; None where it needs none."""
        if self._queue or self._gate is not None or self.is_finished or self.error is not None:
            return None
        return self._matcher

    @property
    def must_go_on(self) -> bool:
        """Whether every token but an end of sequence may come: before a grammar that begins later."""
        return self._gate is not None and self._matcher is not None and not self._queue

    def advance(self, token: int) -> None:
        """A token was sampled, or forced and computed by itself."""
        if self.error is not None or self.is_finished:
            return
        if self._queue:
            expected = self._queue.popleft()
            if token != expected:
                self.error = f"token {token} came where {expected} was forced"
            else:
                self._count(token)
        elif self._gate is not None and token not in self._eos_ids:
            self._count(token)
        else:
            if self._matcher is not None and self._gate is None:
                self._consume([token])
            if token in self._eos_ids:
                self.is_finished = self.error is None
            elif self.error is None:
                self._look_ahead()

    def check(self) -> None:
        """Notice that a limit stopped the matcher while it made a mask, which is then worth nothing."""
        if self._matcher is not None and self._matcher.is_error() and self.error is None:
            self.error = first_line(self._matcher.get_error())

    def take_forced(self, limit: int) -> list[int]:
        """All forced tokens, at most `limit`, as if they had been computed."""
        tokens = []
        while self._queue and len(tokens) < limit:
            token = self._queue.popleft()
            tokens.append(token)
            self._count(token)
        return tokens

    def validate(self, tokens: list[int]) -> int:
        """How many of some drafted tokens the grammar allows, one after another."""
        forced = list(self._queue)
        if forced:
            same = next((k for k, (a, b) in enumerate(zip(tokens, forced)) if a != b), min(len(tokens), len(forced)))
            return same
        if self._gate is not None or self._matcher is None:
            return len(tokens) if self._gate is None else 0
        return self._matcher.validate_tokens(tokens)

    def _count(self, token: int) -> None:
        """Bookkeeping of a token that the matcher has seen, or that it never sees."""
        if self._gate is not None:
            rest = self._gate.take(self._vocabulary.decode_bytes([token]))
            if rest is None:
                if not self._queue:
                    self._queue.extend(self._gate.forced)
                return
            self._gate = None
            self._queue.clear()
            self._begin(rest)
        elif token == self._eos and not self._queue:
            self.is_finished = True

    def _begin(self, rest: bytes) -> None:
        """The gate has opened; `rest` is text that came with the marker's last token."""
        if self._matcher is None:
            return
        for text in dict.fromkeys((rest, rest.lstrip())):
            tokens = self._vocabulary.tokenize_bytes(text) if text else []
            if self._matcher.validate_tokens(tokens) == len(tokens):
                self._consume(tokens)
                break
        else:
            self.error = f"the text {rest[:40]!r} behind the reasoning does not fit the grammar"
        if self.error is None:
            self._look_ahead()

    def _consume(self, tokens: list[int]) -> None:
        matcher = self._matcher
        assert matcher is not None
        if tokens and not matcher.consume_tokens(tokens):
            self.error = first_line(matcher.get_error())

    def _look_ahead(self) -> None:
        """Queue what must come now. The matcher runs ahead of it."""
        matcher = self._matcher
        if matcher is None:
            return
        tokens = matcher.compute_ff_tokens()
        if tokens:
            self._consume(tokens)
            self._queue.extend(tokens)
        if matcher.is_error():
            self.error = first_line(matcher.get_error())
        elif matcher.is_stopped():
            # A matcher stops one token before the end of sequence.
            self._queue.append(self._eos)


def make_gate(grammar: Grammar, vocabulary: llguidance.LLTokenizer) -> Gate | None:
    """The gate of a grammar that begins later."""
    if not grammar.begins_after:
        return None
    ids = vocabulary.tokenize_str(grammar.forced_end or grammar.begins_after, parse_special=True)
    return Gate(grammar.begins_after.encode(), ids, grammar.max_free_tokens, grammar.only_behind.encode())


def fill_masks(
    executor: llguidance.LLExecutor | None, matchers: list[llguidance.LLMatcher], num_words: int
) -> np.ndarray:
    """Which tokens may come next, int32 [matchers, num_words], 32 tokens a word; without the GIL, and in parallel where
    there is an executor."""
    masks = np.empty((len(matchers), num_words), np.int32)
    if executor is None or len(matchers) == 1:
        for place, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(masks[place].ctypes.data, num_words * 4)
    else:
        places = [(matcher, place) for place, matcher in enumerate(matchers)]
        executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, num_words * 4, len(matchers))
    return masks
