"""A hard random workload over the real scheduler and cache, every token of it checked. No jax."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxserve.messages import FINISH_ABORT
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.drive import Arrival, drive
from jaxserve.simulator.runner import SimulatedRunner, expected_tokens

VOCAB = 1000


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
    num_pages: int = 160
    max_num_rows: int = 32
    max_step_tokens: int = 128
    load: float = 2.0


def run_stress(options: StressOptions) -> dict[str, Any]:
    """Returns counts. Raises RuntimeError on the first request that is lost or wrong, or page that is leaked."""
    geometry = CacheGeometry(
        num_pages=options.num_pages,
        page_size=options.page_size,
        max_num_rows=options.max_num_rows,
        max_num_samples=options.max_num_rows,
        max_step_tokens=options.max_step_tokens,
        max_model_len=256,
    )
    scheduler = Scheduler(
        geometry,
        policy=options.policy,
        prefix_cache=options.prefix_cache,
        deterministic=options.deterministic,
    )
    runner = SimulatedRunner(geometry, vocab_size=VOCAB)
    arrivals = make_arrivals(options)
    idle_points = 0

    def on_idle() -> None:
        nonlocal idle_points
        idle_points += 1
        scheduler.check_integrity()
        stats = scheduler.stats()
        total = stats.num_pages_free + stats.num_pages_cached + stats.num_pages_held
        if total != geometry.num_pages - 1 or stats.num_pages_held:
            raise RuntimeError(f"pages leaked when idle: {stats}")

    steps = drive(scheduler, runner, arrivals, overlap=options.overlap, on_idle=on_idle)
    requests = [request for arrival in arrivals for request in arrival.requests]
    for request in requests:
        check_request(request)
    stats = scheduler.stats()
    return {
        "requests": len(requests),
        "aborted": sum(request.finish_reason == FINISH_ABORT for request in requests),
        "steps": steps,
        "idle points checked": idle_points,
        "output tokens": sum(len(request.output_ids) for request in requests),
        "computed tokens": runner.num_computed_tokens,
        "prompt tokens": stats.num_prompt_tokens,
        "cached prompt tokens": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
    }


def check_request(request: Request) -> None:
    """Raise RuntimeError unless the request ended as it must, with the tokens it must have."""
    if not request.is_finished:
        raise RuntimeError(f"request {request.number} was lost: {request.status}")
    expected = expected_tokens(request.prompt, request.seed, len(request.output_ids), VOCAB)
    if request.output_ids != expected:
        raise RuntimeError(f"request {request.number}: tokens {request.output_ids}, expected {expected}")
    if request.finish_reason != FINISH_ABORT:
        ended = request.output_ids[-1] in request.eos_token_ids or request.num_tokens == request.max_total_tokens
        early = any(token in request.eos_token_ids for token in request.output_ids[:-1])
        if not ended or early:
            raise RuntimeError(f"request {request.number} ended wrongly: {request.finish_reason}")


def make_arrivals(options: StressOptions) -> list[Arrival]:
    """Prompts from a few growing families of prefixes; lengths, options and gaps at random."""
    rng = np.random.default_rng(options.seed)
    prefixes = [rng.integers(0, VOCAB, int(rng.integers(1, 100)), dtype=np.int32) for _ in range(40)]
    arrivals: list[Arrival] = []
    step = number = 0
    while number < options.num_requests:
        # Bursts with pauses: queues build up, and the engine becomes idle now and then.
        step += (
            0 if rng.random() < 0.5 else int(rng.exponential(2 / options.load)) + (400 if rng.random() < 0.002 else 0)
        )
        if rng.random() < 0.7:
            prefix = prefixes[int(rng.integers(len(prefixes)))]
            prefix = prefix[: int(rng.integers(1, len(prefix) + 1))]
        else:
            prefix = np.empty(0, np.int32)
        prompt = np.concatenate((prefix, rng.integers(0, VOCAB, int(rng.integers(1, 24)), dtype=np.int32)))
        count = int(rng.integers(2, 6)) if rng.random() < 0.05 else 1
        params = SamplingParams(n=count, prompt_logprobs=0 if rng.random() < 0.02 else None, temperature=1.0)
        group = _group(rng, number, prompt, params)
        number += len(group)
        abort_after = int(rng.integers(0, 30)) if rng.random() < 0.1 else None
        arrivals.append(Arrival(step, group, abort_after))
        if rng.random() < 0.01:
            prefixes[int(rng.integers(len(prefixes)))] = prompt
    return arrivals


def _group(rng: np.random.Generator, number: int, prompt: np.ndarray, params: SamplingParams) -> list[Request]:
    length = len(prompt) + min(256 - len(prompt), 1 + int(rng.exponential(4)))
    group: list[Request] = []
    for index in range(params.n):
        group.append(
            Request(
                number=number + index,
                prompt=prompt,
                params=params,
                seed=int(rng.integers(0, 2**63)),
                max_total_tokens=length,
                eos_token_ids=frozenset(range(0, VOCAB, 20)),
                index=index,
                parent=group[0] if index else None,
                namespace="other" if number % 17 == 0 else "",
                priority=number % 3,
            )
        )
    return group
