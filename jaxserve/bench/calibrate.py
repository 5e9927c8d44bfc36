"""Step costs of a real engine on this machine, for the simulator: `jaxserve plan MODEL --calibrate FILE`.

Seeded requests of many sizes are served by the engine in this process while every step is timed; the costs are the
means over steps of each bucket, and a fit of what depends on context. What is timed is the engine as it runs: two
steps under way, text made, host work included. Lone requests after pauses show what an idle engine loses.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.report import describe_machine
from jaxserve.bench.workloads import TokenSource
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AddRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.simulator.step_cost import MeasuredCost, StepLoad, load_of

_MIN_STEPS = 3  # of a bucket, for it to count
_SHAPES = (  # (rows at once, prompt tokens, output tokens): decodes of many widths, prefills alone and beside them
    (1, 24, 40), (1, 300, 12), (2, 60, 30), (4, 120, 30), (8, 40, 40), (8, 500, 16), (16, 60, 40), (24, 30, 30),
    (32, 40, 30), (4, 1000, 8), (12, 250, 24), (3, 7, 24), (6, 90, 20), (8, 420, 30), (4, 600, 24), (2, 400, 20),
)  # fmt: skip
_OF_BUCKET = (0.4, 0.8, 1.0)  # prompts alone that fill a bucket so far beyond the one below
_OUTPUTS_ALONE = 4
_PAUSES = (0.05, 0.2, 0.5, 1.0)  # seconds
_PROMPT_AFTER_PAUSE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TimedStep:
    """seconds: from the end of the step before to the end of this one, the host's reading of tokens."""

    load: StepLoad
    seconds: float


