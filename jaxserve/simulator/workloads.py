"""Workloads in virtual time: conversations with arrival times, whose token ids are made when they are needed. No jax.

A million prompts of thousands of tokens do not fit into memory: what is kept is a recipe, (stream of numbers, length)
for each part. The same arguments give the same workload on every machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

VOCAB = 1 << 20  # larger than real ones: parts that differ do not agree by chance


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """`length` token ids of an endless stream; parts of one stream begin alike."""

    stream: int
    length: int

    def tokens(self) -> np.ndarray:
        """int32 [length]."""
        # A counter through a mixing function: any part costs its own length only.
        counter = np.arange(self.length, dtype=np.uint64) + np.uint64((self.stream * 0x9E3779B97F4A7C15) % 2**64)
        counter = (counter ^ (counter >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        counter = (counter ^ (counter >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((counter ^ (counter >> np.uint64(31))) % np.uint64(VOCAB)).astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What is added to the conversation, how many tokens are answered, and the pause before (after the last answer)."""

    new: tuple[Part, ...]
    num_output: int
    pause: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after another, each with all earlier ones and their answers in its prompt."""

    start: float
    turns: tuple[Turn, ...]
    session: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Uniform from low to high, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"length range: got {self.low}:{self.high}; allowed: 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "128" or "32:512". Raises ValueError."""
        low, _, high = text.partition(":")
        try:
            return cls(low=int(low), high=int(high or low))
        except ValueError as error:
            raise ValueError(f"length range: got {text!r}; allowed: N or LOW:HIGH, 1 <= LOW <= HIGH") from error

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.low, self.high + 1, count).tolist()


class Streams:
    """Numbers of streams that no other part of the workload uses."""

    def __init__(self, seed: int) -> None:
        self._next = (seed % 4096) << 40

    def new(self) -> int:
        self._next += 1
        return self._next


