"""Runs a scheduler against a simulated runner: arrivals and aborts in virtual time. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.request import Request, TokenEvent
from jaxserve.scheduler.decision import StepDecision, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.runner import SimulatedRunner


@dataclasses.dataclass(slots=True)
class Arrival:
    """A group of requests (the n continuations of one prompt) that arrives before step `step`.

    abort_after   steps until the client leaves; None: it stays
    """

    step: int
    requests: list[Request]
    abort_after: int | None = None


def drive(
    scheduler: Scheduler,
    runner: SimulatedRunner,
    arrivals: Sequence[Arrival],
    *,
    overlap: bool = True,
    on_idle: Callable[[], None] = lambda: None,
    on_events: Callable[[list[TokenEvent]], None] = lambda events: None,
) -> int:
    """Serve all arrivals (in order of step) to the end; on_idle is called whenever nothing is left to do, on_events
    with what each step brought.

    Returns the number of steps. Raises RuntimeError if the scheduler has work and finds none.
    """
    in_flight: list[tuple[StepDecision, StepResult]] = []
    leaving: dict[int, list[Request]] = {}
    step = next_arrival = 0
    while next_arrival < len(arrivals) or scheduler.has_work or in_flight:
        if not scheduler.has_work and not in_flight:
            on_idle()
            step = max(step, arrivals[next_arrival].step)
        while next_arrival < len(arrivals) and arrivals[next_arrival].step <= step:
            arrival = arrivals[next_arrival]
            next_arrival += 1
            for request in arrival.requests:
                scheduler.add(request)
            if arrival.abort_after is not None:
                leaving.setdefault(step + arrival.abort_after, []).extend(arrival.requests)
        for request in leaving.pop(step, ()):
            scheduler.abort(request.number)
        decision = scheduler.schedule()
        if decision is not None:
            in_flight.append((decision, runner.dispatch(decision)))
        elif not in_flight and scheduler.has_work:
            raise RuntimeError(f"nothing can run at step {step}: {scheduler.stats()}")
        if in_flight and (decision is None or len(in_flight) > overlap):
            done, handle = in_flight.pop(0)
            on_events(scheduler.apply(done, runner.collect(handle)))
        step += 1
    on_idle()
    return step
