"""A bounded record of the last steps: does the device ever wait for the host? No jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times are seconds of time.perf_counter().

    num_tokens, num_rows, num_decodes   of the decision
    dispatch_start, dispatch_end        the call that handed the step to the device
    collect_start, collect_end          the wait for its tokens
    queue_depth   later steps already dispatched when the wait began: 0 means that the device ran dry at its end
    host_seconds  host time between the previous dispatch and this one that was not spent waiting for the device;
                  NaN for the first step after an idle time
    """

    step_id: int
    num_tokens: int
    num_rows: int
    num_decodes: int
    dispatch_start: float
    dispatch_end: float
    collect_start: float
    collect_end: float
    queue_depth: int
    host_seconds: float


class StepTrace:
    """The last `capacity` steps, oldest first. Written by the loop; other threads read whole records."""

    def __init__(self, capacity: int = 4096) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def clear(self) -> None:
        self._records.clear()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))


def summarize(records: Iterable[StepRecord]) -> dict[str, float]:
    """Figures of a run of consecutive steps: medians and 99th percentiles in milliseconds, counts and shares.

    wait         for the tokens of a step, at its read
    period       between two dispatches; host: the part of it not spent waiting; host_share: sum of host over sum
                 of period. Steps that begin after an idle time have none
    num_reads_without_queue   reads at which no later step was in flight
    An empty input gives num_steps 0 alone.
    """
    steps = list(records)
    figures: dict[str, float] = {"num_steps": len(steps)}
    if not steps:
        return figures
    figures["num_reads_without_queue"] = sum(step.queue_depth == 0 for step in steps)
    figures["tokens_per_step"] = float(np.mean([step.num_tokens for step in steps]))
    waits = [step.collect_end - step.collect_start for step in steps]
    periods, hosts = [], []
    for before, step in itertools.pairwise(steps):
        if not np.isnan(step.host_seconds):
            periods.append(step.dispatch_end - before.dispatch_end)
            hosts.append(step.host_seconds)
    for name, seconds in (("wait", waits), ("period", periods), ("host", hosts)):
        if seconds:
            figures[f"{name}_ms_p50"] = float(np.median(seconds)) * 1e3
            figures[f"{name}_ms_p99"] = float(np.percentile(seconds, 99)) * 1e3
    if periods:
        figures["host_share"] = float(sum(hosts) / max(sum(periods), 1e-12))
    return figures
