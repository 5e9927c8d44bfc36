"""Choices scored in the engine: one request for what they share, one for each that has more than one token. No jax.

The shared prefix is computed once, with what all choices begin with. Its last position gives the score of every token
that may follow; a choice then computes its own tokens but the last behind the shared pages, all choices in one step,
and nothing is sampled.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.lang.choices import Scored
from jaxserve.lang.context import common_prefix
from jaxserve.messages import RequestOutput
from jaxserve.outputs import raise_for_error
from jaxserve.sampling_params import SamplingParams

_MAX_REMEMBERED = 1024

Finish = Callable[[Any, Any, Any], None]


class Scorer:
    """max_next: how many first tokens one request may ask for. submit: LocalBackend._submit."""

    def __init__(self, max_next: int, submit: Callable[..., Any], text_of: Callable[[int], str]) -> None:
        self._max_next = max_next
        self._submit = submit
        self._text_of = text_of
        self._remembered: collections.OrderedDict[tuple[int, ...], list[float | None]] = collections.OrderedDict()

    def score(
        self,
        stream: Any,
        prefix: list[int],
        choices: Sequence[list[int]],
        alone: list[int] | None,
        finish: Finish,
    ) -> None:
        """finish(scores of each choice, its scores behind `alone` or None, a pin for each choice), or finish(error,
        None, []). alone: what stands before a choice scored without its context; None: not wanted."""
        scoring = _Scoring(self, stream, finish)
        scoring.add(prefix, choices)
        if alone is not None:
            scoring.add_alone(alone, choices)
        scoring.start()

    def scored(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> list[Scored]:
        return [(logprob, token, self._text_of(token)) for token, logprob in zip(tokens, logprobs, strict=True)]

    def remembered(self, tokens: tuple[int, ...]) -> list[float | None] | None:
        """Scores of a choice alone, which are the same whatever the program."""
        if tokens in self._remembered:
            self._remembered.move_to_end(tokens)
        return self._remembered.get(tokens)

    def remember(self, tokens: tuple[int, ...], logprobs: list[float | None]) -> None:
        self._remembered[tokens] = logprobs
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)


class _Scoring:
    """One selection in flight. Requests are sent at once; their answers come in the engine's thread."""

    def __init__(self, scorer: Scorer, stream: Any, finish: Finish) -> None:
        self._scorer = scorer
        self._stream = stream
        self._finish = finish
        self._lock = threading.Lock()
        self._plans: list[Callable[[], None]] = []
        self._num_open = 1  # start() itself
        self._error: BaseException | None = None
        self._pins: list[Any] = []
        self._pin_of: list[Any] = []
        self._choices: list[list[int]] = []
        self._scores: list[list[float | None]] = []
        self._alone: list[list[float | None]] | None = None
        self._alone_prefix: list[int] = []

    def add(self, prefix: list[int], choices: Sequence[list[int]]) -> None:
        self._choices = list(choices)
        self._scores = [[None] * len(choice) for choice in choices]
        self._plans.append(lambda: self._send(prefix, self._scores, is_alone=False))

    def add_alone(self, prefix: list[int], choices: Sequence[list[int]]) -> None:
        self._alone = []
        self._alone_prefix = prefix
        missing: list[list[float | None]] = []
        for choice in choices:
            known = self._scorer.remembered(tuple(prefix + choice))
            self._alone.append([None] * len(choice) if known is None else list(known))
            missing.append(self._alone[-1] if known is None else [])
        if any(missing):
            self._plans.append(lambda: self._send(prefix, missing, is_alone=True))

    def start(self) -> None:
        try:
            for plan in self._plans:
                plan()
        except Exception as error:
            self._error = error
        self._close_one()

    def _send(self, prefix: list[int], scores: list[list[float | None]], *, is_alone: bool) -> None:
        """Ask for what is to be written into `scores`; an empty list there is not wanted."""
        wanted = [index for index, row in enumerate(scores) if row]
        base = "" if is_alone else None  # None: where the branch is
        # What all choices begin with is computed and scored with the prefix.
        choices = [self._choices[index] for index in wanted]
        begin = choices[0][: min([common_prefix(choices[0], each) for each in choices])]
        begin = begin[: min(map(len, choices)) - 1] if prefix else []
        shared_prompt, place = prefix + begin, len(begin)
        firsts = list(dict.fromkeys(choice[place] for choice in choices)) if prefix else []
        for start in range(0, len(firsts), self._scorer._max_next):
            tokens = firsts[start : start + self._scorer._max_next]
            take = _SharedTokens(self, scores, wanted, len(prefix), place, tokens)
            pin = self._request(shared_prompt, tokens, len(prefix), base, take)
            base = base or pin.request_id
        shared = self._pins[-1] if firsts else None
        pins = []
        for index in wanted:
            choice = self._choices[index]
            pin = shared
            if len(choice) > place + 1:
                first = place + 1 if prefix else 1
                take = _OwnTokens(scores[index], len(prefix), first)
                pin = self._request(prefix + choice[:-1], choice[-1:], len(prefix) + first, base, take)
            pins.append(pin)
        if not is_alone:
            self._pin_of = pins

    def _request(
        self,
        prompt: list[int],
        next_ids: list[int],
        start: int,
        base: str | None,
        take: Callable[[RequestOutput], None],
    ) -> Any:
        params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0, prompt_logprobs_start=start)
        with self._lock:
            self._num_open += 1

        def answer(output: RequestOutput | BaseException, pin: Any) -> None:
            try:
                if isinstance(output, BaseException):
                    raise output
                raise_for_error(output)
                if output.next_logprobs is None:
                    raise RuntimeError(f"the scores of a choice did not come: {output.finish_reason}")
                take(output)
            except BaseException as error:
                self._error = self._error or error
            self._close_one()

        pin = self._scorer._submit(self._stream, prompt, params, answer, base=base, next_ids=tuple(next_ids))
        self._pins.append(pin)
        return pin

    def _close_one(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open:
                return
        used = [] if self._error is not None else [pin.share() for pin in self._pin_of]
        for pin in self._pins:
            pin.drop()
        if self._error is not None:
            self._finish(self._error, None, [])
            return
        scorer = self._scorer
        alone = None
        if self._alone is not None:
            for choice, row in zip(self._choices, self._alone, strict=True):
                scorer.remember(tuple(self._alone_prefix + choice), row)
            alone = [scorer.scored(choice, row) for choice, row in zip(self._choices, self._alone, strict=True)]
        scores = [scorer.scored(choice, row) for choice, row in zip(self._choices, self._scores, strict=True)]
        self._finish(scores, alone, used)


class _SharedTokens:
    """Writes the scores of what all choices begin with, and of the token behind it to each choice that has it."""

    def __init__(
        self,
        scoring: _Scoring,
        scores: list[list[float | None]],
        wanted: list[int],
        start: int,
        place: int,
        tokens: list[int],
    ) -> None:
        self._scoring = scoring
        self._scores = scores
        self._wanted = wanted
        self._start = start
        self._place = place
        self._tokens = tokens

    def __call__(self, output: RequestOutput) -> None:
        assert output.next_logprobs is not None
        found = dict(zip(self._tokens, output.next_logprobs, strict=True))
        for index in self._wanted:
            row = self._scores[index]
            for k in range(self._place):
                row[k] = _prompt_score(output, self._start + k)
            token = self._scoring._choices[index][self._place]
            if token in found:
                row[self._place] = found[token]


class _OwnTokens:
    """Writes the scores of a choice's tokens from `first` on."""

    def __init__(self, row: list[float | None], start: int, first: int) -> None:
        self._row = row
        self._start = start
        self._first = first

    def __call__(self, output: RequestOutput) -> None:
        assert output.next_logprobs is not None
        for index in range(self._first, len(self._row) - 1):
            self._row[index] = _prompt_score(output, self._start + index)
        self._row[-1] = output.next_logprobs[0]


def _prompt_score(output: RequestOutput, index: int) -> float | None:
    score = None if output.prompt_logprobs is None else output.prompt_logprobs[index]
    return None if score is None else score.logprob
