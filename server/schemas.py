"""Answers, field by field. Optional fields (UNSET) stand in an answer only if they were asked for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.messages import FINISH_STOP, RequestOutput

PromptLogprobs = list[dict[str, Any] | None]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """cached_tokens: prompt tokens whose keys and values came from the prefix cache, exactly."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """stop_reason: the stop string or stop token id that ended it; null for an end-of-sequence token. matched_stop: the
    same as SGLang tells it, with the id of the end-of-sequence token."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    matched_stop: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Also the shape of the chunks of a stream, of which the last may carry usage alone."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenScore(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenScore]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """arguments: JSON text; cut off if the answer ended for lack of room."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, kw_only=True):
    """content is null if there are calls and nothing else. Reasoning stands under both names that clients know."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    """A call's first piece has id, type and name; the others add to its arguments."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | UnsetType | None = UNSET
    matched_stop: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """max_model_len: prompt + output tokens at most; null while the model is being loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct, kw_only=True):
    prompt: str


class Status(msgspec.Struct, kw_only=True):
    """status: starting, ready, restarting, stopping, failed, or stuck."""

    status: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    error: ErrorBody


def matched_stop(last: RequestOutput) -> int | str | None:
    """What ended a continuation, given its last output: a stop string, a stop token or an end-of-sequence token."""
    if last.finish_reason != FINISH_STOP or last.stop_reason is not None:
        return last.stop_reason
    return last.token_ids[-1] if last.token_ids else None


class UsageCount:
    """Adds up what the outputs of one HTTP request say. Each prompt counts once, however many continuations."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._cached: dict[str, int] = {}
        self._outputs: dict[tuple[str, int], int] = {}

    def take(self, output: RequestOutput) -> None:
        self._outputs[output.request_id, output.index] = output.num_output_tokens
        if output.index == 0:
            self._cached[output.request_id] = output.num_cached_tokens

    def usage(self) -> Usage:
        num_output_tokens = sum(self._outputs.values())
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=self._num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )
