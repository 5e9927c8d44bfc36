"""From token events to outputs: what one continuation of a prompt still owes its client. No jax."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from jaxserve.detokenizer import Detokenizer
from jaxserve.embedding import Pooler
from jaxserve.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    AddRequest,
    RequestOutput,
    TokenLogprob,
)
from jaxserve.request import Request, TokenEvent

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot carry


def _finite(logprob: float) -> float:
    value = float(logprob)
    return value if math.isfinite(value) else LOWEST_LOGPROB


def _token_logprob(event: TokenEvent) -> TokenLogprob:
    if event.logprob is None or event.rank is None:
        raise RuntimeError(f"the log-probability of token {event.token_id} was asked for and not delivered")
    top = [(int(token), _finite(logprob)) for token, logprob in event.top]
    named = [(token, _finite(logprob)) for token, logprob in event.named]
    return TokenLogprob(int(event.token_id), _finite(event.logprob), int(event.rank), top, named)


class Group:
    """One AddRequest in flight: its n continuations and the scores of the prompt they share. pooler: of an
    AddEmbedding, which one continuation of one token computes."""

    __slots__ = ("members", "message", "next_logprobs", "num_unfinished", "pooler", "prompt_logprobs")

    def __init__(self, message: AddRequest, pooler: Pooler | None = None) -> None:
        self.message = message
        self.pooler = pooler
        self.members: list[Continuation] = []
        self.num_unfinished = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if message.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(message.prompt)
        part = message.part
        self.next_logprobs: list[float] | None = [] if part is not None and part.next_ids else None

    def join(self, requests: Sequence[Request], detokenizer: Detokenizer) -> None:
        self.members = [Continuation(self, request, detokenizer) for request in requests]
        self.num_unfinished = len(self.members)

    @property
    def has_prompt_scores(self) -> bool:
        scores = self.prompt_logprobs
        first = max(1, self.message.params.prompt_logprobs_start)
        return scores is not None and all(score is not None for score in scores[first:])


class Deadlines:
    """When which request must be done. Entries of requests that ended earlier are forgotten now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Group]] = []
        self._compact_at = 256

    def push(self, due: float, group: Group) -> None:
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].num_unfinished]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 256
        heapq.heappush(self._heap, (due, group.members[0].request.number, group))

    def pop_due(self, now: float) -> Iterator[Group]:
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]


class Continuation:
    """Gathers tokens, text and scores between two outputs.

    take() every event of a step, then advance() once, then output() if due. Exceptions raised here concern this
    continuation alone; the engine ends it and goes on.
    """

    __slots__ = (
        "_fresh", "_fresh_logprobs", "_interval", "_logprobs", "_stream", "_text", "_token_ids", "_undecoded",
        "_was_sent", "group", "is_done", "num_output_tokens", "request",
    )  # fmt: skip

    def __init__(self, group: Group, request: Request, detokenizer: Detokenizer) -> None:
        params = request.params
        self.group = group
        self.request = request
        self.is_done = False
        self._stream = detokenizer.stream(
            group.message.prompt,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._interval = group.message.stream_interval
        self._fresh: list[int] = []  # tokens of this step
        self._fresh_logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._token_ids: list[int] = []  # tokens since the last output
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._undecoded: list[int] = []  # of those, tokens whose text nobody needed yet
        self._text = ""
        self.num_output_tokens = 0
        self._was_sent = False

    def take(self, event: TokenEvent) -> None:
        if event.prompt_index:
            if event.prompt_index == len(self.request.prompt):
                assert self.group.next_logprobs is not None and event.logprob is not None
                self.group.next_logprobs.append(_finite(event.logprob))
                return
            assert self.group.prompt_logprobs is not None
            self.group.prompt_logprobs[event.prompt_index] = _token_logprob(event)
            return
        self._fresh.append(int(event.token_id))
        if self._fresh_logprobs is not None:
            self._fresh_logprobs.append(_token_logprob(event))

    def advance(self) -> str | None:
        """Turn the step's tokens into text; returns the stop string that ended it, if one did.

        The text of an end-of-sequence or stop token is left out, unless include_stop_str_in_output keeps it.
        """
        fresh, params = self._fresh, self.request.params
        ended_by_token = self.request.finish_reason == FINISH_STOP and not params.include_stop_str_in_output
        with_text = fresh[:-1] if ended_by_token else fresh
        num_kept = len(fresh)
        if self._stream.has_stop_strings:
            for index, token in enumerate(with_text):
                self._text += self._stream.push((token,))
                if self._stream.stop is not None:
                    num_kept = index + 1
                    break
        else:
            self._undecoded += with_text
        self._token_ids += fresh[:num_kept]
        self.num_output_tokens += num_kept
        if self._logprobs is not None and self._fresh_logprobs is not None:
            self._logprobs += self._fresh_logprobs[:num_kept]
            self._fresh_logprobs.clear()
        self._fresh = []
        return self._stream.stop

    @property
    def is_due(self) -> bool:
        """Whether a running request owes an output: its first token, or as many as the interval says."""
        if not self._interval or not self._token_ids:
            return False
        return not self._was_sent or len(self._token_ids) >= self._interval

    def output(self) -> RequestOutput:
        """What is new of a running request."""
        return self._output(self._take_text())

    def last_output(
        self,
        finish_reason: str,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        parameter: str | None = None,
    ) -> RequestOutput:
        """What is left, and why it ended. A stop string found in the very last characters overrides the reason."""
        self.is_done = True
        text = ""
        if finish_reason != FINISH_ERROR:
            text = self._take_text() + self._stream.finish()
            if self._stream.stop is not None:
                finish_reason, stop_reason = FINISH_STOP, self._stream.stop
        return self._output(
            text, finish_reason=finish_reason, stop_reason=stop_reason, error=error, parameter=parameter
        )

    def _take_text(self) -> str:
        text, self._text = self._text, ""
        if self._undecoded:
            text += self._stream.push(self._undecoded)
            self._undecoded = []
        return text

    def _output(
        self,
        text: str,
        *,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        parameter: str | None = None,
    ) -> RequestOutput:
        request, group = self.request, self.group
        scores = None
        if not self._was_sent and group.prompt_logprobs is not None:
            if group.has_prompt_scores:
                scores = group.prompt_logprobs
            elif finish_reason not in (FINISH_ABORT, FINISH_ERROR):
                raise RuntimeError("the first token came before all scores of the prompt")
        is_first, self._was_sent = not self._was_sent, True
        token_ids, self._token_ids = self._token_ids, []
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = []
        return RequestOutput(
            request_id=group.message.request_id,
            index=request.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=scores,
            next_logprobs=group.next_logprobs if finish_reason == FINISH_LENGTH else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            queue_seconds=request.admitted - request.arrival if is_first and request.admitted is not None else None,
            error=error,
            parameter=parameter,
        )
