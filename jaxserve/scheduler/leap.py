"""Many decoding steps of a scheduler at once, for simulators. No jax.

A leap leaves the scheduler as the same steps one by one would have, when in all of them every running request gets one
token and nobody arrives, stops or is preempted. It is part of the scheduler: it moves what the scheduler keeps.
"""

from __future__ import annotations

from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler


def longest_leap(scheduler: Scheduler) -> tuple[int, int]:
    """How many steps may be taken at once now (0: none), and the tokens of context that the first of them reads.

    Nothing may be in flight. Requests end by their length alone: their stop tokens are never sampled.
    """
    running = scheduler._running
    if scheduler._waiting or not running or scheduler.deterministic:
        return 0, 0
    count, context = 1 << 30, 0
    for sequence in running:
        if sequence.is_prefilling or sequence.tail_is_shared or sequence.num_pending or not sequence.request.output_ids:
            return 0, 0
        count = min(count, sequence.request.max_total_tokens - sequence.num_known)
        context += sequence.num_computed + 1
    # Each row may need a page for every page_size tokens, and one more. The last token of a request takes a real step.
    room = (scheduler.cache.num_available // len(running) - 1) * scheduler.geometry.page_size
    return max(0, min(count - 1, room)), context


def leap(scheduler: Scheduler, count: int, token: int) -> None:
    """Take `count` steps, at most longest_leap(), in which every running request samples `token`."""
    plan = StepPlan(scheduler.geometry)
    for sequence in scheduler._running:
        if not scheduler._pages.grow(sequence, count, plan):
            raise RuntimeError(f"no pages for {count} steps: {scheduler.stats()}")
        known = sequence.num_known
        sequence.tokens[known : known + count] = token
        sequence.num_known = known + count
        sequence.num_computed += count
        sequence.request.output_ids.extend([token] * count)
    scheduler._num_steps += count
