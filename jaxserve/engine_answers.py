"""What becomes known of requests, turned into outputs: text, vectors, refusals. A mistake in one ends only that one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from jaxserve.continuation import Continuation, Group
from jaxserve.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_STOP,
    AddEmbedding,
    AddRequest,
    RequestOutput,
    num_outputs,
)
from jaxserve.request import TokenEvent
from jaxserve.scheduler.decision import RankedDecision, StepDecision
from jaxserve.scheduler.dp_balance import RankedScheduler
from jaxserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Answers:
    """Requests in flight and the outputs that are due. Ends in the scheduler what a stop string or a failure ends.

    groups             request id -> its continuations, as long as one of them has not ended
    by_number          the scheduler's number -> continuation
    outbox             outputs that nobody has taken yet
    num_finished       by reason; num_output_tokens: made since the start, embeddings aside
    """

    def __init__(self, scheduler: Scheduler | RankedScheduler) -> None:
        self.groups: dict[str, Group] = {}
        self.by_number: dict[int, Continuation] = {}
        self.outbox: list[RequestOutput] = []
        self.num_finished: Counter[str] = Counter()
        self.num_output_tokens = 0
        self._scheduler = scheduler

    def join(self, group: Group) -> None:
        """A group whose requests the scheduler has taken is in flight."""
        self.groups[group.message.request_id] = group
        self.by_number.update((member.request.number, member) for member in group.members)

    def take_outbox(self) -> list[RequestOutput]:
        outputs, self.outbox = self.outbox, []
        return outputs

    def refuse(
        self,
        message: AddRequest | AddEmbedding,
        error: str | None,
        parameter: str | None,
        *,
        reason: str = FINISH_ERROR,
    ) -> None:
        """Answer each continuation of a prompt that was never queued."""
        count = num_outputs(message)
        self.num_finished[reason] += count
        for index in range(count):
            self.outbox.append(
                RequestOutput(
                    request_id=message.request_id,
                    index=index,
                    finish_reason=reason,
                    num_prompt_tokens=len(message.prompt),
                    error=error,
                    parameter=parameter,
                )
            )

    def pool(self, decision: StepDecision | RankedDecision, pooled: np.ndarray) -> None:
        """Hand the pooled states [rows, hidden] of a step to the embeddings that its rows belong to."""
        for work, values in zip(decision.rows, pooled):
            member = self.by_number.get(work.request_id)
            if work.pooling and member is not None and member.group.pooler is not None:
                member.group.pooler.take(work.start, work.num_tokens, values)

    def take(self, events: Iterable[TokenEvent]) -> None:
        """Make the text of new tokens, and the outputs that are due."""
        touched: dict[int, Continuation] = {}
        for event in events:
            number = event.request.number
            member = self.by_number.get(number)
            if member is None:
                continue
            try:
                member.take(event)
            except Exception as error:
                self._fail(member, error)
                continue
            touched[number] = member
        for member in touched.values():
            if not member.is_done:
                try:
                    self._answer(member)
                except Exception as error:
                    self._fail(member, error)

    def abort(self, group: Group, *, error: str | None = None, parameter: str | None = None) -> None:
        """End what is left of a group with FINISH_ABORT."""
        for member in group.members:
            if not member.is_done:
                self._scheduler.abort(member.request.number)
                self._end(member, FINISH_ABORT, error=error, parameter=parameter)

    def _answer(self, member: Continuation) -> None:
        request = member.request
        num_before = member.num_output_tokens
        stop = member.advance()
        if member.group.pooler is None:
            self.num_output_tokens += member.num_output_tokens - num_before
        if stop is not None:
            if not request.is_finished:
                self._scheduler.finish(request.number, FINISH_STOP, stop)
            self._end(member, FINISH_STOP, stop_reason=stop)
        elif request.finish_reason == FINISH_ERROR:
            grammar, constraint = request.params.grammar, request.constraint
            error = f"{grammar.parameter}: the text could not be kept inside it: {constraint.error}"
            self._end(member, FINISH_ERROR, error=error, parameter=grammar.parameter)
        elif request.finish_reason is not None:
            self._end(member, request.finish_reason, stop_reason=request.stop_reason)
        elif member.is_due:
            self.outbox.append(member.output())

    def _end(
        self,
        member: Continuation,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        parameter: str | None = None,
    ) -> None:
        """The last output of a continuation, whose request the scheduler has already finished."""
        output = member.last_output(reason, stop_reason=stop_reason, error=error, parameter=parameter)
        if member.group.pooler is not None:
            output = self._embedding(member, output)
        self.outbox.append(output)
        self.num_finished[output.finish_reason or reason] += 1
        del self.by_number[member.request.number]
        group = member.group
        group.num_unfinished -= 1
        if not group.num_unfinished:
            del self.groups[group.message.request_id]

    def _embedding(self, member: Continuation, output: RequestOutput) -> RequestOutput:
        """The vector instead of the one token that was computed with it; aborts and errors as they are."""
        pooler = member.group.pooler
        assert pooler is not None
        if output.finish_reason in (FINISH_ABORT, FINISH_ERROR):
            return msgspec.structs.replace(output, text="", token_ids=[], num_output_tokens=0)
        try:
            return pooler.output(member.request.num_cached_tokens)
        except Exception as error:
            logger.exception("request %s failed", output.request_id)
            return msgspec.structs.replace(
                output, text="", token_ids=[], num_output_tokens=0, finish_reason=FINISH_ERROR, error=str(error)
            )

    def _fail(self, member: Continuation, error: Exception) -> None:
        """An exception while the output of one request was made ends that request alone."""
        request = member.request
        logger.error("request %s failed", member.group.message.request_id, exc_info=error)
        if not request.is_finished:
            self._scheduler.finish(request.number, FINISH_ERROR, None)
        if request.number in self.by_number:
            self._end(member, FINISH_ERROR, error=f"the output could not be made: {type(error).__name__}: {error}")
