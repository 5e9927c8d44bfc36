"""A fleet in virtual time: real routing policies in front of replicas with real schedulers and caches. No jax."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator

import numpy as np

from jaxserve.request import Request
from jaxserve.routing.loads import LoadTable, load_score
from jaxserve.routing.policy import Policy, Query
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.simulator.replica import SAMPLED_TOKEN, Replica
from jaxserve.simulator.statistics import Histogram
from jaxserve.simulator.step_cost import StepCost
from jaxserve.simulator.workloads import Conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """num_replicas engines of one geometry and cost.

    overlap         a step is dispatched before the one that runs has been read, as engines do by default
    max_in_flight   requests under way at once; more wait outside (a closed loop of so many clients). 0: no limit
    warmup_share    of the requests, in order of their ends, that are left out of latencies and hit rates
    """

    num_replicas: int
    geometry: CacheGeometry
    cost: StepCost
    scheduler_policy: str = "fcfs"
    prefix_cache: bool = True
    max_in_flight: int = 0
    overlap: bool = True
    may_leap: bool = True

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.max_in_flight < 0:
            raise ValueError(
                f"num_replicas, max_in_flight: got {self.num_replicas}, {self.max_in_flight}; allowed: 1 or more, "
                "0 or more"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class FleetResult:
    """Figures of a run. Times in seconds of virtual time.

    hit_rate       prompt tokens found in caches, of all
    imbalance      requests served by the busiest replica over the mean
    busy_imbalance seconds that the busiest replica was busy over the mean
    kv_use         pages held by requests, of all, averaged over busy time
    """

    num_requests: int
    num_refused: int
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_steps: int
    imbalance: float
    busy_imbalance: float
    utilization: float
    kv_use: float
    ttft: Histogram
    gap: Histogram
    latency: Histogram

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.seconds if self.seconds else math.nan

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second, cached ones counted, as benchmarks of servers count them."""
        tokens = self.num_prompt_tokens + self.num_output_tokens
        return tokens / self.seconds if self.seconds else math.nan

    def figures(self) -> dict[str, float]:
        """Plain numbers for tables and JSON."""
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "seconds": self.seconds,
            "requests_per_s": self.num_requests / self.seconds if self.seconds else math.nan,
            "output_tok_per_s": self.output_rate,
            "total_tok_per_s": self.total_rate,
            "hit_rate": self.hit_rate,
            "ttft_mean": self.ttft.mean,
            **{f"ttft_p{round(100 * p)}": self.ttft.percentile(p) for p in (0.5, 0.9, 0.99)},
            "itl_mean": self.gap.mean,
            **{f"itl_p{round(100 * p)}": self.gap.percentile(p) for p in (0.5, 0.9, 0.99)},
            "latency_p50": self.latency.percentile(0.5),
            "kv_use": self.kv_use,
            "utilization": self.utilization,
            "imbalance": self.imbalance,
            "busy_imbalance": self.busy_imbalance,
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
        }


class _Live:
    """A conversation under way."""

    __slots__ = ("conversation", "history", "turn")

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.turn = 0
        self.history = np.empty(0, np.int32)


@dataclasses.dataclass(slots=True)
class _Entry:
    live: _Live
    arrival: float
    replica: Replica


