"""Output items of a response, built piece by piece, and the events that tell a stream of them.

The order of events is the one that the openai package replays: created, in_progress, then for each item added, its
parts' added, delta … done, and item done; completed (or incomplete, failed) comes last. A whole answer goes through
the same builder as one large piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from jaxserve.server.chat import ChatChunks
from jaxserve.server.errors import ApiError
from jaxserve.server.response_types import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from jaxserve.server.schemas import TokenScore, Usage
from jaxserve.server.turns import CallView, ChoiceView, ChunkView, read_chunks

from jaxserve.messages import FINISH_LENGTH, RequestOutput

Event = tuple[str, dict[str, Any]]  # type, further fields
NewId = Callable[[str], str]

_encode = msgspec.json.encode


class OutputItems:
    """Items so far; each method yields the events of what it added."""

    def __init__(self, new_id: NewId) -> None:
        self.items: list[OutputItem] = []
        self._new_id = new_id
        self._texts: list[str] = []  # of the open item
        self._scores: list[TokenScore] = []
        self._open_call: int | None = None

    def take(self, choice: ChoiceView) -> Iterator[Event]:
        delta = choice.delta
        if delta.thought:
            yield from self._write(ReasoningItem, "rs", delta.thought, [])
        scores = choice.logprobs.content if choice.logprobs is not None else []
        if delta.content:
            yield from self._write(MessageItem, "msg", delta.content, scores)
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """End the open item. A response without any output gets an empty message."""
        if not self.items:
            yield from self._start(MessageItem, "msg")
        yield from self._close(status)

    def _write(self, kind: type[Any], prefix: str, text: str, scores: list[TokenScore]) -> Iterator[Event]:
        if not self._texts or not isinstance(self.items[-1], kind):
            yield from self._start(kind, prefix)
        self._texts.append(text)
        fields: dict[str, Any] = {**self._place(), "content_index": 0, "delta": text}
        if kind is MessageItem:
            self._scores += scores
            yield "response.output_text.delta", {**fields, "logprobs": scores}
        else:
            yield "response.reasoning_text.delta", fields

    def _start(self, kind: type[Any], prefix: str) -> Iterator[Event]:
        yield from self._close("completed")
        item = kind(id=self._new_id(prefix), status="in_progress", content=[])
        self.items.append(item)
        self._texts = [""]
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}
        part = OutputText(text="") if kind is MessageItem else ReasoningText(text="")
        yield "response.content_part.added", {**self._place(), "content_index": 0, "part": part}

    def _call(self, call: CallView) -> Iterator[Event]:
        function = call.function
        if self._open_call != call.index:
            yield from self._close("completed")
            name = (function.name if function is not None else None) or ""
            item = FunctionCallItem(
                id=self._new_id("fc"), status="in_progress", call_id=call.id or self._new_id("call"), name=name,
                arguments="",
            )  # fmt: skip
            self.items.append(item)
            self._open_call = call.index
            yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}
        if function is not None and function.arguments:
            self._texts.append(function.arguments)
            yield "response.function_call_arguments.delta", {**self._place(), "delta": function.arguments}

    def _close(self, status: str) -> Iterator[Event]:
        text, self._texts = "".join(self._texts), []
        scores, self._scores = self._scores, []
        item = self.items[-1] if self.items else None
        if item is None or item.status != "in_progress":
            return
        place = self._place()
        if isinstance(item, FunctionCallItem):
            self._open_call = None
            item.arguments = text
            yield "response.function_call_arguments.done", {**place, "name": item.name, "arguments": text}
        elif isinstance(item, MessageItem):
            part = OutputText(text=text, logprobs=scores)
            item.content = [part]
            fields = {**place, "content_index": 0}
            yield "response.output_text.done", {**fields, "text": text, "logprobs": scores}
            yield "response.content_part.done", {**fields, "part": part}
        else:
            thought = ReasoningText(text=text)
            item.content = [thought]
            fields = {**place, "content_index": 0}
            yield "response.reasoning_text.done", {**fields, "text": text}
            yield "response.content_part.done", {**fields, "part": thought}
        item.status = status
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


class ResponseBuilder:
    """One response from the pieces of its chat answer. `base` is the response before any output."""

    def __init__(self, base: ResponseObject, new_id: NewId) -> None:
        self.response = base
        self.output = OutputItems(new_id)
        self._finish: str | None = None

    def take(self, chunk: ChunkView) -> Iterator[Event]:
        for choice in chunk.choices:
            yield from self.output.take(choice)
            self._finish = choice.finish_reason or self._finish
        if chunk.usage is not None:
            self.response.usage = usage_of(chunk.usage)

    def finish(self) -> Iterator[Event]:
        """The last events of the items; the response is then complete."""
        is_cut = self._finish == FINISH_LENGTH
        yield from self.output.finish("incomplete" if is_cut else "completed")
        response = self.response
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = IncompleteDetails(reason="max_output_tokens") if is_cut else None
        response.completed_at = None if is_cut else int(time.time())
        response.output = self.output.items

    def fail(self, error: ApiError) -> None:
        for _ in self.output.finish("incomplete") if self.output.items else ():
            pass
        self.response.status = "failed"
        self.response.output = self.output.items
        self.response.error = ResponseError(code=error.code or "server_error", message=error.message)


class ResponseEvents:
    """Writes the stream of one response. on_end(response) is called when it is complete."""

    def __init__(self, builder: ResponseBuilder, chunks: ChatChunks, on_end: Callable[[ResponseObject], None]) -> None:
        self._builder = builder
        self._chunks = chunks
        self._on_end = on_end
        self._number = 0
        self._has_begun = False

    def write(self, outputs: list[RequestOutput]) -> bytes:
        return self._begin() + self._take(self._chunks.write(outputs))

    def end(self) -> bytes:
        data = self._take(self._chunks.end())
        builder = self._builder
        data += b"".join([self._event(*event) for event in builder.finish()])
        self._on_end(builder.response)
        kind = "response.incomplete" if builder.response.status == "incomplete" else "response.completed"
        return data + self._event(kind, {"response": builder.response})

    def fail(self, error: ApiError) -> bytes:
        data = self._begin()
        self._builder.fail(error)
        return data + self._event("response.failed", {"response": self._builder.response})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._builder.response
        return b"".join(
            [self._event(kind, {"response": response}) for kind in ("response.created", "response.in_progress")]
        )

    def _take(self, events: bytes) -> bytes:
        found = [event for chunk in read_chunks(events) for event in self._builder.take(chunk)]
        return b"".join([self._event(*event) for event in found])

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def usage_of(usage: Usage) -> ResponseUsage:
    details = getattr(usage, "completion_tokens_details", None)
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=getattr(details, "reasoning_tokens", None) or 0),
        total_tokens=usage.total_tokens,
    )
