"""/v1/messages: Anthropic's dialect, translated into a chat and back."""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec
from jaxserve.server.anthropic_types import (
    Block,
    CountedTokens,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from jaxserve.server.chat import ChatChunks, chat_completion, chat_job
from jaxserve.server.errors import ApiError, error_type
from jaxserve.server.generation import Job, Server, answer
from jaxserve.server.protocol import ChatCompletionRequest
from jaxserve.server.schemas import Usage
from jaxserve.server.turns import ChoiceView, chat_request, read_chunks, renamed, view_of
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.messages import RequestOutput

_encode = msgspec.json.encode
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ChatMessage = dict[str, Any]


async def create_message(server: Server, http: Request, request: MessagesRequest) -> Response:
    """POST /v1/messages. Raises ApiError."""
    chat, job = await _prepare(server, http, request)
    return await answer(
        server,
        http,
        chat,
        job,
        make_writer=lambda job, prompt_of: MessageEvents(job, ChatChunks(chat, job)),
        make_answer=lambda job, prompt_of, outputs: _whole(chat, job, outputs),
    )


async def count_tokens(server: Server, http: Request, request: CountTokensRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    _, job = await _prepare(server, http, request)
    return Response(_encode(CountedTokens(input_tokens=job.num_prompt_tokens)), media_type="application/json")


async def _prepare(server: Server, http: Request, request: CountTokensRequest) -> tuple[ChatCompletionRequest, Job]:
    chat = _translate(request)
    try:
        return chat, await chat_job(server, http, chat, id_prefix="msg_")
    except ApiError as error:
        raise renamed(error, _name_of) from None


def _name_of(param: str) -> str:
    return _NAMES.get(param, param)


def _translate(request: CountTokensRequest) -> ChatCompletionRequest:
    messages: list[_ChatMessage] = []
    if request.system:
        texts = [request.system] if isinstance(request.system, str) else [part.text for part in request.system]
        messages.append({"role": "system", "content": "\n".join(texts)})
    for place, turn in enumerate(request.messages):
        messages += _turn(turn.role, turn.content, f"messages[{place}]")
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.messages[-1].role == "assistant":
        fields["continue_final_message"] = True  # the answer goes on where the last turn ends
    if request.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in request.tools
        ]
    _choose_tools(request, fields)
    if request.thinking is not None:
        if request.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif request.thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = request.thinking.budget_tokens
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "stream": request.stream,
            "stream_options": {"include_usage": True} if request.stream else None,
        }
        for name in ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "chat_template_kwargs"):
            fields[name] = getattr(request, name)
    return chat_request(fields, _name_of)


def _choose_tools(request: CountTokensRequest, fields: dict[str, Any]) -> None:
    choice = request.tool_choice
    if choice is None:
        return
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: missing; it is required", param="tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use


def _turn(role: str, content: str | list[Block], name: str) -> list[_ChatMessage]:
    """One turn as chat messages: results of tools stand before the text of their turn."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    results: list[_ChatMessage] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for place, block in enumerate(content):
        where = f"{name}.content[{place}]"
        match block.type, role:
            case "text", _:
                texts.append(_required(block.text, f"{where}.text"))
            case "thinking", "assistant":
                thoughts.append(_required(block.thinking, f"{where}.thinking"))
            case "tool_use", "assistant":
                function = {"name": _required(block.name, f"{where}.name"), "arguments": json.dumps(block.input or {})}
                call_id = _required(block.id, f"{where}.id")
                calls.append({"id": call_id, "type": "function", "function": function})
            case "tool_result", "user":
                call_id = _required(block.tool_use_id, f"{where}.tool_use_id")
                results.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, where)})
            case _:
                raise ApiError(
                    400, f"{where}.type: {block.type!r} is not allowed in a turn of the {role}", param=f"{where}.type"
                )
    message: _ChatMessage = {"role": role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if results and not texts:
        return results
    return [*results, message]


def _result(block: Block, where: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = []
    for place, part in enumerate(block.content):
        if part.type != "text":
            param = f"{where}.content[{place}].type"
            raise ApiError(400, f"{param}: got {part.type!r}; allowed: 'text'", param=param)
        texts.append(_required(part.text, f"{where}.content[{place}].text"))
    return "\n".join(texts)


def _required(value: str | None, name: str) -> str:
    if value is None:
        raise ApiError(400, f"{name}: missing; it is required", param=name, code="missing_required_parameter")
    return value


def _stop(choice: ChoiceView) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _whole(chat: ChatCompletionRequest, job: Job, outputs: list[RequestOutput]) -> MessageAnswer:
    chunk = view_of(chat_completion(chat, job, outputs))
    choice = chunk.choices[0]
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if choice.delta.thought:
        content.append(ThinkingBlock(thinking=choice.delta.thought))
    if choice.delta.content or not choice.delta.tool_calls:
        content.append(TextBlock(text=choice.delta.content or ""))
    for call in choice.delta.tool_calls or ():
        assert call.function is not None
        content.append(
            ToolUseBlock(
                id=call.id or _tool_id(), name=call.function.name or "", input=_arguments(call.function.arguments)
            )
        )
    assert chunk.usage is not None
    reason, sequence = _stop(choice)
    return MessageAnswer(
        id=job.response_id, model=job.model_name, content=content, stop_reason=reason,  # type: ignore[arg-type]
        stop_sequence=sequence, usage=_usage(chunk.usage),
    )  # fmt: skip


def _arguments(text: str | None) -> dict[str, Any]:
    """The input of a call; one that max_tokens cut off is no JSON and comes as it stands under "partial"."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"partial": text}