class StepTimer:
    """Stands between an engine and its runner and notes what each step took.

    clock   seconds; time.process_time on one core makes figures that neighbours on a shared machine do not change
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._engine = engine
        self.runner: Any = engine._steps._runner
        engine._steps._runner = self
        self.steps: list[TimedStep] = []
        self._requests: list[float] = []
        self._loads: list[tuple[StepLoad, float]] = []
        self._last_end = 0.0

    @property
    def request_seconds(self) -> float:
        """Median over the requests that were handled here; 0 without any."""
        return statistics.median(self._requests) if self._requests else 0.0

    def handle(self, message: AddRequest) -> None:
        """Give the engine a request, and note what that took."""
        start = self._clock()
        self._engine.handle(message)
        self._requests.append(self._clock() - start)

    def stop(self) -> None:
        self._engine._steps._runner = self.runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def dispatch(self, decision: Any) -> Any:
        start = self._clock()
        handle = self.runner.dispatch(decision)
        self._loads.append((load_of(decision, self._engine.scheduler.geometry.page_size), start))
        return handle

    def collect(self, handle: Any) -> Any:
        result = self.runner.collect(handle)
        end = self._clock()
        load, start = self._loads.pop(0)
        # A step begins when it is dispatched or when the one before it ends, whichever is later.
        self.steps.append(TimedStep(load, end - max(start, self._last_end)))
        self._last_end = end
        return result


def run_requests(engine: Engine, timer: StepTimer, requests: Sequence[tuple[Sequence[int], int]]) -> None:
    """Serve (prompt, output tokens) all at once, to the end."""
    for number, (prompt, num_output) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        timer.handle(AddRequest(request_id=f"{time.perf_counter_ns()}-{number}", prompt=list(prompt), params=params))
    while engine.has_work:
        engine.step()


def time_steps(
    engine: Engine, timer: StepTimer, *, rounds: int = 2, seed: int = 0, part: int = 0, parts: int = 1
) -> list[TimedStep]:
    """Serve every shape `rounds` times; their steps. With `parts`, only one shape in so many, from number `part` on: of
    two parts, each has prompts for every bucket above 2, which decodes fill."""
    geometry = engine.scheduler.geometry
    source = TokenSource((1 << 30, seed), engine.model.vocab_size)
    shapes = [(1, size, _OUTPUTS_ALONE) for size in _lone_prompts(timer.runner.shapes.token_buckets)]
    shapes += [(min(rows, geometry.max_num_rows), num_prompt, num_output) for rows, num_prompt, num_output in _SHAPES]
    timer.steps.clear()
    for _ in range(rounds):
        for rows, num_prompt, num_output in shapes[part::parts]:
            if num_prompt + num_output < geometry.max_model_len:
                # Outputs of different lengths: the number of rows falls one by one.
                requests = [(source.ids(num_prompt), num_output + 2 * row) for row in range(rows)]
                run_requests(engine, timer, requests)
    return list(timer.steps)


def time_pauses(engine: Engine, timer: StepTimer, *, rounds: int = 3, seed: int = 0) -> list[tuple[float, float]]:
    """(seconds of a pause, seconds by which a request takes longer after it than without it)."""
    source = TokenSource((1 << 31, seed), engine.model.vocab_size)

    def request_after(pause: float) -> float:
        prompt = source.ids(_PROMPT_AFTER_PAUSE)
        time.sleep(pause)
        start = time.perf_counter()
        run_requests(engine, timer, [(prompt, 1)])
        return time.perf_counter() - start

    found = []
    for _ in range(rounds):
        for pause in _PAUSES:
            warm = request_after(0.0)
            found.append((pause, request_after(pause) - warm))
    return found


def _lone_prompts(buckets: Sequence[int]) -> list[int]:
    """Lengths of prompts, a few for every bucket."""
    lower = (0, *buckets)
    return sorted(
        {max(1, round(low + share * (high - low))) for low, high in zip(lower, buckets) for share in _OF_BUCKET}
    )


def fit(
    steps: Sequence[TimedStep],
    buckets: Sequence[int],
    *,
    request: float = 0.0,
    pauses: Sequence[tuple[float, float]] = (),
    machine: str = "",
) -> MeasuredCost:
    """The cost model that fits timed steps: one number per bucket, slopes for context, pairs and rows, and the median
    of what was lost in each pause (a longer one never costs less).

    Slopes come from least squares over all steps, bounded below by 0; the number of a bucket is then the mean of what
    is left of its steps, without those above twice the median: they were disturbed. (A step that is read late because
    the next one has begun makes that one shorter: the mean keeps the sum right.) Buckets without steps lie between
    their neighbours. Raises ValueError if there are hardly any steps.
    """
    if len(steps) < 20:
        raise ValueError(f"steps: got {len(steps)}; allowed: 20 or more")
    index = np.searchsorted(np.asarray(buckets), [step.load.num_tokens for step in steps])
    seconds = np.array([step.seconds for step in steps])
    features = np.array([[step.load.context, step.load.pairs, step.load.num_rows] for step in steps], float)
    slopes = _slopes(index, seconds, features)
    rest = seconds - features @ slopes
    known = {b: _mean_of_undisturbed(rest[index == b]) for b in set(index.tolist()) if (index == b).sum() >= _MIN_STEPS}
    places = sorted(known)
    values = np.maximum.accumulate([max(known[place], 1e-6) for place in places])
    bases = np.interp([float(size) for size in buckets], [float(buckets[place]) for place in places], values)
    if places[-1] < len(buckets) - 1:
        # Beyond the largest step seen: in proportion to its size.
        top = places[-1]
        bases[top:] = [bases[top] * size / buckets[top] for size in buckets[top:]]
    idle = sorted({pause for pause, _ in pauses})
    lost = [statistics.median(seconds for pause, seconds in pauses if pause == length) for length in idle]
    return MeasuredCost(
        buckets=tuple(buckets),
        bucket_seconds=tuple(float(value) for value in bases),
        context=float(slopes[0]),
        pair=float(slopes[1]),
        row=float(slopes[2]),
        request=request,
        idle=tuple(idle),
        warm_ups=tuple(np.maximum.accumulate([0.0, *lost]).tolist()[1:]),
        machine=machine,
    )


def _mean_of_undisturbed(values: np.ndarray) -> float:
    median = np.median(values)
    return float(values[values <= median + abs(median)].mean())


def _slopes(index: np.ndarray, seconds: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Least squares with one intercept per bucket, steps weighted by 1 / time, slopes not negative."""
    weight = 1.0 / np.maximum(seconds, 1e-6)
    # Disturbed steps are left out: those far above the median of their bucket.
    median = {b: np.median(seconds[index == b]) for b in set(index.tolist())}
    kept = np.array([seconds[i] < 2.0 * median[b] for i, b in enumerate(index.tolist())])
    slopes = np.zeros(features.shape[1])
    active = list(range(features.shape[1]))
    one_hot = (index[:, None] == np.unique(index)[None, :]).astype(float)
    while active:
        matrix = np.hstack((features[:, active], one_hot))[kept] * weight[kept, None]
        solution = np.linalg.lstsq(matrix, seconds[kept] * weight[kept], rcond=None)[0][: len(active)]
        if (solution >= 0).all():
            slopes[active] = solution
            break
        active = [place for place, value in zip(active, solution) if value > 0]
    return slopes


def calibrate(config: EngineConfig) -> MeasuredCost:
    """Load the model, time it, fit."""
    from jaxserve.engine_process import build_engine

    engine = build_engine(config)
    try:
        return calibrate_engine(engine)
    finally:
        engine.close()


def calibrate_engine(engine: Engine, *, rounds: int = 2, seed: int = 0) -> MeasuredCost:
    """Time and fit an engine that is idle."""
    timer = StepTimer(engine)
    try:
        steps = time_steps(engine, timer, rounds=rounds, seed=seed)
        pauses = time_pauses(engine, timer, seed=seed)
    finally:
        timer.stop()
    machine = describe_machine()
    when = datetime.date.today().isoformat()
    name = f"{engine.model.name}, {engine.model.dtype}, {machine['processor']}, {when}"
    buckets = timer.runner.shapes.token_buckets
    return fit(steps, buckets, request=timer.request_seconds, pauses=pauses, machine=name)


def calibrate_to_file(model: str, path: Path) -> None:
    """`jaxserve plan MODEL --calibrate FILE`."""
    cost = calibrate(EngineConfig(model=model))
    path.write_text(json.dumps(dataclasses.asdict(cost), indent=1) + "\n")
    print(f"{path}: {cost.machine}; a step of one token {1e3 * cost.bucket_seconds[0]:.1f} ms", file=sys.stderr)
