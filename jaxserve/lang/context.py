"""What a branch of a program has said so far: runs of text and runs of generated tokens. No jax.

Text becomes tokens run by run: a run is all text between two generations, so that where a program cuts its text does
not matter, and generated tokens stay exactly those the model made (their keys and values are in the cache). Control
tokens are made only of text that came from the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Part = tuple[str, bool]  # text, and whether it came from the chat template
Encode = Callable[[Sequence[Part], bool], list[int]]  # parts, whether nothing comes before them


class TextRun:
    """Text up to the next generation."""

    __slots__ = ("_ids", "parts")

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self._ids: list[int] | None = None

    @property
    def text(self) -> str:
        return "".join([text for text, _ in self.parts])

    @property
    def is_encoded(self) -> bool:
        return self._ids is not None

    def remember(self, token_ids: list[int]) -> None:
        """What another encoder than that of token_ids() made of it."""
        self._ids = token_ids

    def token_ids(self, encode: Encode, is_first: bool) -> list[int]:
        """Encoded once: a context belongs to one backend."""
        if self._ids is None:
            self._ids = encode(self.parts, is_first)
        return self._ids


class TokenRun:
    """Tokens that the model made, and their text."""

    __slots__ = ("_ids", "text")

    def __init__(self, text: str, token_ids: Sequence[int]) -> None:
        self.text = text
        self._ids = list(token_ids)

    def token_ids(self, encode: Encode, is_first: bool) -> list[int]:
        return self._ids


Run = TextRun | TokenRun


class Context:
    """Never changed: adding gives a new one, which shares the runs of the old."""

    __slots__ = ("length", "runs")

    def __init__(self, runs: tuple[Run, ...] = (), length: int = 0) -> None:
        self.runs = runs
        self.length = length  # in characters

    @property
    def text(self) -> str:
        return "".join([run.text for run in self.runs])

    @property
    def ends_in_text(self) -> bool:
        return bool(self.runs) and isinstance(self.runs[-1], TextRun)

    def add_text(self, text: str, *, is_template: bool = False) -> Context:
        return self.add_parts(((text, is_template),)) if text else self

    def add_parts(self, parts: tuple[Part, ...]) -> Context:
        length = self.length + sum([len(text) for text, _ in parts])
        if self.runs and isinstance(self.runs[-1], TextRun):
            return Context((*self.runs[:-1], TextRun(self.runs[-1].parts + parts)), length)
        return Context((*self.runs, TextRun(parts)), length)

    def add_tokens(self, text: str, token_ids: Sequence[int]) -> Context:
        if not token_ids:
            return self.add_text(text)
        return Context((*self.runs, TokenRun(text, token_ids)), self.length + len(text))

    def add_runs(self, runs: Sequence[Run]) -> Context:
        context = self
        for run in runs:
            if isinstance(run, TextRun):
                context = context.add_parts(run.parts)
            else:
                context = Context((*context.runs, run), context.length + len(run.text))
        return context

    def since(self, earlier: Context) -> list[Run]:
        """What was added to `earlier`, from which this context was made."""
        count = len(earlier.runs)
        if not count:
            return list(self.runs)
        last, now = earlier.runs[-1], self.runs[count - 1]
        added: list[Run] = list(self.runs[count:])
        if isinstance(last, TextRun) and isinstance(now, TextRun) and len(now.parts) > len(last.parts):
            added.insert(0, TextRun(now.parts[len(last.parts) :]))
        return added

    def token_ids(self, encode: Encode) -> list[int]:
        ids: list[int] = []
        for index, run in enumerate(self.runs):
            ids += run.token_ids(encode, index == 0)
        return ids


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
