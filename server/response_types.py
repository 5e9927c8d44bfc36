"""Types of /v1/responses: requests, and the response object with its output items.

Requests follow the rules of protocol.py: a field stands here if it is honoured or changes no answer by definition.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from jaxserve.server.protocol import (
    BadWords,
    ClientId,
    Count,
    Nothing,
    NumLogprobs,
    Penalty,
    Priority,
    Salt,
    TokenId,
)
from jaxserve.server.schemas import TokenScore
from msgspec import UNSET, Meta, UnsetType

MAX_INPUT_ITEMS = 10_000
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
ResponseId = Annotated[str, Meta(min_length=1, max_length=160)]


class InputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of text, as clients send it or as an earlier answer brought it."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Nothing | None = None
    logprobs: list[Any] | None = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One item of `input`. type message (the default): role and content; function_call: call_id, name, arguments;
    function_call_output: call_id and output; reasoning: what the model thought before, content or summary."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormatParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the text must be; name, schema, strict and description belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class TextParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormatParam | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses.

    input                  a text, or items of a conversation
    instructions           a system message that does not go on to later responses
    previous_response_id   a stored response whose conversation is continued
    max_output_tokens      default: up to the context limit
    store                  keep the response for later requests (default true); the oldest go when there are too many
    background             answer at once, generate afterwards; GET tells how far it is. Not with stream
    truncation             disabled, or auto: earlier items are dropped until the conversation fits
    include                message.output_text.logprobs: scores of the tokens, top_logprobs of the best

    user, safety_identifier, prompt_cache_key, prompt_cache_retention, service_tier and max_tool_calls (of tools that
    run on the server: there are none) change no answer. The fields after stop_token_ids are those of chats.
    """

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_INPUT_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    text: TextParam | None = None
    reasoning: ReasoningParam | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: NumLogprobs | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: ClientId | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(msgspec.Struct, tag="output_text", kw_only=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenScore] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text", kw_only=True):
    text: str


class MessageItem(msgspec.Struct, tag="message", kw_only=True):
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag="reasoning", kw_only=True):
    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, tag="function_call", kw_only=True):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """status: queued, in_progress, completed, incomplete, failed, or cancelled."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; the other fields depend on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenScore] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    """What a stored response was asked, oldest first unless asked otherwise."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
