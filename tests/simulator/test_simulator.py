"""The simulated runner catches what it is there to catch; the stress run passes in all variants."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import CacheGeometry, PageCopy, RowReset, RowWork, SampleWork, StepDecision
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.drive import Arrival, drive
from jaxserve.simulator.runner import CostModel, SimulatedRunner, expected_scores, expected_tokens
from jaxserve.simulator.stress import StressOptions, check_request, make_arrivals, run_stress

SHAPE = CacheGeometry(
    num_pages=10, page_size=4, max_num_rows=4, max_num_samples=4, max_step_tokens=16, max_model_len=64
)  # fmt: skip
PLAIN = SamplingParams()
PENALISED = SamplingParams(presence_penalty=1.0)


def row(number: int, start: int, tokens: list[int], pages: list[int]) -> RowWork:
    return RowWork(number, number, start, np.array(tokens, np.int32), np.array(pages, np.int32))


def sample(number: int, token_index: int, position: int, params: SamplingParams = PLAIN) -> SampleWork:
    return SampleWork(number, number, token_index, position, 7, 0, params)


def decision(rows: list[RowWork], samples: list[SampleWork], num_decodes: int = 0, **fields: object) -> StepDecision:
    return StepDecision(1, tuple(rows), num_decodes, tuple(samples), **fields)


def tokens_of(runner: SimulatedRunner, *args: object, **fields: object) -> list[int]:
    return runner.collect(runner.dispatch(decision(*args, **fields))).token_ids.tolist()


# ---------------------------------------------------------------------- what it computes


def test_a_token_depends_on_every_token_its_place_and_the_seed():
    prompt = np.arange(1, 9, dtype=np.int32)
    base = expected_tokens(prompt, 7, 3, 2**31 - 1)
    for i in range(8):
        changed = prompt.copy()
        changed[i] += 1
        assert expected_tokens(changed, 7, 3, 2**31 - 1)[0] != base[0]
    assert expected_tokens(prompt[::-1].copy(), 7, 3, 2**31 - 1)[0] != base[0]
    assert expected_tokens(prompt, 8, 3, 2**31 - 1)[0] != base[0]
    assert expected_tokens(np.append(prompt, base[0]).astype(np.int32), 7, 2, 2**31 - 1) == base[1:]


def test_chunks_and_decodes_give_the_expected_tokens():
    runner = SimulatedRunner(SHAPE)
    prompt = np.arange(1, 8, dtype=np.int32)
    expected = expected_tokens(prompt, 7, 3, 1024)
    assert tokens_of(runner, [row(0, 0, [1, 2, 3, 4, 5], [3, 9])], []) == []
    assert tokens_of(runner, [row(0, 5, [6, 7], [3, 9])], [sample(0, 1, 7)]) == expected[:1]
    assert tokens_of(runner, [row(0, 7, [-1], [3, 9])], [sample(0, 0, 8)], 1) == expected[1:2]
    assert tokens_of(runner, [row(0, 8, [-1], [3, 9, 1])], [sample(0, 0, 9)], 1) == expected[2:]


def test_scores_come_from_the_history_before_the_token():
    runner = SimulatedRunner(SHAPE)
    prompt = np.arange(1, 5, dtype=np.int32)
    work = [
        msgspec.structs.replace(sample(0, i - 1, i), forced_token=int(prompt[i]), is_score=True) for i in range(1, 4)
    ]  # fmt: skip
    result = runner.dispatch(decision([row(0, 0, prompt.tolist(), [2])], work))
    assert result.token_ids.tolist() == [2, 3, 4]
    assert result.logprobs.tolist() == expected_scores(prompt, 7)


def test_the_clock_follows_the_cost_model():
    runner = SimulatedRunner(SHAPE, cost_model=CostModel(step=1.0, token=0.1, context_token=0.01))
    runner.dispatch(decision([row(0, 0, [1, 2], [1]), row(1, 0, [1, 2, 3], [2])], []))
    assert runner.now == pytest.approx(1.0 + 0.5 + 0.05)


# ---------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (decision([row(0, 0, [1, 2, 3], [5]), row(1, 0, [1], [5])], []), "two rows write one page"),
        (decision([row(0, 0, [1, 2, 3, 4, 5], [5])], []), "fewer pages"),
        (decision([row(0, 0, [1], [0])], []), "page outside 1 to 9"),
        (decision([row(0, 0, [1], [10])], []), "page outside 1 to 9"),
        (decision([row(0, 0, [-1], [1])], [], 1), "nobody has sampled"),
        (decision([row(0, 0, [1, -1], [1])], []), "LAST_TOKEN in a chunk"),
        (decision([row(0, 0, [1], [1]), row(0, 0, [1], [2])], []), "rows"),
        (decision([row(0, 0, [1], [1])], [sample(0, 0, 1), sample(0, 0, 1)]), "sampled rows"),
        (decision([row(0, 0, [1] * 17, [1, 2, 3, 4, 5])], []), "tokens"),
        (decision([row(0, 0, [1, 2], [1])], [], 1), "decodes first"),
        (decision([row(0, 0, [1], [1])], [sample(0, 0, 1)] * 5), "samples"),
        (decision([row(0, 63, [1, 2], list(range(1, 10)) * 2)], []), "length"),
        (decision([row(0, 0, [1, 2], [1])], [sample(0, 1, 3)]), "position 3, not 2"),
        (decision([row(0, 0, [1], [1])], [sample(0, 0, 1, PENALISED)]), "counts other tokens"),
    ],
)
def test_a_decision_that_breaks_a_rule_is_refused(bad: StepDecision, message: str):
    with pytest.raises(RuntimeError, match=message):
        SimulatedRunner(SHAPE).dispatch(bad)


def test_a_missing_copy_changes_the_tokens():
    results = []
    for copies in ((PageCopy(1, 2),), ()):
        runner = SimulatedRunner(SHAPE)
        runner.dispatch(decision([row(0, 0, [1, 2], [1])], []))
        results.append(
            tokens_of(runner, [row(0, 2, [5], [1]), row(1, 2, [6], [2])], [sample(1, 1, 3)], 2, copies=copies)
        )
    assert results[0] == expected_tokens(np.array([1, 2, 6], np.int32), 7, 1, 1024) != results[1]


def test_a_page_given_away_too_early_changes_the_tokens():
    runner = SimulatedRunner(SHAPE)
    runner.dispatch(decision([row(0, 0, [1, 2, 3, 4, 5], [1, 2])], []))
    runner.dispatch(decision([row(1, 0, [9, 9], [1])], []))
    expected = expected_tokens(np.array([1, 2, 3, 4, 5, 6], np.int32), 7, 1, 1024)
    assert tokens_of(runner, [row(0, 5, [6], [1, 2])], [sample(0, 0, 6)], 1) != expected


def test_counts_for_penalties_start_from_the_reset():
    runner = SimulatedRunner(SHAPE)
    resets = (RowReset(0, np.array([1], np.int32), np.array([2], np.int32)),)
    step = decision([row(0, 0, [1, 2], [1])], [sample(0, 1, 2, PENALISED)], resets=resets)
    runner.dispatch(step)
    runner.dispatch(decision([row(0, 2, [-1], [1])], [sample(0, 0, 3, PENALISED)], 1))
    with pytest.raises(RuntimeError, match="counts other tokens"):
        runner.dispatch(decision([row(0, 2, [3], [1])], [sample(0, 0, 3, PENALISED)], 1))


# ---------------------------------------------------------------------- whole runs

VARIANTS = {
    "default": {},
    "one-token pages": {"page_size": 1, "num_pages": 500},
    "large pages": {"page_size": 32, "num_pages": 60},
    "lpm": {"policy": "lpm"},
    "priority": {"policy": "priority", "page_size": 8, "num_pages": 240},
    "deterministic": {"deterministic": True},
    "no prefix cache": {"prefix_cache": False},
    "tiny budget": {"max_num_rows": 4, "max_step_tokens": 5, "num_pages": 90},
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stress(variant: str, overlap: bool):
    report = run_stress(StressOptions(1000, seed=3, overlap=overlap, **VARIANTS[variant]))
    assert report["requests"] == 1000
    assert report["idle points checked"] >= 2
    assert report["aborted"] and report["prompt scores"] and report["output tokens"] > 3000
    assert bool(report["cached prompt tokens"]) == (variant != "no prefix cache")


@pytest.mark.parametrize("overlap", [True, False])
def test_stress_with_preemptions(overlap: bool):
    options = {"num_pages": 40, "page_size": 8, "mean_output": 40.0}
    report = run_stress(StressOptions(600, seed=1, overlap=overlap, **options))
    assert report["requests"] == 600 and report["preemptions"] > 20


def test_tokens_do_not_depend_on_how_they_are_scheduled():
    def outputs(*, overlap: bool = True, **changes: object) -> list[list[int]]:
        options = StressOptions(300, seed=9, **changes)
        arrivals = [dataclasses.replace(arrival, abort_after=None) for arrival in make_arrivals(options)]
        shape = CacheGeometry(options.num_pages, options.page_size, 24, 24, options.max_step_tokens, 192)
        drive(
            Scheduler(shape, policy=options.policy, prefix_cache=options.prefix_cache),
            SimulatedRunner(shape, vocab_size=1000),
            arrivals,
            overlap=overlap,
        )
        return [request.output_ids for arrival in arrivals for request in arrival.requests]

    first = outputs()
    assert sum(map(len, first)) > 900
    assert outputs(overlap=False) == first
    assert outputs(page_size=1, num_pages=400, max_step_tokens=25) == first
    assert outputs(policy="lpm", num_pages=80) == first
    assert outputs(prefix_cache=False, max_step_tokens=1000) == first


def test_a_wrong_token_is_found():
    request = Request(0, np.arange(1, 4, dtype=np.int32), PLAIN, 7, 6)
    geometry = dataclasses.replace(SHAPE)
    drive(Scheduler(geometry), SimulatedRunner(geometry, vocab_size=1000), [Arrival(0, [request])])
    check_request(request)
    request.output_ids[1] += 1
    with pytest.raises(RuntimeError, match="request 0: tokens"):
        check_request(request)


def test_a_scheduler_that_finds_nothing_to_do_is_found():
    scheduler = Scheduler(SHAPE)
    scheduler.schedule = lambda: None
    with pytest.raises(RuntimeError, match="nothing can run"):
        drive(scheduler, SimulatedRunner(SHAPE), [Arrival(0, [Request(0, np.ones(3, np.int32), PLAIN, 1, 9)])])
