"""The simulated engine takes the steps that the real one takes, at the same times: what differs is the device alone."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AddRequest, ModelInfo
from jaxserve.routing.policy import make_policy
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry, StepDecision, StepResult
from jaxserve.simulator import workloads
from jaxserve.simulator.fleet import FleetOptions, FleetSimulator
from jaxserve.simulator.replica import SAMPLED_TOKEN
from jaxserve.simulator.step_cost import MeasuredCost, load_of
from jaxserve.simulator.workloads import VOCAB, Conversation, Lengths

COST = MeasuredCost(buckets=(1, 8, 32, 128), bucket_seconds=(0.004, 0.005, 0.007, 0.02), pair=1e-7, row=5e-5)
INF = float("inf")


def geometry(num_pages: int) -> CacheGeometry:
    return CacheGeometry(
        num_pages=num_pages, page_size=16, max_num_rows=8, max_num_samples=8, max_step_tokens=128, max_model_len=1024
    )


class Tokens:
    """As little of a tokenizer as the engine needs."""

    special_ids = eos_token_ids = frozenset()
    vocab_size = VOCAB
    strip_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"a"


class TimedRunner:
    """A device on a clock of its own: steps run one after another, each as long as COST says."""

    def __init__(self, shape: CacheGeometry) -> None:
        self.geometry = shape
        self.now = self._free_at = 0.0
        self.num_steps = 0

    def dispatch(self, decision: StepDecision) -> tuple[StepDecision, float]:
        self.num_steps += 1
        self._free_at = max(self.now, self._free_at) + COST.seconds(load_of(decision, self.geometry.page_size))
        return decision, self._free_at

    def collect(self, handle: tuple[StepDecision, float]) -> StepResult:
        decision, end = handle
        self.now = max(self.now, end)
        return StepResult(decision.step_id, np.full(len(decision.samples), SAMPLED_TOKEN, np.int32))


def run_engine(
    shape: CacheGeometry, conversations: Iterable[Conversation], clients: int, cost: MeasuredCost, *, overlap: bool
) -> dict[str, Any]:
    """Serve conversations by a real engine over a TimedRunner; `cost` says how long it takes a request in and how
    long it needs to warm up."""
    runner = TimedRunner(shape)
    model = ModelInfo(
        name="timed", tokenizer_path="", vocab_size=VOCAB, max_model_len=1024, eos_token_ids=[], max_num_rows=8,
        dtype="float32", num_pages=shape.num_pages, page_size=16,
    )  # fmt: skip
    config = EngineConfig(max_num_rows=8, max_step_tokens=128, overlap=overlap)
    engine = Engine(runner, Tokens(), config, model=model, clock=lambda: runner.now)
    waiting = [(c.start, number, c, 0, np.empty(0, np.int32)) for number, c in enumerate(conversations)]
    live: dict[str, Any] = {}
    ttft, latency, tie = [], [], len(waiting)
    while waiting or live:
        now = runner.now
        while waiting and waiting[0][0] <= runner.now and not (clients and len(live) >= clients):
            due, _, conversation, turn, history = heapq.heappop(waiting)
            prompt = np.concatenate([history, *(part.tokens() for part in conversation.turns[turn].new)])
            params = SamplingParams(max_tokens=conversation.turns[turn].num_output, ignore_eos=True)
            tie += 1
            engine.handle(AddRequest(request_id=str(tie), prompt=prompt.tolist(), params=params))
            runner.now += cost.request
            live[str(tie)] = [now if clients else due, conversation, turn, prompt, 0]
        if not engine.has_work:
            runner.now = waiting[0][0] + cost.warm_up(waiting[0][0] - runner.now)
            continue
        for output in engine.step():
            entry = live[output.request_id]
            start, conversation, turn, prompt, num_before = entry
            entry[4] += len(output.token_ids)
            if not num_before:
                ttft.append(runner.now - start)
            if output.finish_reason is None:
                continue
            assert output.finish_reason == "length"
            latency.append(runner.now - start)
            del live[output.request_id]
            if turn + 1 < len(conversation.turns):
                tie += 1
                history = np.concatenate((prompt, np.full(entry[4], SAMPLED_TOKEN, np.int32)))
                due = runner.now + conversation.turns[turn + 1].pause
                heapq.heappush(waiting, (due, tie, conversation, turn + 1, history))
    stats = engine.stats()
    return {
        "seconds": runner.now,
        "steps": runner.num_steps,
        "ttft": np.mean(ttft),
        "latency": np.mean(latency),
        "cached": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
    }


def lengths(low: int, high: int) -> Lengths:
    return Lengths(low=low, high=high)


WORKLOADS = {
    "all at once": (lambda s: workloads.unique(30, lengths(5, 300), lengths(1, 60), rate=INF, seed=s), 0),
    "a closed loop": (lambda s: workloads.unique(40, lengths(5, 300), lengths(1, 40), rate=INF, seed=s), 5),
    "at a rate": (lambda s: workloads.unique(40, lengths(5, 300), lengths(1, 60), rate=9.0, seed=s), 0),
    "shared prefix": (
        lambda s: workloads.shared_prefix(40, 4, lengths(200, 200), lengths(3, 40), lengths(2, 30), rate=INF, seed=s),
        12,
    ),
    "multi-turn": (
        lambda s: workloads.multi_turn(
            20, lengths(1, 4), lengths(5, 90), lengths(1, 40), rate=6.0, system_tokens=64, pause_s=0.2, seed=s
        ),
        0,
    ),
}


def agree(name: str, num_pages: int, cost: MeasuredCost, *, overlap: bool) -> None:
    make, clients = WORKLOADS[name]
    shape = geometry(num_pages)
    for seed in range(2):
        real = run_engine(shape, make(seed), clients, cost, overlap=overlap)
        fleet = FleetSimulator(
            FleetOptions(
                num_replicas=1, geometry=shape, cost=cost, max_in_flight=clients, overlap=overlap, may_leap=False
            ),
            make_policy("round_robin"),
        )
        said = fleet.run(make(seed))
        assert said.num_preemptions == real["preemptions"]
        assert said.num_cached_tokens == real["cached"]
        assert said.num_steps == real["steps"]
        assert said.seconds == pytest.approx(real["seconds"], rel=1e-9)
        assert said.ttft.mean == pytest.approx(real["ttft"], rel=1e-9)
        assert said.latency.mean == pytest.approx(real["latency"], rel=1e-9)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [60, 400])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_simulator_takes_the_steps_of_the_engine(name: str, num_pages: int, overlap: bool):
    agree(name, num_pages, COST, overlap=overlap)


@pytest.mark.parametrize("name", ["all at once", "a closed loop", "shared prefix"])
def test_an_idle_engine_takes_its_time_to_take_requests_in(name: str):
    agree(name, 400, dataclasses.replace(COST, request=5e-4), overlap=True)


@pytest.mark.parametrize("name", ["at a rate", "multi-turn"])
def test_an_idle_engine_warms_up_again(name: str):
    cost = dataclasses.replace(COST, idle=(0.01, 0.1), warm_ups=(0.002, 0.05))
    agree(name, 400, cost, overlap=True)
    make, _ = WORKLOADS[name]
    seconds = [
        FleetSimulator(FleetOptions(num_replicas=1, geometry=geometry(400), cost=each), make_policy("round_robin"))
        .run(make(0))
        .ttft.mean
        for each in (COST, cost)
    ]
    assert seconds[1] > seconds[0]
