"""Reasoning between two marks, as <think> ... </think>, before the answer."""

from __future__ import annotations

from jaxserve.server.answer_parts import Content, Part, Reasoning, held_length


class ThinkingParser:
    """Reads reasoning up to `end`, content behind it.

    is_open   the text begins inside the reasoning (the prompt has opened it); otherwise only a text that begins with
              `start` holds any
    White space around the marks belongs to neither part.
    """

    def __init__(self, start: str, end: str, *, is_open: bool) -> None:
        self._start, self._end = start, end
        self._is_open: bool | None = True if is_open else None  # None: the beginning has not been seen
        self._may_start = True  # an open text may bring the start mark once more
        self._is_over = False
        self._strip = False  # white space at the beginning of the next part
        self._held = ""
        self._space = ""  # white space of the reasoning that is dropped if the end mark follows

    def feed(self, text: str) -> list[Part]:
        if self._is_over and not self._held:
            return self._content(text)
        self._held += text
        return self._run(is_end=False)

    def finish(self) -> list[Part]:
        parts = self._run(is_end=True)
        if self._is_open and self._space:
            parts.append(Reasoning(self._space))
            self._space = ""
        return parts

    def _run(self, *, is_end: bool) -> list[Part]:
        if self._may_start:
            seen = self._held.lstrip()
            if not is_end and (not seen or (len(seen) < len(self._start) and self._start.startswith(seen))):
                return []
            self._may_start = False
            if seen.startswith(self._start):
                self._is_open = True
                self._held = seen[len(self._start) :]
            elif self._is_open is None:
                self._is_open, self._is_over = False, True
                text, self._held = self._held, ""
                self._strip = False
                return [Content(text)] if text else []
            self._strip = True
        if self._is_over:
            return self._content("")
        return self._reasoning(is_end=is_end)

    def _reasoning(self, *, is_end: bool) -> list[Part]:
        at = self._held.find(self._end)
        if at < 0:
            size = len(self._held) - (0 if is_end else held_length(self._held, (self._end,)))
            text, self._held = self._held[:size], self._held[size:]
            return self._reasoned(text)
        parts = self._reasoned(self._held[:at])
        self._space = ""
        rest, self._held = self._held[at + len(self._end) :], ""
        self._is_open, self._is_over, self._strip = False, True, True
        return parts + self._content(rest)

    def _reasoned(self, text: str) -> list[Part]:
        if self._strip:
            text = text.lstrip()
            if not text:
                return []
            self._strip = False
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Reasoning(kept)] if kept else []

    def _content(self, text: str) -> list[Part]:
        if self._strip:
            text = text.lstrip()
            if not text:
                return []
            self._strip = False
        return [Content(text)] if text else []
