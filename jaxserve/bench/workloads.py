"""Seeded synthetic workloads as token ids: the same arguments give the same requests on every machine.

Prompts are random token ids, so that no two requests share a prefix unless the workload says so. All lengths are
in tokens. A workload is a list of conversations; a plain request is a conversation of one turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

FIRST_PLAIN_ID = 1000  # control tokens and single bytes lie below this in the vocabularies in use


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What a user adds to a conversation, and how long the answer may be.

    new_ids    appended to everything said before
    reply_ids  stand for the answer in the next turn's prompt if the server does not tell its token ids
    """

    new_ids: tuple[int, ...]
    max_tokens: int
    reply_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that must run one after another."""

    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """name and parameters go into reports; conversations are independent of each other.

    num_priming   how many of the first conversations run alone, before the rest (they fill a shared cache)
    """

    name: str
    parameters: dict[str, int | str]
    conversations: tuple[Conversation, ...]
    num_priming: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


@dataclasses.dataclass(frozen=True, slots=True)
class LengthRange:
    """From low to high, both included: uniform, or uniform in the logarithm (many short ones, few long ones)."""

    low: int
    high: int
    is_log: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"length range: got {self.low}:{self.high}; allowed: 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """ "128", "32:512" or "16:256:log". Raises ValueError."""
        bounds = text.removesuffix(":log")
        low, _, high = bounds.partition(":")
        try:
            return cls(int(low), int(high or low), is_log=bounds != text)
        except ValueError as error:
            allowed = "N, LOW:HIGH or LOW:HIGH:log with 1 <= LOW <= HIGH"
            raise ValueError(f"length range: got {text!r}; allowed: {allowed}") from error

    def draw(self, generator: np.random.Generator) -> int:
        if self.is_log:
            scale = (self.high + 1) / self.low
            return min(self.high, int(self.low * scale ** generator.random()))
        return int(generator.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        if self.is_log:
            return f"{self.low}:{self.high}:log"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class TokenSource:
    """Draws token ids that are plain words of most vocabularies."""

    def __init__(self, seed: int | tuple[int, ...], vocab_size: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size: got {vocab_size}; allowed: 2 or more")
        self.generator = np.random.default_rng(seed)
        self._low = FIRST_PLAIN_ID if vocab_size > 2 * FIRST_PLAIN_ID else 0
        self._high = vocab_size

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.generator.integers(self._low, self._high, size=count).tolist())


def random_lengths(
    num_requests: int, prompt: LengthRange, output: LengthRange, *, vocab_size: int, seed: int = 0
) -> Workload:
    """Independent requests with lengths drawn from both ranges."""
    source = TokenSource(seed, vocab_size)
    conversations = tuple(
        _single(source.ids(prompt.draw(source.generator)), output.draw(source.generator)) for _ in range(num_requests)
    )
    parameters = {"num_requests": num_requests, "prompt": str(prompt), "output": str(output), "seed": seed}
    return Workload("random", parameters, conversations)


def shared_prefix(
    num_requests: int,
    prefix_tokens: int,
    own: LengthRange,
    output: LengthRange,
    *,
    vocab_size: int,
    seed: int = 0,
    num_groups: int = 1,
    is_shared: bool = True,
) -> Workload:
    """Requests that begin with their group's prefix. With is_shared=False the lengths are the same and every
    prefix is drawn anew: what the sharing is worth is the difference of the two."""
    if not 1 <= num_groups <= num_requests:
        raise ValueError(f"num_groups: got {num_groups}; allowed: 1 to num_requests ({num_requests})")
    source = TokenSource(seed, vocab_size)
    prefixes = [source.ids(prefix_tokens) for _ in range(num_groups)]
    conversations = []
    for i in range(num_requests):
        own_ids = source.ids(own.draw(source.generator))
        max_tokens = output.draw(source.generator)
        prefix = prefixes[i % num_groups]
        if not is_shared:
            prefix = TokenSource((seed, i), vocab_size).ids(prefix_tokens)
        conversations.append(_single(prefix + own_ids, max_tokens))
    parameters = {
        "num_requests": num_requests, "prefix_tokens": prefix_tokens, "own": str(own), "output": str(output),
        "num_groups": num_groups, "seed": seed,
    }  # fmt: skip
    name = "shared-prefix" if is_shared else "unique-prefix"
    return Workload(name, parameters, tuple(conversations), num_priming=num_groups if is_shared else 0)


def multi_turn(
    num_conversations: int,
    num_turns: int,
    user: LengthRange,
    output: LengthRange,
    *,
    vocab_size: int,
    seed: int = 0,
    system_tokens: int = 0,
) -> Workload:
    """Chats: every turn's prompt holds all earlier turns and answers. The system prompt is common to all."""
    source = TokenSource(seed, vocab_size)
    system = source.ids(system_tokens)
    conversations = []
    for _ in range(num_conversations):
        turns = []
        for k in range(num_turns):
            new_ids = source.ids(user.draw(source.generator))
            max_tokens = output.draw(source.generator)
            turns.append(Turn(system + new_ids if k == 0 else new_ids, max_tokens, source.ids(max_tokens)))
        conversations.append(Conversation(tuple(turns)))
    parameters = {
        "num_conversations": num_conversations, "num_turns": num_turns, "user": str(user), "output": str(output),
        "system_tokens": system_tokens, "seed": seed,
    }  # fmt: skip
    return Workload("multi-turn", parameters, tuple(conversations))


def next_prompt(history: Sequence[int], turn: Turn) -> list[int]:
    """The token ids of a turn's prompt, given everything said before it."""
    return [*history, *turn.new_ids]


def _single(prompt_ids: tuple[int, ...], max_tokens: int) -> Conversation:
    return Conversation((Turn(prompt_ids, max_tokens),))
