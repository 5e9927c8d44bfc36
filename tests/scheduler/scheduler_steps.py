"""A scheduler over the simulated runner, one step at a time, with everything that is promised of a step checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxserve.request import Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry, StepDecision, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.runner import SimulatedRunner, expected_tokens

VOCAB = 1000


def geometry(num_pages: int = 64, page_size: int = 4, **changes: int) -> CacheGeometry:
    fields = {"max_num_rows": 8, "max_num_samples": 8, "max_step_tokens": 32, "max_model_len": 512} | changes
    return CacheGeometry(num_pages=num_pages, page_size=page_size, **fields)


def prompt_of(length: int, first: int = 0) -> np.ndarray:
    """Prompts with different `first` share no page."""
    return ((np.arange(length) * 7 + first) % VOCAB).astype(np.int32)


@dataclasses.dataclass
class Flight:
    decision: StepDecision
    result: StepResult
    pages: list[np.ndarray]  # copies of every row's pages, as they were when the step was decided


class Steps:
    """depth 2 schedules the next step before the last one's tokens are applied, depth 1 after."""

    def __init__(self, shape: CacheGeometry | None = None, *, depth: int = 1, **options: Any) -> None:
        self.geometry = shape or geometry()
        self.scheduler = Scheduler(self.geometry, **options)
        self.runner = SimulatedRunner(self.geometry, vocab_size=VOCAB)
        self.depth = depth
        self.flights: list[Flight] = []
        self.events: list[TokenEvent] = []
        self.decisions: list[StepDecision] = []
        self._number = 0

    def add(self, prompt: np.ndarray, max_tokens: int = 4, *, n: int = 1, **options: Any) -> list[Request]:
        """Add n continuations; options of SamplingParams and of Request."""
        names = {"namespace", "priority", "eos_token_ids"}
        fields = {name: options.pop(name) for name in names & set(options)}
        params = SamplingParams(n=n, **options)
        group: list[Request] = []
        for index in range(n):
            request = Request(
                number=self._number,
                prompt=prompt,
                params=params,
                seed=1000 + self._number,
                max_total_tokens=len(prompt) + max_tokens,
                index=index,
                parent=group[0] if group else None,
                **fields,
            )
            self._number += 1
            self.scheduler.add(request)
            group.append(request)
        return group

    def add_one(self, prompt: np.ndarray, max_tokens: int = 4, **options: Any) -> Request:
        return self.add(prompt, max_tokens, **options)[0]

    def schedule(self) -> StepDecision | None:
        decision = self.scheduler.schedule()
        if decision is not None:
            pages = [row.pages.copy() for row in decision.rows]
            self.flights.append(Flight(decision, self.runner.dispatch(decision), pages))
            self.decisions.append(decision)
        return decision

    def apply(self) -> list[TokenEvent]:
        flight = self.flights.pop(0)
        for row, pages in zip(flight.decision.rows, flight.pages):
            assert np.array_equal(row.pages, pages), "pages of a step in flight were rewritten"
        events = self.scheduler.apply(flight.decision, flight.result)
        self.events += events
        return events

    def step(self) -> StepDecision | None:
        """One turn of the engine's loop; afterwards every page, row and request is accounted for."""
        decision = self.schedule()
        if self.flights and (decision is None or len(self.flights) >= self.depth):
            self.apply()
        self.scheduler.check_integrity()
        return decision

    def run(self, limit: int = 5000) -> int:
        """Steps until nothing is left; fails when a step finds nothing to do although requests wait."""
        for count in range(limit):
            if not self.scheduler.has_work and not self.flights:
                stats = self.scheduler.stats()
                assert stats.num_pages_held == 0
                assert stats.num_pages_free + stats.num_pages_cached == self.geometry.num_pages - 1
                return count
            before = len(self.flights)
            assert self.step() is not None or before, f"nothing can run: {self.scheduler.stats()}"
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")

    def scores_of(self, request: Request) -> dict[int, float | None]:
        return {e.prompt_index: e.logprob for e in self.events if e.request is request and e.prompt_index}


def check_tokens(*requests: Request) -> None:
    for request in requests:
        expected = expected_tokens(request.prompt, request.seed, len(request.output_ids), VOCAB)
        assert request.output_ids == expected, f"request {request.number}"
