"""One scheduler over several ranks, without a device: placement, moves, balance, books."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.dp_placement import compare, workloads
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry, RankedDecision, RankedResult, StepResult
from jaxserve.scheduler.dp_balance import RankedScheduler, token_limit

STEP = 64


def scheduler_of(num_ranks: int, **changes: int) -> RankedScheduler:
    wanted = {
        "num_pages": 65, "page_size": 4, "max_num_rows": 4, "max_num_samples": 8, "max_step_tokens": STEP,
        "max_model_len": 256, "num_ranks": num_ranks,
    }  # fmt: skip
    return RankedScheduler(CacheGeometry(**(wanted | changes)))


def request(number: int, prompt: list[int] | int, num_outputs: int = 4, **changes: object) -> Request:
    tokens = np.full(prompt, number % 1000, np.int32) if isinstance(prompt, int) else np.array(prompt, np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=num_outputs)
    return Request(number, tokens, params, number, len(tokens) + num_outputs, **changes)  # type: ignore[arg-type]


def answer(decision: RankedDecision) -> RankedResult:
    return RankedResult(
        decision.step_id,
        tuple(
            None if part is None else StepResult(part.step_id, np.full(len(part.samples), 7, np.int32))
            for part in decision.ranks
        ),
    )


def step(scheduler: RankedScheduler) -> RankedDecision:
    decision = scheduler.schedule()
    assert decision is not None
    scheduler.apply(decision, answer(decision))
    scheduler.check_integrity()
    return decision


def test_equal_requests_are_dealt_out() -> None:
    scheduler = scheduler_of(4)
    for number in range(8):
        scheduler.add(request(number, 10))
    assert [rank.num_waiting for rank in scheduler.ranks] == [2, 2, 2, 2]


def test_a_waiting_request_weighs_four_running_ones() -> None:
    scheduler = scheduler_of(2)
    for number in range(4):
        scheduler.add(request(number, 8, 20))
    step(scheduler)  # two run on each rank
    scheduler.add(request(10, 8))
    assert [rank.num_waiting for rank in scheduler.ranks] == [1, 0]
    scheduler.add(request(11, 8))
    scheduler.add(request(12, 8))
    # 2 + 4, 2 + 4: the next goes to the first again.
    assert [rank.num_waiting for rank in scheduler.ranks] == [2, 1]


def test_a_prefix_wins_until_its_rank_is_busier_than_the_prefix_is_worth() -> None:
    scheduler = scheduler_of(2)
    shared = list(range(100, 100 + STEP))  # a full step of prefill: worth one waiting request
    scheduler.add(request(0, [*shared, 1, 2, 3], 30))
    while scheduler.ranks[0].num_running == 0 or scheduler.ranks[0].demand()[1]:
        step(scheduler)
    homes = []
    for number in range(1, 5):
        scheduler.add(request(number, [*shared, number, number], 30))
        homes.append(scheduler._rank_of[number])
    # Rank 0: 1 running + 4 per waiting - 4 saved. Rank 1: 4 per waiting, and 4 saved once one of them is there.
    assert homes == [0, 1, 1, 0]


def test_other_namespaces_share_nothing() -> None:
    scheduler = scheduler_of(2)
    shared = list(range(100, 140))
    scheduler.add(request(0, shared, 30, namespace="a"))
    step(scheduler)
    assert scheduler.cost(request(1, [*shared, 5], namespace="b"), 0) == 1
    assert scheduler.cost(request(1, [*shared, 5], namespace="a"), 0) == 1 - 4 * 40 / STEP


def test_continuations_stay_together() -> None:
    scheduler = scheduler_of(4)
    parent = request(0, 10)
    scheduler.add(parent)
    for number in range(1, 4):
        scheduler.add(request(number, list(parent.prompt), index=number, parent=parent))
    assert [rank.num_waiting for rank in scheduler.ranks] == [4, 0, 0, 0]


def test_waiting_requests_move_to_a_rank_that_became_idle() -> None:
    scheduler = scheduler_of(2, max_num_rows=2)
    for number in range(8):
        scheduler.add(request(number, 8, 3 if number % 2 else 40))  # rank 1 is done soon
    while scheduler.ranks[1].num_running or scheduler.ranks[1].num_waiting:
        step(scheduler)
    assert (scheduler.num_moves, scheduler.ranks[0].num_waiting) == (0, 2)
    step(scheduler)
    step(scheduler)
    assert (scheduler.num_moves, scheduler.ranks[0].num_waiting) == (2, 0)


def test_moving_can_be_undone_by_nobody_but_the_rules() -> None:
    """A prefix that is worth more than the queue in front of it keeps its request where it is."""
    scheduler = scheduler_of(2, max_num_rows=1, num_pages=257)
    shared = list(range(100, 100 + 3 * STEP))
    scheduler.add(request(0, [*shared, 1], 30))
    for _ in range(5):
        step(scheduler)
    scheduler.add(request(1, [*shared, 2], 2))
    assert scheduler._rank_of[1] == 0
    step(scheduler)
    assert scheduler._rank_of[1] == 0 and scheduler.num_moves == 0


@pytest.mark.parametrize(
    "demands, expected",
    [
        ([(0, 64), (0, 0), (0, 0), (0, 0)], 64),  # nobody else works: nobody waits
        ([(0, 64), (4, 0), (4, 0), (4, 0)], 19),  # the mean
        ([(0, 64), (1, 0), (0, 0), (0, 0)], 17),
        ([(0, 40), (0, 0), (1, 0), (0, 0)], 16),  # no less than a quarter of a step
        ([(2, 64), (2, 64), (2, 64), (2, 64)], 64),  # all are full anyway
        ([(30, 64), (30, 0), (30, 0), (30, 0)], 39),
        ([(60, 64), (60, 0), (3, 0), (3, 0)], 61),  # and room for one token beside the decodes
    ],
)
def test_a_long_prompt_takes_chunks_while_others_decode(demands: list[tuple[int, int]], expected: int) -> None:
    assert token_limit(demands, 64) == expected


def test_steps_are_balanced_and_ranks_stay_together() -> None:
    scheduler = scheduler_of(4, num_pages=129)
    for number in range(3):
        scheduler.add(request(number, 4, 30))
    step(scheduler)
    scheduler.add(request(9, 200, 5))
    sizes = []
    while scheduler.has_work:
        decision = step(scheduler)
        sizes.append([0 if part is None else part.num_tokens for part in decision.ranks])
    assert max(sizes[0]) == 17  # 3 decodes and a prompt: the mean of 64, 1, 1, 1
    assert all(sum(size > 0 for size in row) >= 3 for row in sizes[:5])


def test_the_cost_finds_prefixes_as_the_longest_match_does_and_spreads_requests_as_the_score_does() -> None:
    """In virtual time, so the same on every machine. All chats share a system prompt."""
    few = workloads(120)
    prefixes, chats = (dict(compare(few[name])) for name in ("64 prefixes of 2048", "chats of 3 to 6 turns"))
    for found in (prefixes, chats):
        assert found["both"].hits > 1.5 * found["score"].hits
        assert found["both"].first_token < found["score"].first_token / 1.5
    assert chats["both"].between_tokens_p99 < chats["longest match"].between_tokens_p99 / 2
    assert chats["both"].between_tokens_p99 < chats["unbalanced"].between_tokens_p99 / 1.5


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_ends_and_loses_nothing(seed: int) -> None:
    """Two steps in flight, few pages, aborts: all requests end with the right number of tokens, and all pages are
    back."""
    random = np.random.default_rng(seed)
    scheduler = scheduler_of(3, num_pages=24, max_model_len=64)
    requests = [
        request(n, random.integers(0, 5, random.integers(1, 40)).tolist(), int(random.integers(1, 20)))
        for n in range(60)
    ]
    waiting, aborted, flying = list(requests), set(), []
    while waiting or scheduler.has_work or flying:
        for _ in range(random.integers(0, 4)):
            if waiting:
                scheduler.add(waiting.pop(0))
        if random.random() < 0.1:
            number = int(random.integers(0, 60))
            if scheduler.abort(number) is not None:
                aborted.add(number)
        while len(flying) < 2 and (decision := scheduler.schedule()) is not None:
            assert len(decision.ranks) == 3 and decision.num_tokens == sum(len(row.token_ids) for row in decision.rows)
            flying.append(decision)
        if flying:
            decision = flying.pop(0)
            scheduler.apply(decision, answer(decision))
        scheduler.check_integrity()
    for one in requests:
        assert one.number in aborted or len(one.output_ids) == one.params.max_tokens
    stats = scheduler.stats()
    assert stats.num_pages_held == 0 and stats.num_pages == 3 * 23 + 1
    assert stats.num_pages_cached + stats.num_pages_free == 3 * 23
