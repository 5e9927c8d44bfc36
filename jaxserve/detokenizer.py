"""Token ids to text, as they come: whole characters only, and never a piece of a stop string. No jax.

A token is a run of bytes, not of characters. Text is therefore made from the bytes of the *output* tokens alone:
the prompt is never decoded, so nothing of it can reappear, and no window of earlier tokens is decoded again. The
joined pieces equal the plain UTF-8 decoding (errors replaced by U+FFFD) of all bytes, whatever the split.

Stop strings are found by one automaton for all of them (Aho & Corasick, "Efficient string matching", CACM 18(6),
1975): constant work per character, and its state is exactly what must be held back.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Collection, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    special_ids: Collection[int]
    strip_leading_space: bool
    vocab_size: int

    def token_bytes(self, token_id: int) -> bytes: ...


class StopStrings:
    """Finds the first of several stop strings to be complete in a growing text.

    The first means: the one whose last character comes first, so that the answer depends on the text alone and not
    on how tokens cut it. If several end with the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._first = frozenset(self._next[0])

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            target = self._next[state].get(char)
            if target is None:
                target = len(self._next)
                self._next[state][char] = target
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = target
        self._match[state] = stop

    def _link(self) -> list[int]:
        """For each state the longest proper suffix that is a state; breadth first, so shorter ones are ready."""
        fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            for char, target in self._next[state].items():
                fail[target] = self._step(fail[state], char, fail)
                queue.append(target)
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
        return fail

    def _step(self, state: int, char: str, fail: list[int]) -> int:
        while state and char not in self._next[state]:
            state = fail[state]
        return self._next[state].get(char, 0)

    def feed(self, state: int, text: str, *, ignore: bool) -> tuple[int, int, str | None]:
        """Advance `state` (0 at the start) over `text`; returns (state, characters read, stop string or None).

        Reading ends with the character that completes a stop string, unless `ignore` is set. `held(state)` then
        says how many of the last characters may still become one.
        """
        if not state and self._first.isdisjoint(text):
            return 0, len(text), None
        for position, char in enumerate(text):
            state = self._step(state, char, self._fail)
            if self._match[state] is not None and not ignore:
                return state, position + 1, self._match[state]
            # A complete stop string that was ignored and leads nowhere is not the start of another one.
            while state and not self._next[state]:
                state = self._fail[state]
        return state, len(text), None

    def held(self, state: int) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        return self._depth[state]


@functools.lru_cache(maxsize=256)
def _stop_strings(stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops)


class _BytesOf(dict[int, bytes]):
    """Bytes of each token, asked for once. Ids past the tokenizer's vocabulary (padded logits) have no text."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        known = 0 <= token_id < self._tokenizer.vocab_size
        self[token_id] = data = self._tokenizer.token_bytes(token_id) if known else b""
        return data


class Detokenizer:
    """Makes the text streams of all continuations; holds the byte tables of one tokenizer."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._strip_leading_space = tokenizer.strip_leading_space
        self._special = frozenset(tokenizer.special_ids)
        self._with_special = _BytesOf(tokenizer)
        self._without_special = _BytesOf(tokenizer)
        self._without_special.update(dict.fromkeys(self._special, b""))

    def stream(
        self,
        prompt: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> TextStream:
        """Text of one continuation of `prompt`. Stop strings complete before `min_tokens` tokens are ignored.

        A tokenizer that puts a space before the first word of a sequence has it taken off again only where the
        text is that first word: behind a prompt without text (control tokens alone).
        """
        starts_sequence = self._strip_leading_space and all(token in self._special for token in prompt)
        return TextStream(
            self._without_special if skip_special_tokens else self._with_special,
            _stop_strings(stop) if stop else None,
            include_stop=include_stop,
            min_tokens=min_tokens,
            strip_leading_space=starts_sequence,
        )


class TextStream:
    """One continuation's text. push() and finish() return the characters that are final.

    `stop` is the stop string that was found, None before; after that no more text comes out.
    """

    __slots__ = (
        "_bytes_of", "_held", "_include_stop", "_min_tokens", "_num_tokens", "_pending", "_state", "_stops",
        "_strip", "stop",
    )  # fmt: skip

    def __init__(
        self,
        bytes_of: dict[int, bytes],
        stops: StopStrings | None,
        *,
        include_stop: bool,
        min_tokens: int,
        strip_leading_space: bool,
    ) -> None:
        self._bytes_of = bytes_of
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._strip = strip_leading_space
        self._pending = b""  # the bytes of an unfinished character
        self._state = 0
        self._held = ""  # text that may be the start of a stop string
        self._num_tokens = 0
        self.stop: str | None = None

    @property
    def has_stop_strings(self) -> bool:
        """Whether tokens must be pushed one by one, as each may end the text."""
        return self._stops is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these tokens. With stop strings: call with one token at a time."""
        self._num_tokens += len(token_ids)
        bytes_of = self._bytes_of
        data = bytes_of[token_ids[0]] if len(token_ids) == 1 else b"".join([bytes_of[t] for t in token_ids])
        return self._push_bytes(data, final=False)

    def finish(self) -> str:
        """Everything held back: half a character becomes U+FFFD, the start of a stop string is just text."""
        text = self._push_bytes(b"", final=True)
        if self.stop is None:
            text += self._held
            self._held = ""
        return text

    def _push_bytes(self, data: bytes, *, final: bool) -> str:
        if self.stop is not None:
            return ""
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:] if used < len(data) else b""
        if self._stops is None or not text:
            return text
        return self._cut(self._stops, text)

    def _cut(self, stops: StopStrings, text: str) -> str:
        ignore = self._num_tokens < self._min_tokens
        self._state, num_read, self.stop = stops.feed(self._state, text, ignore=ignore)
        whole = self._held + text
        if self.stop is None:
            end = len(whole) - stops.held(self._state)
            self._held = whole[end:]
            return whole[:end]
        end = len(self._held) + num_read
        self._held = ""
        return whole[:end] if self._include_stop else whole[: end - len(self.stop)]
