"""Parsers of tool calls that stand between markers, with JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from jaxserve.server.answer_parts import Content, Part, held_length
from jaxserve.server.tools.json_call import JsonCall, Malformed

NewId = Callable[[], str]


class MarkedCalls:
    """Content, and calls each of which begins with `start` and ends with `end`.

    start       markers that begin a call, or a list of them
    header      pattern of what stands between `start` and the call's JSON object, its group the name; None: the name
                is inside the object
    ends        what may stand behind a call's object, skipped like white space
    in_list     calls stand in [...] behind one `start`, with commas between them
    names       functions there are, see JsonCall
    continues   behind a call and `ends` the next call comes without `start`, as long as it begins so
    """

    def __init__(
        self,
        new_id: NewId,
        *,
        start: tuple[str, ...],
        header: str | None = None,
        ends: tuple[str, ...] = (),
        in_list: bool = False,
        continues: str | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self._names = names
        self._new_id = new_id
        self._start = start
        self._header = None if header is None else re.compile(header, re.DOTALL)
        self._ends = ends
        self._in_list = in_list
        self._continues = continues
        self._text = ""  # not looked at yet
        self._raw = ""  # of the call that is being read, in case it turns out to be none
        self._call: JsonCall | None = None
        self._state = self._outside
        self._space = ""  # white space that is content unless a call follows
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        self._text += text
        return self._run()

    def finish(self) -> list[Part]:
        parts = self._run()
        rest = ""
        if self._state != self._behind and not (self._call is not None and self._call.name is not None):
            rest = self._raw + self._text
        if not self.num_calls:
            rest = self._space + rest
        self._text = self._raw = self._space = ""
        return parts + ([Content(rest)] if rest else [])

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        while self._text:
            before = len(self._text), self._state
            try:
                parts += self._state()
            except Malformed:
                parts += self._give_up()
            if (len(self._text), self._state) == before:
                break
        return parts

    def _content(self, text: str) -> list[Part]:
        """Content, whose white space at the end waits for what comes."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            return [Content(kept)]
        return []

    def _outside(self) -> list[Part]:
        found = [(self._text.find(marker), marker) for marker in self._start if marker in self._text]
        if not found:
            size = len(self._text) - held_length(self._text, self._start)
            text, self._text = self._text[:size], self._text[size:]
            return self._content(text) if text else []
        at, marker = min(found)
        parts = self._content(self._text[:at])
        self._text = self._text[at + len(marker) :]
        self._raw = marker
        self._state = self._open_list if self._in_list else self._begin
        return parts

    def _open_list(self) -> list[Part]:
        text = self._text.lstrip()
        if text:
            if text[0] != "[":
                raise Malformed("no list of calls")
            self._raw += self._text[: len(self._text) - len(text) + 1]
            self._text = text[1:]
            self._state = self._begin
        return []

    def _begin(self) -> list[Part]:
        name = None
        if self._header is not None:
            match = self._header.match(self._text)
            if match is None:
                if len(self._text) > 512 or "{" in self._text:
                    raise Malformed("no name before the arguments")
                return []
            name = match.group(1).strip()
            self._raw += match.group()
            self._text = self._text[match.end() :]
        self._call = JsonCall(self.num_calls, self._new_id, name=name, names=self._names)
        self._state = self._inside
        return []

    def _inside(self) -> list[Part]:
        call = self._call
        assert call is not None
        before = self._text
        self._text = ""
        self._raw += before
        try:
            parts, self._text = call.feed(before)
        except Malformed:
            if call.name is not None:
                # Part of it is with the client already: the call ends where it stopped making sense.
                self._count()
                return []
            raise
        if call.is_done:
            self._count()
        return parts

    def _count(self) -> None:
        self.num_calls += 1
        self._call = None
        self._raw = ""
        self._space = ""
        self._state = self._behind

    def _behind(self) -> list[Part]:
        """Skip what ends a call."""
        text = self._text.lstrip()
        for end in self._ends:
            if text.startswith(end):
                self._text = text[len(end) :]
                return []
        if not text or any(end.startswith(text) for end in self._ends):
            self._text = text
            return []
        if self._in_list and text[0] in ",]":
            self._text = text[1:]
            self._state = self._begin if text[0] == "," else self._outside
            return []
        if self._continues is not None and text.startswith(self._continues):
            self._text = text
            self._state = self._begin
            return []
        self._text = text
        self._state = self._outside
        return []

    def _give_up(self) -> list[Part]:
        text, self._raw = self._raw, ""
        self._call = None
        self._state = self._outside
        rest, self._text = self._text, ""
        # Only the marker is content for certain; what follows may hold another one.
        at = next((len(marker) for marker in self._start if text.startswith(marker)), 1)
        self._text = text[at:] + rest
        return self._content(text[:at])


class BareJsonCalls:
    """Llama 3: the whole answer is a call {"name": ..., "parameters": ...}, or several with ";" between them; an
    answer that begins otherwise is content. `marker` may stand before it."""

    def __init__(self, new_id: NewId, marker: str, names: Collection[str] | None = None) -> None:
        self._marker = marker
        self._inner = MarkedCalls(new_id, start=(_BEGIN,), ends=(";",), continues="{", names=names)
        self._text = ""
        self._is_content: bool | None = None

    def feed(self, text: str) -> list[Part]:
        if self._is_content is None:
            self._text += text
            return self._decide(is_end=False)
        if self._is_content:
            return [Content(text)] if text else []
        return _without_begin(self._inner.feed(text))

    def finish(self) -> list[Part]:
        parts = self._decide(is_end=True) if self._is_content is None else []
        if self._is_content:
            return parts
        return parts + _without_begin(self._inner.finish())

    def _decide(self, *, is_end: bool) -> list[Part]:
        seen = self._text.lstrip()
        if not is_end and (not seen or (len(seen) < len(self._marker) and self._marker.startswith(seen))):
            return []
        rest = seen.removeprefix(self._marker).lstrip()
        if not rest and not is_end:
            return []
        text, self._text = self._text, ""
        self._is_content = not rest.startswith("{")
        if self._is_content:
            return [Content(text)] if text else []
        return _without_begin(self._inner.feed(_BEGIN + rest))


_BEGIN = "\ufdd0"  # a noncharacter, put where the first call begins


def _without_begin(parts: list[Part]) -> list[Part]:
    plain = [Content(part.text.replace(_BEGIN, "")) if isinstance(part, Content) else part for part in parts]
    return [part for part in plain if not isinstance(part, Content) or part.text]
