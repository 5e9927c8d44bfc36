"""The text around messages, by a model's chat template. No jax.

A template prints whole conversations; a program opens and closes one message after another. The text between two
messages is found by rendering a conversation whose contents are marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Render = Callable[[list[dict[str, Any]], bool], str]  # messages, add_generation_prompt -> text


class ChatFormat:
    """What the template puts before and after a message, given the roles of all messages so far."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, ...], tuple[str, str]] = {}

    def open(self, roles: tuple[str, ...]) -> str:
        """Text before the content of the last of these messages, behind close() of the one before."""
        return self._around(roles)[0]

    def close(self, roles: tuple[str, ...]) -> str:
        """Text behind the content of the last of these messages."""
        return self._around(roles)[1]

    def _around(self, roles: tuple[str, ...]) -> tuple[str, str]:
        """Raises ValueError, in the template's own words, for roles that it refuses."""
        if roles not in self._known:
            self._known[roles] = self._find(roles)
        return self._known[roles]

    def _find(self, roles: tuple[str, ...]) -> tuple[str, str]:
        last = len(roles) - 1
        before = "" if last == 0 else self._around(roles[:-1])[1]
        text = self._conversation(roles)
        if _mark(last) not in text:
            # Some templates print a system message only together with the message that follows it.
            text = self._conversation((*roles, "user"))
            if _mark(last) not in text:
                raise ValueError(f"role: the model's chat template does not print {roles[last]!r} messages")
            return self._gap(text, last, before), ""
        closing = text.split(_mark(last), 1)[1]
        if roles[last] == "assistant":
            opened = self._render(_messages(roles[:-1]), True)
            start = opened if last == 0 else opened.split(_mark(last - 1), 1)[-1]
            if start.startswith(before):
                return start[len(before) :], closing
        return self._gap(text, last, before), closing

    def _gap(self, text: str, last: int, before: str) -> str:
        """What stands between the content of message last - 1, closed by `before`, and that of the last."""
        start = text if last == 0 else text.split(_mark(last - 1), 1)[-1]
        return start.split(_mark(last), 1)[0].removeprefix(before)

    def _conversation(self, roles: tuple[str, ...]) -> str:
        return self._render(_messages(roles), False)


def _messages(roles: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"role": role, "content": _mark(index)} for index, role in enumerate(roles)]


def _mark(index: int) -> str:
    return f"[[message {index}]]"
