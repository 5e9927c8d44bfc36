"""Tools and the choice among them, as requests give them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_TOOLS = 128

FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """parameters: a JSON schema of the arguments, an object. strict: always taken as true where the schema can be
    kept to."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
