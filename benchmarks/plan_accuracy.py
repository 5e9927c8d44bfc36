"""Is the simulator right? The same requests to the real engine and to the simulated one, five workloads.

    python benchmarks/plan_accuracy.py [--model smollm2-135m | --small] [--rounds 5] [--clock wall | cpu] [--json FILE]

The engine runs in this process on wall-clock time, the simulator on costs measured by the same process right before
and right after (jaxserve/bench/calibrate.py, on other requests than those that are predicted). Half of the shapes come
before and half after: a shared machine changes its speed from minute to minute, so the two have to lie close together.
Throughput and mean time to first token are compared; the figure is the median over rounds of predicted / measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxserve.bench.calibrate import StepTimer, TimedStep, fit, time_pauses, time_steps
from jaxserve.bench.report import describe_machine
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine_process import build_engine
from jaxserve.messages import AddRequest
from jaxserve.routing.policy import make_policy
from jaxserve.sampling_params import SamplingParams
from jaxserve.simulator import workloads
from jaxserve.simulator.fleet import FleetOptions, FleetSimulator
from jaxserve.simulator.workloads import Conversation, Lengths

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))
from small_model import write_small_model

INF = float("inf")


def lengths(low: int, high: int) -> Lengths:
    return Lengths(low=low, high=high)


# name -> (maker of conversations, clients of a closed loop or 0)
WORKLOADS: dict[str, tuple[Callable[[int], Iterable[Conversation]], int]] = {
    "decode": (lambda s: workloads.unique(32, lengths(16, 64), lengths(40, 80), rate=INF, seed=s), 16),
    "prefill": (lambda s: workloads.unique(24, lengths(200, 700), lengths(4, 8), rate=INF, seed=s), 4),
    "mixed, at a rate": (lambda s: workloads.unique(30, lengths(32, 256), lengths(8, 48), rate=1.5, seed=s), 0),
    "shared prefix": (
        lambda s: workloads.shared_prefix(
            40, 5, lengths(400, 400), lengths(16, 64), lengths(8, 32), rate=INF, seed=s
        ),
        8,
    ),
    "multi-turn": (
        lambda s: workloads.multi_turn(
            10, lengths(2, 4), lengths(20, 80), lengths(10, 40), rate=2.0, system_tokens=128, pause_s=0.5, seed=s
        ),
        0,
    ),
}  # fmt: skip


@dataclasses.dataclass
class Measured:
    seconds: float
    num_tokens: int
    num_cached: int
    num_prompt: int
    ttft: list[float]

    @property
    def rate(self) -> float:
        return (self.num_prompt + self.num_tokens) / self.seconds


class Clock:
    """Seconds since the start; CPU seconds of this process, if asked for."""

    def __init__(self, uses_cpu: bool) -> None:
        self.read = time.process_time if uses_cpu else time.perf_counter
        self._uses_cpu = uses_cpu
        self._begin = self.read()

    def now(self) -> float:
        return self.read() - self._begin

    def rest(self, seconds: float) -> None:
        """Nothing is to be done for so long."""
        if self._uses_cpu:
            self._begin -= max(seconds, 0.0)
        else:
            time.sleep(min(max(seconds, 0.0), 0.005))


def run_real(engine: Engine, conversations: Iterable[Conversation], clients: int, uses_cpu: bool) -> Measured:
    """Conversations in real time, as FleetSimulator runs them in virtual time."""
    vocab = engine.model.vocab_size
    conversations = list(conversations)
    # Made before the clock starts: the simulator does not charge for them either.
    ids = {
        part: (part.tokens() % (vocab - 1000) + 1000).tolist()
        for conversation in conversations
        for turn in conversation.turns
        for part in turn.new
    }
    waiting: list[tuple[float, int, Conversation, int, list[int]]] = []
    for number, conversation in enumerate(conversations):
        heapq.heappush(waiting, (conversation.start, number, conversation, 0, []))
    live: dict[str, tuple[float, Conversation, int, list[int], list[int]]] = {}
    before = engine.stats()
    found = Measured(0.0, 0, 0, 0, [])
    clock = Clock(uses_cpu)
    tie = len(waiting)
    while waiting or live:
        now = clock.now()
        while waiting and waiting[0][0] <= now and not (clients and len(live) >= clients):
            due, _, conversation, turn, history = heapq.heappop(waiting)
            prompt = history + [token for part in conversation.turns[turn].new for token in ids[part]]
            num_output = conversation.turns[turn].num_output
            name = f"{time.perf_counter_ns()}"
            params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
            engine.handle(AddRequest(request_id=name, prompt=prompt, params=params))
            live[name] = (now if clients else due, conversation, turn, prompt, [])
        if not engine.has_work:
            clock.rest(waiting[0][0] - now)
            continue
        for output in engine.step():
            start, conversation, turn, prompt, answer = live[output.request_id]
            now = clock.now()
            if not answer:
                found.ttft.append(now - start)
            answer.extend(output.token_ids)
            if output.finish_reason is None:
                continue
            assert output.finish_reason == "length", output
            del live[output.request_id]
            found.num_tokens += len(answer)
            if turn + 1 < len(conversation.turns):
                tie += 1
                due = now + conversation.turns[turn + 1].pause
                heapq.heappush(waiting, (due, tie, conversation, turn + 1, prompt + answer))
    found.seconds = clock.now()
    after = engine.stats()
    found.num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
    found.num_cached = after.num_cached_tokens - before.num_cached_tokens
    engine.flush_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--small", action="store_true", help="a small random Llama instead of --model")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    uses_cpu = options.clock == "cpu"
    if uses_cpu:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_small_model(Path(folder), hidden=256, layers=4)) if options.small else options.model
        engine = build_engine(EngineConfig(model=model, max_model_len=2048, kv_cache_bytes=100 * 2**20))
    timer = StepTimer(engine, time.process_time if uses_cpu else time.perf_counter)
    buckets = timer.runner.shapes.token_buckets
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in WORKLOADS}
    rows = []
    seed = 0

    def time_half(seed: int) -> tuple[list[TimedStep], list[tuple[float, float]]]:
        """Steps of every second shape, and pauses: CPU seconds do not see these."""
        found = time_steps(engine, timer, rounds=1, seed=seed, part=seed % 2, parts=2)
        return found, [] if uses_cpu else time_pauses(engine, timer, rounds=2, seed=seed)

    steps, pauses = time_half(seed)
    for round_number in range(options.rounds):
        for name, (make, clients) in WORKLOADS.items():
            seed += 1
            engine.flush_cache()
            timer.steps.clear()
            real = run_real(engine, make(seed), clients, uses_cpu)
            later = time_half(seed)
            engine.flush_cache()
            cost = fit(steps + later[0], buckets, request=timer.request_seconds, pauses=pauses + later[1])
            steps, pauses = later
            fleet = FleetSimulator(
                FleetOptions(num_replicas=1, geometry=engine.scheduler.geometry, cost=cost, max_in_flight=clients),
                make_policy("round_robin"),
            )
            said = fleet.run(make(seed))
            rate, ttft = said.total_rate / real.rate, said.ttft.mean / statistics.mean(real.ttft)
            ratios[name].append((rate, ttft))
            hits = real.num_cached / max(real.num_prompt, 1)
            rows.append({"round": round_number, "workload": name, "rate": rate, "ttft": ttft})
            print(
                f"{round_number} {name}: total tok/s {said.total_rate:.0f} said, {real.rate:.0f} measured "
                f"({rate:.2f}); mean TTFT {said.ttft.mean:.3f} said, {statistics.mean(real.ttft):.3f} s measured "
                f"({ttft:.2f}); hits {said.hit_rate:.3f} said, {hits:.3f} measured",
                flush=True,
            )
    print("median of predicted / measured over rounds:")
    for name, values in ratios.items():
        rate, ttft = (statistics.median(column) for column in zip(*values))
        verdict = "within 15 %" if abs(rate - 1) <= 0.15 and abs(ttft - 1) <= 0.15 else "NOT within 15 %"
        print(f"  {name}: throughput {rate:.2f}, mean TTFT {ttft:.2f}: {verdict}")
    engine.close()
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