def arrivals(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Poisson arrivals at `rate` per second from 0 on; rate inf: all at 0. Raises ValueError for another rate."""
    if not rate > 0:
        raise ValueError(f"rate: got {rate}; allowed: above 0 (inf: all at once)")
    if np.isinf(rate):
        return [0.0] * count
    return np.cumsum(rng.exponential(1.0 / rate, count)).tolist()


def unique(
    num_requests: int, prompt: Lengths, output: Lengths, *, rate: float, seed: int = 0
) -> Iterator[Conversation]:
    """Prompts that share nothing."""
    rng, streams = np.random.default_rng(seed), Streams(seed)
    prompts, outputs = prompt.draw(rng, num_requests), output.draw(rng, num_requests)
    for start, length, num_output in zip(arrivals(rng, num_requests, rate), prompts, outputs):
        yield Conversation(start, (Turn((Part(streams.new(), length),), num_output),))


def shared_prefix(
    num_requests: int,
    num_prefixes: int,
    prefix: Lengths,
    own: Lengths,
    output: Lengths,
    *,
    rate: float,
    zipf: float = 0.0,
    seed: int = 0,
) -> Iterator[Conversation]:
    """Each prompt is one of `num_prefixes` prefixes and something of its own, in random order.

    zipf   0: every prefix equally often (SGLang's generated-shared-prefix); s: the k-th in proportion to 1 / k**s
    """
    if num_prefixes < 1 or zipf < 0:
        raise ValueError(f"num_prefixes, zipf: got {num_prefixes}, {zipf}; allowed: 1 or more, 0 or more")
    rng, streams = np.random.default_rng(seed), Streams(seed)
    prefixes = [Part(streams.new(), length) for length in prefix.draw(rng, num_prefixes)]
    if zipf:
        weights = np.arange(1, num_prefixes + 1, dtype=float) ** -zipf
        chosen = rng.choice(num_prefixes, num_requests, p=weights / weights.sum())
    else:
        chosen = rng.permutation(np.arange(num_requests) % num_prefixes)
    owns, outputs = own.draw(rng, num_requests), output.draw(rng, num_requests)
    times = arrivals(rng, num_requests, rate)
    for start, index, length, num_output in zip(times, chosen.tolist(), owns, outputs):
        yield Conversation(start, (Turn((prefixes[index], Part(streams.new(), length)), num_output),))


def multi_turn(
    num_conversations: int,
    num_turns: Lengths,
    user: Lengths,
    output: Lengths,
    *,
    rate: float,
    system_tokens: int = 0,
    pause_s: float = 10.0,
    seed: int = 0,
) -> Iterator[Conversation]:
    """Chats: a common system prompt, then turns with exponential pauses of pause_s on average."""
    rng, streams = np.random.default_rng(seed), Streams(seed)
    system = (Part(streams.new(), system_tokens),) if system_tokens else ()
    counts = num_turns.draw(rng, num_conversations)
    for number, (start, count) in enumerate(zip(arrivals(rng, num_conversations, rate), counts)):
        users, outputs = user.draw(rng, count), output.draw(rng, count)
        pauses = [0.0, *rng.exponential(pause_s, count - 1).tolist()]
        turns = tuple(
            Turn((*(system if k == 0 else ()), Part(streams.new(), users[k])), outputs[k], pauses[k])
            for k in range(count)
        )
        yield Conversation(start, turns, f"chat-{number}")


def agentic(
    num_agents: int,
    num_kinds: int,
    *,
    rate: float,
    tools_tokens: Lengths = Lengths(low=3000, high=8000),
    task: Lengths = Lengths(low=100, high=600),
    num_calls: Lengths = Lengths(low=4, high=16),
    call: Lengths = Lengths(low=40, high=160),
    observation: Lengths = Lengths(low=200, high=2000),
    tool_s: float = 2.0,
    seed: int = 0,
) -> Iterator[Conversation]:
    """Agents of some kinds, each kind with its own long tool description: many short calls, each followed by what a
    tool returned after tool_s seconds on average."""
    rng, streams = np.random.default_rng(seed), Streams(seed)
    kinds = [Part(streams.new(), length) for length in tools_tokens.draw(rng, num_kinds)]
    for number, start in enumerate(arrivals(rng, num_agents, rate)):
        (count,) = num_calls.draw(rng, 1)
        calls, seen = call.draw(rng, count), observation.draw(rng, count)
        (first,) = task.draw(rng, 1)
        kind = kinds[int(rng.integers(num_kinds))]
        turns = [Turn((kind, Part(streams.new(), first)), calls[0])]
        for k in range(1, count):
            turns.append(Turn((Part(streams.new(), seen[k]),), calls[k], float(rng.exponential(tool_s))))
        yield Conversation(start, tuple(turns), f"agent-{number}")


def trace(path: Path, *, speed: float = 1.0) -> Iterator[Conversation]:
    """A JSON-lines file, one request a line, in order of time.

    Mooncake's format (Qin et al., 2024, arXiv:2407.00079): timestamp in milliseconds, input_length, output_length and
    hash_ids, one for each block of 512 tokens; equal ids stand for equal tokens. hash_ids may be absent.
    speed   2: twice as fast as recorded
    Raises ValueError naming the line.
    """
    streams = Streams(4095)
    last = 0.0
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                start = float(entry["timestamp"]) / 1000.0 / speed
                length, num_output = int(entry["input_length"]), int(entry["output_length"])
                parts = tuple(_blocks(length, entry.get("hash_ids") or [], streams))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: line {number}: {type(error).__name__}: {error}") from None
            if start < last or length < 1 or num_output < 1:
                raise ValueError(f"{path}: line {number}: times must ascend, lengths be 1 or more")
            last = start
            yield Conversation(start, (Turn(parts, num_output),))


_BLOCK = 512


def _blocks(length: int, ids: Iterable[int], streams: Streams) -> Iterator[Part]:
    for block in ids:
        if length <= 0:
            return
        yield Part(int(block) + (1 << 56), min(_BLOCK, length))
        length -= _BLOCK
    if length > 0:
        yield Part(streams.new(), length)
