"""Which rank gets a request: four rules and the balance of steps compared in virtual time, over eight ranks.

    python -m benchmarks.dp_placement                    # the table in docs/sharding.md
    python -m benchmarks.dp_placement --requests 200     # sooner

The real scheduler of all ranks, with the engine's placement or another, serves the same arrivals; the device is the
planner's cost model (DeepSeek-V2 on 8 x H100, weights of one byte). All ranks wait for the busiest: a step takes what
it would take if every rank had as many tokens and as much context as the rank with the most. Same seed, same figures.

score           least 4 waiting + running
longest match   most tokens of the prompt cached; of equals the least score
both            the engine's: a cached prefix counts against the score (scheduler/dp_balance.py)
round robin     one after another
unbalanced      both, but prefill always fills a step
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import dp_balance
from jaxserve.scheduler.decision import CacheGeometry, RankedDecision, RankedResult, StepResult
from jaxserve.scheduler.dp_balance import RankedScheduler
from jaxserve.simulator.devices import device_named
from jaxserve.simulator.model_shape import load_shape
from jaxserve.simulator.step_cost import Parallel, RooflineCost, StepLoad, load_of
from jaxserve.simulator.workloads import Conversation, Lengths, multi_turn, shared_prefix, unique

NUM_RANKS = 8
GEOMETRY = CacheGeometry(
    num_pages=1025, page_size=64, max_num_rows=64, max_num_samples=72, max_step_tokens=1024, max_model_len=16384,
    num_ranks=NUM_RANKS,
)  # fmt: skip
_ANSWER = 7  # every sampled token


class ByScore(RankedScheduler):
    def cost(self, request: Request, rank: int) -> Any:
        scheduler = self.ranks[rank]
        return dp_balance.WAITING_WEIGHT * scheduler.num_waiting + scheduler.num_running


class ByLongestMatch(ByScore):
    def cost(self, request: Request, rank: int) -> Any:
        return -self._matched(request, rank), super().cost(request, rank)


class RoundRobin(RankedScheduler):
    def place(self, request: Request) -> int:
        return request.number % len(self.ranks)

    def _move_waiting(self) -> None:
        pass


RULES: dict[str, type[RankedScheduler]] = {
    "score": ByScore, "longest match": ByLongestMatch, "both": RankedScheduler, "round robin": RoundRobin,
    "unbalanced": RankedScheduler,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Figures:
    """hits: share of the prompt tokens found in a cache; busy: share of the computed and padded tokens that were
    computed; times in seconds."""

    hits: float
    busy: float
    tokens_per_second: float
    first_token: float  # mean
    first_token_p99: float
    between_tokens_p99: float


def workloads(count: int) -> dict[str, list[Conversation]]:
    """Conversations by name."""
    prefix, own, output = Lengths(low=2048, high=2048), Lengths(low=50, high=200), Lengths(low=50, high=200)
    turns, user = Lengths(low=3, high=6), Lengths(low=100, high=1000)
    made = {
        "64 prefixes of 2048": shared_prefix(count, 64, prefix, own, output, rate=40.0, seed=1),
        "the same, zipf 1.2": shared_prefix(count, 64, prefix, own, output, rate=40.0, zipf=1.2, seed=2),
        "chats of 3 to 6 turns": multi_turn(
            count // 4, turns, user, output, rate=9.0, system_tokens=500, pause_s=5.0, seed=3
        ),
        "alone, 100 to 8000": unique(count, Lengths(low=100, high=8000), output, rate=3.0, seed=4),
    }
    return {name: list(workload) for name, workload in made.items()}


def load_of_step(decision: RankedDecision) -> StepLoad:
    """Of a step in which every rank is as busy as the busiest."""
    loads = [load_of(part, GEOMETRY.page_size) for part in decision.ranks if part is not None]
    most = {field.name: max(getattr(load, field.name) for load in loads) for field in dataclasses.fields(StepLoad)}
    return StepLoad(**{name: value * len(decision.ranks) for name, value in most.items()})


def simulate(scheduler: RankedScheduler, workload: Iterable[Conversation], cost: RooflineCost) -> Figures:
    """Serve all conversations, one step after another."""
    now, busy_tokens, padded_tokens, cached, prompts = 0.0, 0, 0, 0, 0
    first: list[float] = []
    between: list[float] = []
    last_token: dict[int, float] = {}
    numbers = itertools.count()
    sent: dict[int, tuple[Conversation, int]] = {}
    coming = [(one.start, next(numbers), one, 0, np.zeros(0, np.int32)) for one in workload]
    heapq.heapify(coming)
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            start, number, conversation, turn, history = heapq.heappop(coming)
            part = conversation.turns[turn]
            prompt = np.concatenate([history, *(one.tokens() for one in part.new)])
            params = SamplingParams(max_tokens=part.num_output, ignore_eos=True)
            scheduler.add(Request(number, prompt, params, 0, len(prompt) + part.num_output, arrival=start))
            sent[number] = conversation, turn
        decision = scheduler.schedule()
        assert decision is not None
        now += cost.seconds(load_of_step(decision))
        sizes = [0 if part is None else part.num_tokens for part in decision.ranks]
        busy_tokens += sum(sizes)
        padded_tokens += len(sizes) * max(sizes)
        for event in scheduler.apply(decision, _answer(decision)):
            request = event.request
            if request.number in last_token:
                between.append(now - last_token[request.number])
            else:
                first.append(now - request.arrival)
            last_token[request.number] = now
            if request.is_finished:
                cached += request.num_cached_tokens
                prompts += request.num_prompt_tokens
                conversation, turn = sent.pop(request.number)
                if turn + 1 < len(conversation.turns):
                    history = np.concatenate([request.prompt, np.array(request.output_ids, np.int32)])
                    at = now + conversation.turns[turn + 1].pause
                    heapq.heappush(coming, (at, next(numbers), conversation, turn + 1, history))
    scheduler.check_integrity()
    return Figures(
        cached / prompts, busy_tokens / padded_tokens, (len(first) + len(between)) / now, float(np.mean(first)),
        float(np.percentile(first, 99)), float(np.percentile(between, 99)),
    )  # fmt: skip


def _answer(decision: RankedDecision) -> RankedResult:
    return RankedResult(
        decision.step_id,
        tuple(
            None if part is None else StepResult(part.step_id, np.full(len(part.samples), _ANSWER, np.int32))
            for part in decision.ranks
        ),
    )


def compare(workload: list[Conversation]) -> Iterator[tuple[str, Figures]]:
    """(rule, what it makes of the workload)."""
    cost = RooflineCost(
        load_shape("deepseek-v2", weight_bytes=1.0),
        device_named("h100"),
        Parallel(devices=NUM_RANKS, attention_ranks=NUM_RANKS),
    )
    for rule, make in RULES.items():
        limit = (lambda demands, most: most) if rule == "unbalanced" else dp_balance.token_limit
        with mock.patch.object(dp_balance, "token_limit", limit):
            yield rule, simulate(make(GEOMETRY), workload, cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    for name, workload in workloads(options.requests).items():
        print(f"{name}\n    rule           hits  busy  tok/s  first token, mean and p99  between tokens, p99 (ms)")
        for rule, found in compare(workload):
            print(
                f"    {rule:13} {found.hits:5.2f} {found.busy:5.2f} {found.tokens_per_second:6.0f} "
                f"{found.first_token * 1e3:11.0f} {found.first_token_p99 * 1e3:8.0f} "
                f"{found.between_tokens_p99 * 1e3:18.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
