"""Who asks when: closed loop (a fixed number of clients) and open loop (arrivals at a rate). No jax."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.bench.workloads import Conversation, Workload, next_prompt


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are time.perf_counter() seconds.

    times, counts   arrival of each piece of the answer and the tokens in it
    token_ids       of the answer, if the target tells them
    error           what the target said instead of finishing; None if it finished
    """

    num_prompt_tokens: int
    start: float = 0.0
    end: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def e2e(self) -> float:
        return self.times[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first piece; None if everything came in one piece."""
        rest = self.num_output_tokens - self.counts[0]
        return (self.times[-1] - self.times[0]) / rest if rest > 0 else None

    @property
    def gaps(self) -> list[float]:
        return [late - early for early, late in zip(self.times, self.times[1:])]


class Target(Protocol):
    """Something that continues prompts. A failed request does not raise: see RequestRecord.error."""

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> RequestRecord: ...


ProgressCallback = Callable[[RequestRecord], None]


async def _converse(
    target: Target, conversation: Conversation, records: list[RequestRecord], on_record: ProgressCallback | None
) -> None:
    history: list[int] = []
    for turn in conversation.turns:
        prompt = next_prompt(history, turn)
        record = await target.complete(prompt, turn.max_tokens)
        records.append(record)
        if on_record is not None:
            on_record(record)
        if record.error is not None:
            return  # later turns would ask something else than the workload says
        history = prompt + (record.token_ids or list(turn.reply_ids))


async def run_closed_loop(
    target: Target, workload: Workload, concurrency: int, on_record: ProgressCallback | None = None
) -> tuple[list[RequestRecord], float]:
    """`concurrency` clients, each taking the next conversation when its last one has ended.

    Priming conversations run first, alone, inside the measured time. Returns the records and the seconds taken.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: got {concurrency}; allowed: 1 or more")
    records: list[RequestRecord] = []
    start = time.perf_counter()
    queue = iter(workload.conversations[workload.num_priming :])
    for conversation in workload.conversations[: workload.num_priming]:
        await _converse(target, conversation, records, on_record)

    async def client() -> None:
        for conversation in queue:
            await _converse(target, conversation, records, on_record)

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(workload.conversations)))))
    return records, time.perf_counter() - start


def check_rate(rate: float) -> None:
    """Raise ValueError unless requests can arrive at this rate."""
    if not rate > 0:
        raise ValueError(f"request_rate: got {rate}; allowed: above 0 (inf: all at once)")


def arrival_times(count: int, rate: float, seed: int) -> np.ndarray:
    """float64 [count]: seconds of Poisson arrivals at `rate` per second, the first at 0; rate inf: all at 0."""
    check_rate(rate)
    if np.isinf(rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
    return np.cumsum(gaps) - gaps[0]


async def run_open_loop(
    target: Target,
    workload: Workload,
    rate: float,
    *,
    seed: int = 0,
    max_concurrency: int | None = None,
    on_record: ProgressCallback | None = None,
) -> tuple[list[RequestRecord], float]:
    """Conversations begin at Poisson times, whether or not earlier ones have been answered.

    max_concurrency bounds how many are under way; waiting for a place counts as the client's own time, not the
    server's. Returns the records and the seconds taken.
    """
    records: list[RequestRecord] = []
    arrivals = arrival_times(len(workload.conversations), rate, seed)
    places = asyncio.Semaphore(max_concurrency or len(arrivals) or 1)
    start = time.perf_counter()

    async def client(conversation: Conversation, arrival: float) -> None:
        await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
        async with places:
            await _converse(target, conversation, records, on_record)

    await asyncio.gather(*(client(c, float(at)) for c, at in zip(workload.conversations, arrivals)))
    return records, time.perf_counter() - start
