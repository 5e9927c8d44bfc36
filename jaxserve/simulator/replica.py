"""One engine in virtual time: the real scheduler and cache, a cost model for the device. No jax.

Steps are decided, dispatched and read in the order of the engine (engine_steps.py): after a step has been read, the
next one is dispatched behind the one that the device runs meanwhile. A request that arrives during step n is therefore
computed by step n + 2 at the earliest, and a row that ends with step n is free from step n + 2 on.

Runs of steps in which nothing but decoding happens are taken at once (a leap). What a leap leaves behind is what the
same steps one by one would have left; tests hold it to that.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxserve.request import Request
from jaxserve.scheduler.decision import CacheGeometry, StepDecision, StepResult
from jaxserve.scheduler.leap import leap, longest_leap
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.statistics import Histogram
from jaxserve.simulator.step_cost import StepCost, decode_load, load_of, shared_tokens

SAMPLED_TOKEN = 7  # what every simulated step samples


class _Flight(NamedTuple):
    """A dispatched step whose tokens were not read yet; seconds that it takes once those before it are done."""

    decision: StepDecision
    seconds: float


@dataclasses.dataclass(slots=True)
class _Leap:
    start: float
    seconds: float  # of each step
    count: int
    num_rows: int


class Replica:
    """Driven by events: add() when a request arrives; at the time that next_end says end_step(), then, when all that
    arrives at that very time has been added, go_on().

    overlap             a step is dispatched before the one that runs has been read
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
        overlap: bool = True,
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
        self._depth = 2 if overlap else 1
        self._flying: deque[_Flight] = deque()  # the oldest is what the device computes
        self._last_end = 0.0  # of the step that was read last
        self._is_between = False  # from end_step() to go_on()
        self._leap: _Leap | None = None
        self._tokens = np.full(geometry.max_num_samples, SAMPLED_TOKEN, np.int32)

    def add(self, request: Request, now: float) -> None:
        """A request arrives. Raises ValueError if it could never run."""
        self.scheduler.add(request)
        if self._leap is not None:
            # The leap ends with the step that is under way now: the next decision may admit the newcomer.
            leap = self._leap
            leap.count = min(leap.count, max(1, int((now - leap.start) / leap.seconds) + 1))
            self.next_end = leap.start + leap.count * leap.seconds
        elif not self._flying and not self._is_between:
            # Wakes up, and takes in all that arrives until it has done so.
            if self.next_end is None:
                self.next_end = now + self._cost.warm_up(now - self._last_end)
            self.next_end += self._cost.request

    def end_step(self) -> None:
        """What is under way ends at next_end: its tokens are read."""
        now = self.next_end
        assert now is not None
        self.next_end, self._is_between, self._last_end = None, True, now
        if self._leap is not None:
            self._end_leap(self._leap)
        elif self._flying:
            self._end_one(self._flying.popleft().decision, now)

    def go_on(self, now: float) -> None:
        """Dispatch what can run; the oldest step in flight begins."""
        self._is_between = False
        if self._may_leap and self._try_leap(now):
            return
        while len(self._flying) < self._depth and (decision := self.scheduler.schedule()) is not None:
            self._flying.append(_Flight(decision, self._seconds(decision)))
        if not self._flying:
            if self.scheduler.has_work:
                raise RuntimeError(f"{self.name}: nothing can run: {self.scheduler.stats()}")
            return
        decision, seconds = self._flying[0]
        if decision.num_decodes:
            self._gaps.add(seconds, decision.num_decodes)
        self.num_steps += 1
        self._account(seconds)
        self.next_end = now + seconds

    def _end_one(self, decision: StepDecision, now: float) -> None:
        result = StepResult(decision.step_id, self._tokens[: len(decision.samples)])
        for event in self.scheduler.apply(decision, result):
            request = event.request
            if len(request.output_ids) == 1:
                self._on_first(request, now)
            if request.finish_reason is not None:
                self._on_done(request, now)

    def _seconds(self, decision: StepDecision) -> float:
        return self._cost.seconds(load_of(decision, self._geometry.page_size))

    def _account(self, seconds: float) -> None:
        held = self._geometry.num_pages - 1 - self.scheduler.cache.num_available
        self.busy_seconds += seconds
        self.page_seconds += held * seconds

    # ------------------------------------------------------------------ leaps

    def _try_leap(self, now: float) -> bool:
        """Begin a run of decoding steps, if nothing else can happen in them."""
        if len(self._flying) != self._depth - 1:
            return False
        count, context, tables = longest_leap(self.scheduler, self._flying[0].decision if self._flying else None)
        if count < 2:
            return False
        num_rows = len(tables)
        # A step's cost grows evenly with its context: that of the middle is the mean of all.
        middle = context + (count - 1) * num_rows / 2
        load = decode_load(num_rows, middle, shared_tokens(tables, self._geometry.page_size))
        self._leap = _Leap(now, self._cost.seconds(load), count, num_rows)
        self.next_end = now + self._leap.seconds * count
        return True

    def _end_leap(self, run: _Leap) -> None:
        self._leap = None
        decision = leap(
            self.scheduler, run.count, SAMPLED_TOKEN, self._flying.popleft().decision if self._flying else None
        )
        if decision is not None:
            self._flying.append(_Flight(decision, self._seconds(decision)))
        self._gaps.add(run.seconds, run.num_rows * run.count)
        self.num_steps += run.count
        self._account(run.seconds * run.count)
