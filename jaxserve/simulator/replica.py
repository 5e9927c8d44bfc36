"""One engine in virtual time: the real scheduler and cache, a cost model for the device. No jax.

Runs of steps in which nothing but decoding happens are taken at once (a leap). What a leap leaves behind is what the
same steps one by one would have left; tests hold it to that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve.request import Request
from jaxserve.scheduler.decision import CacheGeometry, StepDecision, StepResult
from jaxserve.scheduler.leap import leap, longest_leap
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.statistics import Histogram
from jaxserve.simulator.step_cost import StepCost, decode_load, load_of

SAMPLED_TOKEN = 7  # what every simulated step samples


@dataclasses.dataclass(slots=True)
class _Leap:
    start: float
    seconds: float  # of each step
    count: int
    num_rows: int


class Replica:
    """Driven by events: add() when a request arrives, end_step() at the time that next_end says.

    on_first, on_done   told of a request's first and last token, with the time
    gaps                time between two tokens of a running request
    """

    def __init__(
        self,
        name: str,
        geometry: CacheGeometry,
        cost: StepCost,
        *,
        policy: str = "fcfs",
        prefix_cache: bool = True,
        may_leap: bool = True,
        on_first: Callable[[Request, float], None],
        on_done: Callable[[Request, float], None],
        gaps: Histogram | None = None,
    ) -> None:
        self.name = name
        self.scheduler = Scheduler(geometry, policy=policy, prefix_cache=prefix_cache)
        self.next_end: float | None = None  # None: idle
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.page_seconds = 0.0  # pages held by requests, times seconds
        self._geometry = geometry
        self._cost = cost
        self._may_leap = may_leap
        self._on_first, self._on_done = on_first, on_done
        self._gaps = gaps or Histogram()
        self._step: StepDecision | None = None
        self._leap: _Leap | None = None
        self._tokens = np.full(geometry.max_num_samples, SAMPLED_TOKEN, np.int32)

    def add(self, request: Request, now: float) -> None:
        """A request arrives. Raises ValueError if it could never run."""
        if self._leap is not None:
            # The leap ends with the step that is under way now: the next one may admit the newcomer.
            leap = self._leap
            done = min(leap.count, max(1, int((now - leap.start) / leap.seconds) + 1))
            leap.count = done
            self.next_end = leap.start + done * leap.seconds
        self.scheduler.add(request)
        if self.next_end is None:
            self._start(now)

    def end_step(self) -> None:
        """The step (or leap) under way ends at next_end; the next one begins."""
        now = self.next_end
        assert now is not None
        if self._leap is not None:
            self._end_leap(self._leap)
            self._leap = None
        elif self._step is not None:
            self._end_one(self._step, now)
            self._step = None
        self._start(now)

    def _end_one(self, decision: StepDecision, now: float) -> None:
        result = StepResult(decision.step_id, self._tokens[: len(decision.samples)])
        for event in self.scheduler.apply(decision, result):
            request = event.request
            if len(request.output_ids) == 1:
                self._on_first(request, now)
            if request.finish_reason is not None:
                self._on_done(request, now)

    def _start(self, now: float) -> None:
        if not self.scheduler.has_work:
            self.next_end = None
            return
        if self._may_leap and self._try_leap(now):
            return
        decision = self.scheduler.schedule()
        if decision is None:
            raise RuntimeError(f"{self.name}: nothing can run: {self.scheduler.stats()}")
        seconds = self._cost.seconds(load_of(decision))
        if decision.num_decodes:
            self._gaps.add(seconds, decision.num_decodes)
        self._step = decision
        self.num_steps += 1
        self._account(seconds)
        self.next_end = now + seconds

    def _account(self, seconds: float) -> None:
        held = self._geometry.num_pages - 1 - self.scheduler.cache.num_available
        self.busy_seconds += seconds
        self.page_seconds += held * seconds

    # ------------------------------------------------------------------ leaps

    def _try_leap(self, now: float) -> bool:
        """Begin a run of decoding steps, if nothing else can happen in them."""
        count, context = longest_leap(self.scheduler)
        if count < 2:
            return False
        num_rows = self.scheduler.stats().num_running
        # A step's cost grows evenly with its context: the mean of first and last is the mean of all.
        first = self._cost.seconds(decode_load(num_rows, context))
        last = self._cost.seconds(decode_load(num_rows, context + (count - 1) * num_rows))
        self._leap = _Leap(now, (first + last) / 2, count, num_rows)
        self.next_end = now + self._leap.seconds * count
        return True

    def _end_leap(self, run: _Leap) -> None:
        leap(self.scheduler, run.count, SAMPLED_TOKEN)
        self._gaps.add(run.seconds, run.num_rows * run.count)
        self.num_steps += run.count
        self._account(run.seconds * run.count)
