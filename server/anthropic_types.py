"""Types of /v1/messages in Anthropic's spelling. The rules are those of protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from jaxserve.server.protocol import Nothing, Priority, Salt
from msgspec import UNSET, Meta, UnsetType

Ignored = dict[str, Any]  # cache_control: every prefix is cached here


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One content block. text: text; tool_use: id, name, input; tool_result: tool_use_id, content, is_error;
    thinking: thinking (its signature is not checked)."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    citations: Nothing | None = None
    caller: dict[str, Any] | None = None
    cache_control: Ignored | None = None


class Turn(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class SystemBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str
    citations: Nothing | None = None
    cache_control: Ignored | None = None


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Ignored | None = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: str | None = None


class MessagesMetadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[SystemBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: Ignored | None = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages.

    thinking     enabled: the model may reason first, within budget_tokens; disabled: it must not
    metadata, service_tier and every cache_control change no answer
    """

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBlock(msgspec.Struct, tag="text", kw_only=True):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(msgspec.Struct, kw_only=True):
    """input_tokens are those that had to be computed; the cached ones stand in cache_read_input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; the other fields depend on its type."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | ThinkingBlock | ToolUseBlock | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET


class MessageErrorBody(msgspec.Struct, kw_only=True):
    type: str
    message: str


class MessageErrorAnswer(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: MessageErrorBody


class CountedTokens(msgspec.Struct, kw_only=True):
    input_tokens: int
