"""What the router knows of one worker: is it there, how busy is it, may it get a request now. No sockets.

Three things keep requests away: probes of /ready that fail, a circuit breaker that opens when requests fail, and
draining. The clock is given, so that all of it can be tested without waiting.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from jaxserve.routing.loads import load_score

_MAX_COOLDOWN_S = 30.0


class CircuitBreaker:
    """Closed: requests pass. Open: none, for the cooldown. Half open, after it: one, whose end decides.

    `failures` in a row open it; each opening that follows a failed trial doubles the cooldown.
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._first_cooldown_s = cooldown_s
        self._clock = clock
        self._num_failures = 0
        self._cooldown_s = cooldown_s
        self._open_until: float | None = None
        self._has_trial = False

    @property
    def state(self) -> str:
        """One of "closed", "open", "half_open"."""
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half_open"

    @property
    def open_until(self) -> float | None:
        return self._open_until

    @property
    def may_pass(self) -> bool:
        state = self.state
        return state == "closed" or (state == "half_open" and not self._has_trial)

    def passing(self) -> None:
        """A request is sent."""
        if self.state == "half_open":
            self._has_trial = True

    def succeeded(self) -> None:
        self._num_failures = 0
        self._cooldown_s = self._first_cooldown_s
        self._open_until = None
        self._has_trial = False

    def failed(self) -> None:
        self._num_failures += 1
        if self._open_until is not None and self._has_trial:
            self._cooldown_s = min(2 * self._cooldown_s, _MAX_COOLDOWN_S)
            self._open()
        elif self._open_until is None and self._num_failures >= self._limit:
            self._open()

    def ended_without_verdict(self) -> None:
        """A request ended for a reason that says nothing about the worker (its client left)."""
        self._has_trial = False

    def _open(self) -> None:
        self._has_trial = False
        self._open_until = self._clock() + self._cooldown_s


@dataclasses.dataclass(slots=True)
class WorkerCounts:
    """Since the worker was added. bytes_known: leading bytes of requests' prefixes that it was believed to have."""

    requests: int = 0
    failures: int = 0
    retries: int = 0
    bytes_sent: int = 0
    bytes_known: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker's /metrics said last."""

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    cache_usage: float = 0.0


class Worker:
    """name: its address. in_flight: requests of this router."""

    def __init__(
        self,
        name: str,
        *,
        breaker_failures: int,
        breaker_cooldown_s: float,
        probe_failures: int,
        max_in_flight: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.breaker = CircuitBreaker(breaker_failures, breaker_cooldown_s, clock)
        self.in_flight = 0
        self.is_draining = False
        self.is_ready = False  # until a probe has said so
        self.was_ready = False  # ever
        self.why_not_ready = "not asked yet"
        self.report = WorkerReport()
        self.max_rows: int | None = None  # requests it runs at once, once seen
        self._num_foreign = 0
        self.counts = WorkerCounts()
        self._num_failed_probes = 0
        self._probe_failures = probe_failures
        self._max_in_flight = max_in_flight

    @property
    def is_full(self) -> bool:
        return bool(self._max_in_flight) and self.in_flight >= self._max_in_flight

    @property
    def is_available(self) -> bool:
        """Whether it may get a request now."""
        return self.is_ready and not self.is_draining and not self.is_full and self.breaker.may_pass

    @property
    def takes_its_own(self) -> bool:
        """Whether it may get a request that no other worker can serve: also while it is drained."""
        return self.is_ready and not self.is_full and self.breaker.may_pass

    @property
    def score(self) -> int:
        """4 x waiting + running, of this router's requests (counted exactly) and those that others had sent when the
        worker was last asked."""
        total = self.in_flight + self._num_foreign
        num_waiting = max(0, total - self.max_rows) if self.max_rows else 0
        return load_score(total - num_waiting, num_waiting)

    def reported(self, report: WorkerReport) -> None:
        """The worker's own figures have come."""
        self.report = report
        self._num_foreign = max(0, report.num_running + report.num_waiting - self.in_flight)
        if report.num_waiting and report.num_running:
            # It would run more if it could. Memory may have been the limit this time: the most seen counts.
            self.max_rows = max(self.max_rows or 0, report.num_running)

    def probed(self, problem: str | None) -> None:
        """The outcome of a probe; None: it is ready."""
        if problem is None:
            self._num_failed_probes = 0
            self.is_ready, self.was_ready, self.why_not_ready = True, True, ""
            return
        self._num_failed_probes += 1
        if self._num_failed_probes >= self._probe_failures or not self.is_ready:
            self.is_ready, self.why_not_ready = False, problem

    def unreachable(self, problem: str) -> None:
        """A connection was refused: nothing is sent there until a probe succeeds."""
        self._num_failed_probes = self._probe_failures
        self.is_ready, self.why_not_ready = False, problem

    @property
    def state(self) -> str:
        """One word for people: ready, draining, not_ready, open (its circuit), half_open or full."""
        if self.is_draining:
            return "draining"
        if not self.is_ready:
            return "not_ready"
        if self.breaker.state != "closed":
            return self.breaker.state
        return "full" if self.is_full else "ready"
