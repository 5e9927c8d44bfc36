"""Many decoding steps of a scheduler at once, for simulators. No jax.

A leap leaves the scheduler as the same steps one by one would have, when in all of them every running request gets one
token and nobody arrives, stops or is preempted. It is part of the scheduler: it moves what the scheduler keeps.

With overlap one step is in flight when a leap begins, and one when it ends: the same requests, so many tokens later.
"""

from __future__ import annotations

import numpy as np

from jaxserve.scheduler.decision import RowWork, SampleWork, StepDecision
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler

_NO_LEAP: tuple[int, int, list[np.ndarray]] = (0, 0, [])


def longest_leap(scheduler: Scheduler, in_flight: StepDecision | None = None) -> tuple[int, int, list[np.ndarray]]:
    """How many steps may be taken at once now (0: none), the tokens of context in the first of them, and the page
    table of each row, int32 [num_pages].

    in_flight is the only step dispatched and not applied, if there is one: the first of those taken. Requests end by
    their length alone: their stop tokens are never sampled.
    """
    running = scheduler._queues.running
    if scheduler._queues.waiting or not running or scheduler.deterministic:
        return _NO_LEAP
    num_pending = 0
    if in_flight is not None:
        num_pending = 1
        if not len(running) == in_flight.num_decodes == len(in_flight.rows):
            return _NO_LEAP
    count, context = 1 << 30, 0
    for sequence in running:
        if sequence.num_pending != num_pending or sequence.is_prefilling or sequence.tail_is_shared:
            return _NO_LEAP
        if not sequence.request.output_ids:
            return _NO_LEAP
        count = min(count, sequence.request.max_total_tokens - sequence.num_known)
        context += sequence.num_computed + 1 - num_pending
    # Each row may need a page for every page_size tokens, and one more. The last token of a request takes a real step.
    room = (scheduler.cache.num_available // len(running) - 1) * scheduler.geometry.page_size
    tables = [sequence.pages[: sequence.num_pages] for sequence in running]
    return max(0, min(count - 1, room)), context, tables


def leap(scheduler: Scheduler, count: int, token: int, in_flight: StepDecision | None = None) -> StepDecision | None:
    """Take `count` steps, at most longest_leap(), in which every running request samples `token`.

    Returns the step that is in flight afterwards, None if none was before.
    """
    plan = StepPlan(scheduler.geometry)
    for sequence in scheduler._queues.running:
        if not scheduler._pages.grow(sequence, count, plan):
            raise RuntimeError(f"no pages for {count} steps: {scheduler.stats()}")
        known = sequence.num_known
        sequence.tokens[known : known + count] = token
        sequence.num_known = known + count
        sequence.num_computed += count
        sequence.request.output_ids.extend([token] * count)
    scheduler._num_steps += count
    return None if in_flight is None else _later(scheduler, in_flight, count)


def _later(scheduler: Scheduler, decision: StepDecision, count: int) -> StepDecision:
    """The step that `count` steps after `decision` does the same for the same requests."""
    rows = []
    for work in decision.rows:
        sequence = scheduler._queues.by_number[work.request_id]
        pages = sequence.pages[: sequence.num_pages]
        rows.append(RowWork(work.request_id, work.row, work.start + count, work.token_ids, pages, work.pooling))
    samples = tuple(
        SampleWork(
            work.request_id, work.row, work.token_index, work.position + count, work.seed, work.num_outputs + count,
            work.params,
        )
        for work in decision.samples
    )  # fmt: skip
    return StepDecision(
        step_id=decision.step_id + count, rows=tuple(rows), num_decodes=decision.num_decodes, samples=samples
    )
