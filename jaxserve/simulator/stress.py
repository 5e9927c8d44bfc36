"""A hard random workload over the real scheduler and cache, every token of it checked. No jax."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np

from jaxserve.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.scheduler.policy import MAX_PASSED_OVER
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.drive import Arrival, drive
from jaxserve.simulator.runner import SimulatedRunner, expected_scores, expected_tokens

VOCAB = 1000
EOS = frozenset(range(0, VOCAB, 40))
STOP_TOKENS = tuple(range(1, VOCAB, 100))
MAX_LENGTH = 192


@dataclasses.dataclass(frozen=True)
class StressOptions:
    """num_requests counts continuations. load: prompts that arrive per step on average, in bursts and pauses."""

    num_requests: int
    seed: int = 0
    policy: str = "fcfs"
    overlap: bool = True
    deterministic: bool = False
    prefix_cache: bool = True
    page_size: int = 4
    num_pages: int = 420
    max_num_rows: int = 48
    max_step_tokens: int = 256
    load: float = 6.0
    mean_output: float = 4.0


def run_stress(options: StressOptions) -> dict[str, Any]:
    """Returns counts. Raises RuntimeError on the first request that is lost, starved or wrong, or page that leaks."""
    geometry = CacheGeometry(
        num_pages=options.num_pages,
        page_size=options.page_size,
        max_num_rows=options.max_num_rows,
        max_num_samples=options.max_num_rows,
        max_step_tokens=options.max_step_tokens,
        max_model_len=MAX_LENGTH,
    )
    scheduler = Scheduler(
        geometry,
        policy=options.policy,
        prefix_cache=options.prefix_cache,
        deterministic=options.deterministic,
    )
    runner = SimulatedRunner(geometry, vocab_size=VOCAB)
    arrivals = make_arrivals(options)
    observer = Observer(options.policy)
    idle_points = 0

    def on_idle() -> None:
        nonlocal idle_points
        idle_points += 1
        scheduler.check_integrity()
        stats = scheduler.stats()
        total = stats.num_pages_free + stats.num_pages_cached + stats.num_pages_held
        if total != geometry.num_pages - 1 or stats.num_pages_held:
            raise RuntimeError(f"pages leaked when idle: {stats}")
        if idle_points % 8 == 0:
            scheduler.flush_cache()

    drive(scheduler, runner, arrivals, overlap=options.overlap, on_idle=on_idle, on_events=observer.take)
    requests = [request for arrival in arrivals for request in arrival.requests]
    for request in requests:
        check_request(request)
        observer.check_scores(request)
    stats = scheduler.stats()
    return {
        "requests": len(requests),
        "aborted": sum(request.finish_reason == FINISH_ABORT for request in requests),
        "steps": runner.num_steps,
        "idle points checked": idle_points,
        "output tokens": sum(len(request.output_ids) for request in requests),
        "prompt scores": sum(map(len, observer.scores.values())),
        "computed tokens": runner.num_computed_tokens,
        "prompt tokens": stats.num_prompt_tokens,
        "cached prompt tokens": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
        "most overtaken": observer.most_overtaken,
    }


class Observer:
    """Watches token events: prompt scores, and how often a request was overtaken by later ones of its class."""

    def __init__(self, policy: str) -> None:
        self._by_class = policy == "priority"
        self._started: dict[int, list[int]] = {}  # priority class -> numbers of those that began, sorted
        self.scores: dict[int, dict[int, float]] = {}  # parent's number -> prompt index -> log-probability
        self.most_overtaken = 0

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            request = event.request
            if event.prompt_index:
                self._take_score(request, event)
            elif len(request.output_ids) == 1:
                started = self._started.setdefault(request.priority if self._by_class else 0, [])
                place = bisect.bisect(started, request.number)
                overtaken = len(started) - place
                started.insert(place, request.number)
                self.most_overtaken = max(self.most_overtaken, overtaken)
                if overtaken > 4 * MAX_PASSED_OVER:
                    raise RuntimeError(f"request {request.number} starved: {overtaken} later ones began before it")

    def _take_score(self, request: Request, event: TokenEvent) -> None:
        number = request.number if request.parent is None else request.parent.number
        scores = self.scores.setdefault(number, {})
        if event.prompt_index in scores or event.logprob is None:
            raise RuntimeError(f"request {request.number}: prompt token {event.prompt_index} scored twice, or not")
        scores[event.prompt_index] = event.logprob

    def check_scores(self, request: Request) -> None:
        """Raise RuntimeError unless a request that ended by itself had every prompt token scored, and rightly."""
        if request.params.prompt_logprobs is None or request.finish_reason == FINISH_ABORT:
            return
        parent = request.parent or request
        if parent.finish_reason == FINISH_ABORT:
            return  # its scores may have been shared out between seeds
        scores = self.scores.get(parent.number, {})
        expected = dict(enumerate(expected_scores(parent.prompt, parent.seed), start=1))
        if scores != expected:
            raise RuntimeError(f"request {parent.number}: scores of {len(scores)} prompt tokens, wrong or incomplete")


def check_request(request: Request) -> None:
    """Raise RuntimeError unless the request ended as it must, with the tokens it must have."""
    outputs = request.output_ids
    if not request.is_finished:
        raise RuntimeError(f"request {request.number} was lost: {request.status}")
    expected = expected_tokens(request.prompt, request.seed, len(outputs), VOCAB)
    if outputs != expected:
        raise RuntimeError(f"request {request.number}: tokens {outputs}, expected {expected}")
    ends = [_end_at(request, count) for count in range(1, len(outputs) + 1)]
    is_aborted = request.finish_reason == FINISH_ABORT
    if any(ends[:-1]) or (not is_aborted and (not ends or ends[-1] != request.finish_reason)):
        raise RuntimeError(f"request {request.number} ended wrongly: {request.finish_reason}, due {ends}")


def _end_at(request: Request, count: int) -> str | None:
    """Why the request had to end with its first `count` output tokens, if it had to."""
    token, params = request.output_ids[count - 1], request.params
    stops = (token in EOS and not params.ignore_eos) or token in params.stop_token_ids
    if stops and count > params.min_tokens:
        return FINISH_STOP
    return FINISH_LENGTH if len(request.prompt) + count == request.max_total_tokens else None


def make_arrivals(options: StressOptions) -> list[Arrival]:
    """Prompts from a few growing families of prefixes; lengths, options and gaps at random."""
    rng = np.random.default_rng(options.seed)
    prefixes = [rng.integers(0, VOCAB, int(rng.integers(1, 80)), dtype=np.int32) for _ in range(40)]
    tails = rng.integers(0, VOCAB, 1 << 16, dtype=np.int32)
    draws = rng.random((options.num_requests, 12))
    outputs = rng.exponential(options.mean_output, options.num_requests).astype(int).tolist()
    gaps = rng.exponential(2 / options.load, options.num_requests).astype(int).tolist()
    seeds = rng.integers(0, 2**64, options.num_requests, dtype=np.uint64).tolist()
    arrivals: list[Arrival] = []
    step = number = 0
    while number < options.num_requests:
        u = draws[number].tolist()
        # Bursts with pauses: queues build up, and the engine becomes idle now and then.
        step += (gaps[number] if u[0] < 0.5 else 0) + (400 if u[1] < 0.002 else 0)
        place, size = int(u[2] * 65000), 1 + int(u[3] * 23)
        prompt = tails[place : place + size]
        if u[4] < 0.7:
            prefix = prefixes[int(u[5] * len(prefixes))]
            prompt = np.concatenate((prefix[: 1 + int(u[6] * len(prefix))], prompt))
        count = min(2 + int(u[8] * 4) if u[7] < 0.05 else 1, options.num_requests - number)
        # A few long outputs: short ones end before they need pages that were not there when they were admitted.
        length = (1 + outputs[number]) * (8 if u[8] > 0.95 else 1)
        total = min(len(prompt) + length, MAX_LENGTH)
        group: list[Request] = []
        for index in range(count):
            group.append(
                Request(
                    number=number + index,
                    prompt=prompt,
                    params=_params(int(u[9] * 64)),
                    seed=seeds[number + index],
                    max_total_tokens=total,
                    eos_token_ids=EOS,
                    index=index,
                    parent=group[0] if index else None,
                    namespace="other" if number % 17 == 0 else "",
                    priority=number % 3,
                )
            )
        number += count
        arrivals.append(Arrival(step, group, int(u[11] * 30) if u[10] < 0.1 else None))
        if u[11] < 0.01 and len(prompt) < MAX_LENGTH - 64:
            prefixes[int(u[5] * len(prefixes))] = prompt  # conversations go on
    return arrivals


_PARAMS = {
    0: SamplingParams(prompt_logprobs=0),
    1: SamplingParams(presence_penalty=0.5),
    2: SamplingParams(repetition_penalty=1.2, ignore_eos=True),
    3: SamplingParams(min_tokens=3, stop_token_ids=STOP_TOKENS),
    4: SamplingParams(stop_token_ids=STOP_TOKENS, ignore_eos=True),
    5: SamplingParams(frequency_penalty=0.1, min_tokens=2),
}
_PLAIN = SamplingParams()


def _params(kind: int) -> SamplingParams:
    return _PARAMS.get(kind, _PLAIN)