class FleetSimulator:
    """run() serves a workload to its end. The same arguments give the same result."""

    def __init__(self, options: FleetOptions, policy: Policy) -> None:
        self._options = options
        self._policy = policy
        self._gap, self._ttft, self._latency = Histogram(), Histogram(), Histogram()
        width = len(str(options.num_replicas - 1))
        self.replicas = [
            Replica(
                f"r{index:0{width}d}",
                options.geometry,
                options.cost,
                policy=options.scheduler_policy,
                prefix_cache=options.prefix_cache,
                overlap=options.overlap,
                may_leap=options.may_leap,
                on_first=self._on_first,
                on_done=self._on_done,
                gaps=self._gap,
            )
            for index in range(options.num_replicas)
        ]
        self._by_name = {replica.name: replica for replica in self.replicas}
        self._loads = LoadTable()
        self._in_flight = dict.fromkeys(self._by_name, 0)
        self._served = dict.fromkeys(self._by_name, 0)
        for name in self._by_name:
            self._loads.set(name, 0)
        self._entries: dict[int, _Entry] = {}
        self._events: list[tuple[float, int, int, _Live | None]] = []  # time, tie, replica (-1: a turn arrives), turn
        self._ends: list[float | None] = [None] * options.num_replicas  # of each replica's event in the heap
        self._index = {name: index for index, name in enumerate(self._by_name)}
        self._ties = 0
        self._outside: list[_Live] = []  # first last
        self._num_requests = self._num_refused = self._num_outputs = self._number = 0
        self._params: dict[int, SamplingParams] = {}

    def run(self, workload: Iterable[Conversation]) -> FleetResult:
        conversations = iter(workload)
        coming = next(conversations, None)
        now = 0.0
        while coming is not None or self._events:
            if coming is not None and (not self._events or coming.start <= self._events[0][0]):
                now = coming.start
                self._arrive(_Live(coming), now)
                coming = next(conversations, None)
                continue
            now, _, index, live = heapq.heappop(self._events)
            if live is not None:
                self._arrive(live, now)
                continue
            replica = self.replicas[index]
            if replica.next_end != now or self._ends[index] != now:
                continue  # it was put off or brought forward
            self._ends[index] = None
            replica.end_step()
            while self._outside and len(self._entries) < self._options.max_in_flight:
                self._send(self._outside.pop(), now)
            replica.go_on(now)
            self._push(index, replica)
        return self._result(now)

    def _push(self, index: int, replica: Replica) -> None:
        end = replica.next_end
        if end is not None and end != self._ends[index]:
            self._ends[index] = end
            self._ties += 1
            heapq.heappush(self._events, (end, self._ties, index, None))

    def _arrive(self, live: _Live, now: float) -> None:
        limit = self._options.max_in_flight
        if limit and len(self._entries) >= limit:
            self._outside.insert(0, live)
        else:
            self._send(live, now)

    def _send(self, live: _Live, now: float) -> None:
        turn = live.conversation.turns[live.turn]
        prompt = np.concatenate([live.history, *(part.tokens() for part in turn.new)])
        query = Query(prompt.tobytes(), live.conversation.session)
        name = self._policy.choose(query, self._loads)
        assert name is not None
        self._policy.note_sent(query, name)
        replica = self._by_name[name]
        self._number += 1
        params = self._params.get(turn.num_output)
        if params is None:
            params = self._params[turn.num_output] = SamplingParams(max_tokens=turn.num_output, ignore_eos=True)
        request = Request(self._number, prompt, params, 0, len(prompt) + turn.num_output, arrival=now)
        try:
            replica.add(request, now)
        except ValueError:
            self._num_refused += 1
            return
        self._entries[self._number] = _Entry(live, now, replica)
        self._served[name] += 1
        self._count(name, 1)
        self._push(self._index[name], replica)

    def _count(self, name: str, change: int) -> None:
        total = self._in_flight[name] = self._in_flight[name] + change
        num_waiting = max(0, total - self._options.geometry.max_num_rows)
        self._loads.set(name, load_score(total - num_waiting, num_waiting))

    def _on_first(self, request: Request, now: float) -> None:
        self._ttft.add(max(now - self._entries[request.number].arrival, 1e-6))

    def _on_done(self, request: Request, now: float) -> None:
        entry = self._entries.pop(request.number)
        self._latency.add(max(now - entry.arrival, 1e-6))
        self._num_requests += 1
        self._num_outputs += len(request.output_ids)
        self._count(entry.replica.name, -1)
        live = entry.live
        live.turn += 1
        if live.turn < len(live.conversation.turns):
            answer = np.full(len(request.output_ids), SAMPLED_TOKEN, np.int32)
            live.history = np.concatenate((request.prompt, answer))
            self._ties += 1
            pause = live.conversation.turns[live.turn].pause
            heapq.heappush(self._events, (now + pause, self._ties, -1, live))

    def _result(self, seconds: float) -> FleetResult:
        stats = [replica.scheduler.stats() for replica in self.replicas]
        served = list(self._served.values())
        busy = [replica.busy_seconds for replica in self.replicas]
        total_busy = sum(busy)
        num_pages = self._options.geometry.num_pages - 1
        return FleetResult(
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            seconds=seconds,
            num_prompt_tokens=sum(s.num_prompt_tokens for s in stats),
            num_output_tokens=self._num_outputs,
            num_cached_tokens=sum(s.num_cached_tokens for s in stats),
            num_preemptions=sum(s.num_preemptions for s in stats),
            num_steps=sum(replica.num_steps for replica in self.replicas),
            imbalance=max(served) * len(served) / max(sum(served), 1),
            busy_imbalance=max(busy) * len(busy) / total_busy if total_busy else 1.0,
            utilization=total_busy / (seconds * len(busy)) if seconds else 0.0,
            kv_use=sum(r.page_seconds for r in self.replicas) / (total_busy * num_pages) if total_busy else 0.0,
            ttft=self._ttft,
            gap=self._gap,
            latency=self._latency,
        )


def turns_of(workload: Iterable[Conversation]) -> Iterator[tuple[int, int]]:
    """(new prompt tokens, output tokens) of every turn."""
    for conversation in workload:
        for turn in conversation.turns:
            yield sum(part.length for part in turn.new), turn.num_output
