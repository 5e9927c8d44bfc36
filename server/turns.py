"""A chat answer without its dialect: what /v1/responses and /v1/messages are made from.

Both translate their request into a ChatCompletionRequest and its answer back, so that parsing, tools, reasoning and
limits are written once. Of a stream they read the chunks that a chat client would get: one decode per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from jaxserve.server.errors import ApiError, from_validation
from jaxserve.server.protocol import HINTS, ChatCompletionRequest
from jaxserve.server.schemas import ChatCompletion, ChatLogprobs, Usage


class FunctionView(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallView(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: FunctionView | None = None


class DeltaView(msgspec.Struct):
    """New text, reasoning (under either name) and calls; of a whole answer all of them."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallView] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class ChoiceView(msgspec.Struct):
    delta: DeltaView = msgspec.field(default_factory=DeltaView)
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChunkView(msgspec.Struct):
    choices: list[ChoiceView] = []
    usage: Usage | None = None


_decode = msgspec.json.Decoder(ChunkView).decode


def read_chunks(events: bytes) -> Iterator[ChunkView]:
    """The chunks in a piece of a chat stream."""
    for event in events.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield _decode(data)


def view_of(answer: ChatCompletion) -> ChunkView:
    """A whole answer as one chunk."""
    choice = msgspec.to_builtins(answer.choices[0])
    message = choice.pop("message")
    calls = message.get("tool_calls") or []
    for index, call in enumerate(calls):
        call["index"] = index
    usage = msgspec.to_builtins(answer.usage)
    return msgspec.convert({"choices": [{**choice, "delta": message}], "usage": usage}, ChunkView)


def chat_request(fields: dict[str, Any], names: Callable[[str], str]) -> ChatCompletionRequest:
    """A translated request as a chat request, leaving out what is None.

    names: path of a chat field -> the field it came from, for error messages. Raises ApiError 400.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(given, ChatCompletionRequest, strict=True)
    except msgspec.ValidationError as error:
        raise renamed(from_validation(error, given, HINTS, ChatCompletionRequest), names) from None


def renamed(error: ApiError, names: Callable[[str], str]) -> ApiError:
    """The same error in the client's own terms."""
    param = error.param
    if param is None:
        return error
    name = names(param)
    text = error.message
    if text.startswith(param):
        text = name + text[len(param) :]
    return ApiError(error.status, text, param=name, code=error.code, kind=error.kind, retry_after=error.retry_after)
