"""Chat templates, rendered in a sandbox. They come from the model's files and never from a client. No jax."""

from __future__ import annotations

import dataclasses
import datetime
import json
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.control_tokens import ControlTokens

# Noncharacters of Unicode: never exchanged in text, so they can mark places in it.
_GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDE0))
END_MARK = "\ufdef\ufdee\ufdef"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks an assistant's own words for training; here it prints them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One jinja2 template. Raises ValueError when the template does not compile."""

    def __init__(self, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        bos_token: str,
        eos_token: str,
        extra: dict[str, Any] | None,
    ) -> str:
        """Raises ValueError with the template's own words if it refuses the conversation."""
        values = dict(extra or {})
        values.update(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            # The template stumbled over the shape of a message, which only the client can mend.
            raise ValueError(f"messages: the model's chat template cannot print them: {error}") from None


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a client gave, ready for a template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    extra: dict[str, Any] | None


def guard_conversation(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    extra: dict[str, Any] | None,
    control: ControlTokens,
    *,
    mark_end: bool,
) -> tuple[Conversation, str]:
    """Copies in which no control token is spelled out, and the guard character that splits them.

    Lists of text parts are joined, and an absent text becomes an empty one. mark_end: END_MARK behind the last text.
    """
    prepared = [_prepare(message) for message in messages]
    if mark_end:
        if not prepared:
            raise ValueError("messages: got none; allowed: at least one to continue")
        prepared[-1]["content"] += END_MARK
    everything = repr((prepared, tools, extra))
    # repr() escapes noncharacters, so it is their escape that must not be there.
    guard = next((c for c in _GUARDS if ascii(c)[1:-1] not in everything and c not in everything), None)
    if guard is None:
        raise ValueError("messages: hold every Unicode noncharacter from U+FDD0 to U+FDDF; allowed: text")
    split = control.breaker(guard)

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return split(value)
        if isinstance(value, (list, tuple)):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {walk(key): walk(item) for key, item in value.items()}
        return value

    guarded = [walk(message) for message in prepared]
    for message in guarded:
        role = message.get("role")
        if isinstance(role, str) and control.can_come_from_role(role):
            message["role"] = role[0] + guard + role[1:]
    return Conversation(guarded, walk(tools), walk(extra)), guard


def _prepare(message: dict[str, Any]) -> dict[str, Any]:
    message = dict(message)
    content = message.get("content")
    if content is None:
        message["content"] = ""
    elif isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"messages.content: got a part of type {kind!r}; allowed: text")
        message["content"] = "".join(texts)
    elif not isinstance(content, str):
        raise ValueError(f"messages.content: got a {type(content).__name__}; allowed: a string or a list of text parts")
    if not message.get("tool_calls", True):
        del message["tool_calls"]  # an empty list means none, and templates test for its presence
    return message


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
