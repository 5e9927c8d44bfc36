"""Parsers of tool calls that are not written in JSON: Python's call syntax, and Gemma's.

Their arguments are turned into JSON, so each call is given on when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from jaxserve.server.answer_parts import CallArguments, CallStart, Content, Part, held_length
from jaxserve.server.tools.json_call import Malformed
from jaxserve.server.tools.marked_calls import NewId

_JSON_WORDS = {"true": True, "false": False, "null": None}
Call = tuple[str, dict[str, Any]]


def read_python_calls(text: str) -> list[Call]:
    """`[f(a=1), g(b="x")]` or `f(a=1)`, values being literals of Python or JSON. Raises Malformed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Malformed("no Python expression") from None
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    return [_python_call(node) for node in nodes]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed("no call with named arguments")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise Malformed("no call of a function by its name")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Malformed("an argument without a name")
        arguments[keyword.arg] = _literal(keyword.value)
    return name, arguments


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | int | float | bool):
            return value
        case ast.Name(word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values) if key is not None}
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case _:
            raise Malformed("an argument that is no literal")


_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)


def read_gemma_call(text: str, quote: str) -> list[Call]:
    """`call:NAME{key:value,...}`, strings between two `quote`s. Raises Malformed."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise Malformed("no call")
    value, end = _gemma_value(match.group(2), 0, quote)
    if end != len(match.group(2)) or not isinstance(value, dict):
        raise Malformed("no arguments")
    return [(match.group(1), value)]


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """(value, index behind it)."""
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise Malformed("a string without an end")
        return text[at + len(quote) : end], end + len(quote)
    if text[at : at + 1] in ("{", "["):
        return _gemma_items(text, at, quote)
    match = re.compile(r"[^,\]}]*").match(text, at)
    assert match is not None
    word = match.group().strip()
    try:
        return json.loads(word), match.end()
    except ValueError:
        return word, match.end()


def _gemma_items(text: str, at: int, quote: str) -> tuple[Any, int]:
    is_dict = text[at] == "{"
    close, at = ("}" if is_dict else "]"), at + 1
    items: list[tuple[str, Any]] = []
    while True:
        if text.startswith(close, at):
            break
        key = ""
        if is_dict:
            end = text.find(":", at)
            if end < 0:
                raise Malformed("a key without a value")
            key, at = text[at:end].strip().replace(quote, ""), end + 1
        value, at = _gemma_value(text, at, quote)
        items.append((key, value))
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(close, at):
            raise Malformed("something between two values")
    return (dict(items) if is_dict else [value for _, value in items]), at + 1


class WholeCalls:
    """Content, and regions from `start` to `end` that hold calls.

    read    what is in a region -> calls; raises Malformed
    whole   a region is the whole answer, white space aside: `start` inside other text is content
    """

    def __init__(
        self,
        new_id: NewId,
        read: Any,
        *,
        start: str,
        end: str,
        names: Collection[str] | None = None,
        whole: bool = False,
        keeps_marks: bool = False,
    ) -> None:
        self._new_id, self._read = new_id, read
        self._start, self._end = start, end
        self._names = names
        self._whole = whole
        self._keeps_marks = keeps_marks  # start and end belong to what is read
        self._text = ""
        self._space = ""
        self._is_content = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._text += text
        return self._run(is_end=False)

    def finish(self) -> list[Part]:
        parts = self._run(is_end=True)
        rest = (self._space if not self.num_calls else "") + self._text
        self._text = self._space = ""
        return parts + ([Content(rest)] if rest else [])

    def _run(self, *, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text and not self._is_content:
            at = self._text.find(self._start)
            if self._whole and at != len(self._text) - len(self._text.lstrip()):
                seen = self._text.lstrip()
                if (not seen or self._start.startswith(seen)) and not is_end:
                    return parts
                self._is_content = True
                break
            if at < 0:
                size = len(self._text) - held_length(self._text, (self._start,))
                parts += self._content(self._text[:size])
                self._text = self._text[size:]
                return parts
            found = self._calls(at, is_end=is_end)
            if found is None:
                return parts
            before, calls, self._text = found
            parts += self._content(before) + calls
        if self._is_content:
            text, self._text = self._text, ""
            parts += self._content(text)
        return parts

    def _calls(self, at: int, *, is_end: bool) -> tuple[str, list[Part], str] | None:
        """(content before, calls, text behind) of the region that starts at `at`; None: it is not complete.

        The mark that ends a region may also stand inside a string of it: the first end with which it can be read
        counts.
        """
        inside = at + len(self._start)
        end = self._text.find(self._end, inside)
        while end >= 0:
            behind = end + len(self._end)
            body = self._text[at:behind] if self._keeps_marks else self._text[inside:end]
            try:
                return self._text[:at], self._parts(self._read(body)), self._text[behind:]
            except Malformed:
                end = self._text.find(self._end, behind)
        if not is_end:
            return None
        return self._text[:inside], [], self._text[inside:]

    def _parts(self, calls: list[Call]) -> list[Part]:
        if not calls or (self._names is not None and not all(name in self._names for name, _ in calls)):
            raise Malformed("a call of a function that there is not")
        parts: list[Part] = []
        for name, arguments in calls:
            parts.append(CallStart(self.num_calls, self._new_id(), name))
            parts.append(CallArguments(self.num_calls, json.dumps(arguments, ensure_ascii=False)))
            self.num_calls += 1
        self._space = ""
        return parts

    def _content(self, text: str) -> list[Part]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Content(kept)] if kept else []
