"""Steps in flight: dispatched before the last one's tokens are read, read in order, timed. No text is made here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxserve.constraining import GrammarStage
from jaxserve.request import TokenEvent
from jaxserve.scheduler.decision import RankedDecision, Runner, StepDecision
from jaxserve.scheduler.dp_balance import RankedScheduler
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.trace import StepRecord, StepTrace


class _Flight(NamedTuple):
    """A dispatched step whose tokens were not read yet."""

    decision: StepDecision | RankedDecision
    handle: Any
    start: float
    end: float
    host_seconds: float


class StepPipeline:
    """At most `depth` steps in flight over one runner.

    A step with rows under a grammar is dispatched like any other, but sampled only once the tokens before it are
    known, because its masks depend on them.

    num_steps, num_prefill_tokens          steps read, prompt tokens dispatched
    num_dry_reads                          reads for which no later step was already dispatched
    step_seconds, host_seconds             between dispatch and read; between two dispatches without waiting
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler | RankedScheduler,
        grammars: GrammarStage,
        *,
        depth: int,
        trace_capacity: int,
    ) -> None:
        self.trace = StepTrace(trace_capacity)
        self.num_steps = self.num_prefill_tokens = self.num_dry_reads = 0
        self.step_seconds = self.host_seconds = 0.0
        self._runner = runner
        self._scheduler = scheduler
        self._grammars = grammars
        self._depth = depth
        self._flying: deque[_Flight] = deque()
        self._is_sampled = True  # False while the last step in flight waits for its masks
        self._last_dispatch = math.nan  # NaN after an idle time
        self._waited = 0.0  # seconds spent in collect() since the last dispatch

    @property
    def is_empty(self) -> bool:
        return not self._flying

    def rest(self) -> None:
        """Nothing is left to do: the time until the next step is nobody's."""
        self._last_dispatch = math.nan

    def dispatch(self) -> list[TokenEvent] | None:
        """Start one step; returns the tokens that grammars forced with it. None: no step may or can be started."""
        if len(self._flying) >= self._depth or not self._is_sampled:
            return None
        decision = self._scheduler.schedule()
        if decision is None:
            return None
        start = time.perf_counter()
        handle = self._runner.dispatch(decision)
        end = time.perf_counter()
        host_seconds = end - self._last_dispatch - self._waited
        if not math.isnan(host_seconds):
            self.host_seconds += host_seconds
        self._last_dispatch, self._waited = end, 0.0
        self._flying.append(_Flight(decision, handle, start, end, host_seconds))
        self.num_prefill_tokens += int(decision.num_tokens - decision.num_decodes)
        if decision.is_constrained:
            self._is_sampled = False
            if len(self._flying) == 1:  # nothing before it is unknown
                return self._sample()
        return []

    def collect(self, take_pooled: Callable[[StepDecision | RankedDecision, np.ndarray], None]) -> list[TokenEvent]:
        """Wait for the oldest step; returns its tokens. take_pooled gets the states [rows, hidden] of embeddings."""
        flight = self._flying.popleft()
        decision = flight.decision
        start = time.perf_counter()
        result = self._runner.collect(flight.handle)
        end = time.perf_counter()
        self._waited += end - start
        self.num_steps += 1
        self.step_seconds += end - flight.end
        self.num_dry_reads += not self._flying
        self.trace.append(
            StepRecord(
                step_id=decision.step_id,
                num_tokens=decision.num_tokens,
                num_rows=len(decision.rows),
                num_decodes=decision.num_decodes,
                dispatch_start=flight.start,
                dispatch_end=flight.end,
                collect_start=start,
                collect_end=end,
                queue_depth=len(self._flying),
                host_seconds=flight.host_seconds,
            )
        )
        if result.pooled is not None:
            take_pooled(decision, result.pooled)
        events = self._scheduler.apply(decision, result)
        if not self._is_sampled:
            events += self._sample()  # before any text is made: the device needs it first
        return events

    def _sample(self) -> list[TokenEvent]:
        """Start the sampling of the last step in flight; returns the tokens that grammars forced ahead."""
        flight = self._flying[-1]
        constraints, jumps = self._grammars.decide(flight.decision, self._scheduler.find)
        self._flying[-1] = flight._replace(handle=self._runner.sample(flight.handle, constraints))
        self._is_sampled = True
        return [event for number, tokens in jumps for event in self._scheduler.extend(number, tokens)]