def _tool_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


class MessageEvents:
    """Writes a stream: message_start, blocks one after another, message_delta, message_stop."""

    def __init__(self, job: Job, chunks: ChatChunks) -> None:
        self._job = job
        self._chunks = chunks
        self._has_begun = False
        self._index = -1
        self._kind: str | None = None  # of the open block; a call's with its index
        self._last = ChoiceView()
        self._usage: MessagesUsage | None = None

    def write(self, outputs: list[RequestOutput]) -> bytes:
        cached = outputs[0].num_cached_tokens if outputs else 0
        return self._begin(cached) + self._take(self._chunks.write(outputs))

    def end(self) -> bytes:
        data = self._take(self._chunks.end())
        if self._index < 0:
            data += self._open("text", TextBlock(text=""))
        data += self._close()
        reason, sequence = _stop(self._last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        data += _event("message_delta", {"delta": delta, "usage": self._usage})
        return data + _event("message_stop", {})

    def fail(self, error: ApiError) -> bytes:
        return _event("error", {"error": {"type": error_type(error.status), "message": error.message}})

    def _begin(self, num_cached: int) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = MessagesUsage(
            input_tokens=self._job.num_prompt_tokens - num_cached, cache_read_input_tokens=num_cached, output_tokens=0
        )
        message = MessageAnswer(
            id=self._job.response_id, model=self._job.model_name, content=[], stop_reason=None, stop_sequence=None,
            usage=usage,
        )  # fmt: skip
        return _event("message_start", {"message": message})

    def _take(self, events: bytes) -> bytes:
        parts = []
        for chunk in read_chunks(events):
            if chunk.usage is not None:
                self._usage = _usage(chunk.usage)
            parts += [self._choice(choice) for choice in chunk.choices]
        return b"".join(parts)

    def _choice(self, choice: ChoiceView) -> bytes:
        delta = choice.delta
        if choice.finish_reason is not None:
            self._last = choice
        data = b""
        if delta.thought:
            data += self._delta("thinking", ThinkingBlock(thinking=""), "thinking_delta", "thinking", delta.thought)
        if delta.content:
            data += self._delta("text", TextBlock(text=""), "text_delta", "text", delta.content)
        for call in delta.tool_calls or ():
            function = call.function
            name = (function.name if function is not None else None) or ""
            kind = f"call {call.index}"
            if kind != self._kind:
                data += self._open(kind, ToolUseBlock(id=call.id or _tool_id(), name=name, input={}))
            if function is not None and function.arguments:
                data += self._delta(kind, None, "input_json_delta", "partial_json", function.arguments)
        return data

    def _delta(self, kind: str, block: Any, type_: str, field: str, text: str) -> bytes:
        data = self._open(kind, block) if kind != self._kind else b""
        return data + _event("content_block_delta", {"index": self._index, "delta": {"type": type_, field: text}})

    def _open(self, kind: str, block: Any) -> bytes:
        data = self._close()
        self._index += 1
        self._kind = kind
        return data + _event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        data = b""
        if self._kind == "thinking":
            # The package joins a signature to every thinking block; there is nothing to sign here.
            delta = {"type": "signature_delta", "signature": ""}
            data = _event("content_block_delta", {"index": self._index, "delta": delta})
        self._kind = None
        return data + _event("content_block_stop", {"index": self._index})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
