"""The parts of an answer: reasoning, content and tool calls, read from the text as it comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """Tool call `index` (0, 1, ...) begins; its arguments follow as CallArguments."""

    index: int
    call_id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


class PartParser(Protocol):
    """Reads one continuation. What feed() and finish() return, joined, does not depend on how the text was cut."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The text has ended: everything that was held back."""
        ...


@dataclasses.dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class WholeAnswer:
    """All parts of an answer. content is None if there was none; an answer without calls has at least ""."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> WholeAnswer:
        for part in parts:
            match part:
                case Reasoning(text):
                    self.reasoning = (self.reasoning or "") + text
                case Content(text):
                    self.content = (self.content or "") + text
                case CallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
        return self


def read_answer(parser: PartParser, text: str) -> WholeAnswer:
    """The parts of a whole text."""
    return WholeAnswer().add([*parser.feed(text), *parser.finish()])


def held_length(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that a marker could begin with."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


class Chain:
    """Reasoning first, tool calls in what follows it."""

    def __init__(self, first: PartParser, second: PartParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Part]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Part]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        result: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                result += self._second.feed(part.text)
            else:
                result.append(part)
        return result


class PlainText:
    """Content alone."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class DropTokens:
    """Leaves the spellings of control tokens out that no later parser reads; `inner` gets the rest."""

    def __init__(self, names: Iterable[str], inner: PartParser) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self._inner = inner
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        text = self._held + text
        for name in self._names:
            text = text.replace(name, "")
        held = held_length(text, self._names)
        self._held = text[len(text) - held :]
        return self._inner.feed(text[: len(text) - held])

    def finish(self) -> list[Part]:
        text, self._held = self._held, ""
        return self._inner.feed(text) + self._inner.finish()
