"""In which order requests wait, and how large a chunk may be. Pure functions over plain data. No jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.request import Request
from jaxserve.scheduler.sequence import Sequence

# Under "lpm" a request that others have overtaken this often goes first, whatever it shares: nobody starves.
MAX_PASSED_OVER = 32
# Under "priority" one admission after so many others goes to the request that has waited longest: no class starves.
ADMISSIONS_PER_AGED = 16
# Samples that a scored prompt leaves to others: it takes one per token, and would keep everybody else from starting.
SAMPLES_LEFT_BY_SCORES = 4
# Tokens by which every running request may grow before a newcomer could lose its pages to it.
HEADROOM_TOKENS = 8
MAX_HEADROOM_DOUBLINGS = 5


def order_key(policy: str, request: Request, order: int, program_order: int) -> tuple[int, int, int]:
    """Smaller runs first, and is preempted last. `order` counts arrivals; program_order is that of the first request
    of the same program (the request's own if it has none): what has begun is finished first."""
    return (request.priority if policy == "priority" else 0, program_order, order)


def by_longest_prefix(candidates: Iterable[Sequence], matched: Callable[[Sequence], int]) -> list[Sequence]:
    """Longest cached prefix first; ties, and requests overtaken too often, in order of arrival."""
    rated = [(0, 0, s.key) if s.num_passed_over >= MAX_PASSED_OVER else (1, -matched(s), s.key) for s in candidates]
    return [s for _, s in sorted(zip(rated, candidates), key=lambda pair: pair[0])]


def count_passed_over(candidates: Iterable[Sequence], admitted: list[Sequence]) -> None:
    """Age those that still wait and that a later one has overtaken."""
    for sequence in candidates:
        if sequence.row < 0:
            sequence.num_passed_over += sum(other.key > sequence.key for other in admitted)


def chunk_size(missing: int, budget: int, free_samples: int, scores: bool, num_at_end: int = 1) -> int:
    """How many of `missing` tokens of a prompt to compute now.

    The chunk that ends the prompt needs num_at_end samples; a prompt that is scored needs one for every token before.
    """
    size = min(missing, budget)
    if scores:
        size = min(size, max(min(free_samples, 1), free_samples - SAMPLES_LEFT_BY_SCORES))
        if size == missing and size - 1 + num_at_end > free_samples:
            size -= 1
        return size
    if size == missing and free_samples < num_at_end:
        return size - 1
    return size


def headroom_pages(num_running: int, num_preemptions: int, page_size: int) -> int:
    """Pages that must stay available when one more request is admitted; twice as many after each preemption of it."""
    tokens = HEADROOM_TOKENS << min(num_preemptions, MAX_HEADROOM_DOUBLINGS)
    return num_running * -(-tokens // page_size)
