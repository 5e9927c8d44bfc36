"""Reads one tool call written as a JSON object, and gives its arguments on as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from jaxserve.server.answer_parts import CallArguments, CallStart, Part

_SPACE = " \t\r\n"


class Malformed(ValueError):
    """The text is no tool call. It is content then."""


class JsonCall:
    """{"name": NAME, "arguments": {...}}, keys in any order. Reads character by character: arguments are given on as
    soon as the name is known, exactly as they were written.

    name    if the call's name stands before the object, which is then the arguments alone
    new_id  makes the call's id
    names   functions there are; a call of another one is no call. None: any
    """

    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],
        *,
        name: str | None = None,
        names: Collection[str] | None = None,
        argument_keys: Sequence[str] = ("arguments", "parameters"),
    ) -> None:
        if name is not None and names is not None and name not in names:
            raise Malformed(f"a call of {name[:40]!r}, which there is not")
        self._names = names
        self.index = index
        self.name = name
        self.is_done = False
        self._new_id = new_id
        self._keys = argument_keys
        self._whole = name is not None  # the object is the arguments
        self._depth = 0
        self._in_string = self._escaped = False
        self._key = ""
        self._token: list[str] = []  # the key, or the value that is being read
        self._reads_value = False
        self._arguments: list[str] = []  # not given on yet
        self._has_arguments = self._whole
        self._was_started = False

    def feed(self, text: str) -> tuple[list[Part], str]:
        """(parts, what is left of `text` behind the object). Raises Malformed."""
        used = len(text)
        for place, char in enumerate(text):
            self._take(char)
            if self.is_done:
                used = place + 1
                break
        if self.is_done and self.name is None:
            raise Malformed("a tool call without a name")
        return self._flush(), text[used:]

    def _flush(self) -> list[Part]:
        parts: list[Part] = []
        if self.name is None:
            return parts
        if not self._was_started:
            self._was_started = True
            parts.append(CallStart(self.index, self._new_id(), self.name))
        if self.is_done and not self._has_arguments:
            self._arguments.append("{}")
            self._has_arguments = True
        if self._arguments:
            parts.append(CallArguments(self.index, "".join(self._arguments)))
            self._arguments.clear()
        return parts

    def _take(self, char: str) -> None:
        if self._depth == 0:
            if char in _SPACE:
                return
            if char != "{":
                raise Malformed(f"a tool call that starts with {char!r}")
            self._depth = 1
            if self._whole:
                self._arguments.append(char)
            return
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return
        if char == '"':
            self._in_string = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            self._keep(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and not self._whole and char in ":,":
            self._separate(char)
        else:
            self._keep(char)

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            if char != "}":
                raise Malformed("a tool call whose brackets do not match")
            if self._whole:
                self._arguments.append(char)
            else:
                self._end_value()
            self.is_done = True
        else:
            self._keep(char)

    def _separate(self, char: str) -> None:
        if char == ":" and not self._reads_value:
            self._key = self._string("".join(self._token))
            self._token.clear()
            if self._key in self._keys and self._has_arguments:
                raise Malformed("a tool call with arguments twice")
            self._reads_value = True
        elif char == "," and self._reads_value:
            self._end_value()
        else:
            raise Malformed(f"a tool call with {char!r} out of place")

    def _keep(self, char: str) -> None:
        if self._whole:
            self._arguments.append(char)
            return
        if self._depth == 1 and char in _SPACE and not self._in_string:
            return
        # An object is given on as it comes; a string of JSON has to be decoded first.
        if self._reads_value and self._key in self._keys and (self._has_arguments or (char == "{" and not self._token)):
            self._has_arguments = True
            self._arguments.append(char)
        else:
            self._token.append(char)

    def _end_value(self) -> None:
        text = "".join(self._token)
        self._token.clear()
        if self._reads_value:
            if self._key == "name":
                name = self._string(text)
                if self._names is not None and name not in self._names:
                    raise Malformed(f"a call of {name[:40]!r}, which there is not")
                self.name = name
            elif self._key in self._keys and not self._has_arguments:
                self._has_arguments = True
                value = _loads(text)
                self._arguments.append(value if isinstance(value, str) else "{}" if value is None else text)
        elif text:
            raise Malformed("a tool call with a key but no value")
        self._reads_value = False

    @staticmethod
    def _string(text: str) -> str:
        value = _loads(text)
        if not isinstance(value, str):
            raise Malformed(f"got {text[:40]!r} where a string belongs")
        return value


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed(f"got {text[:40]!r}, which is no JSON") from None
