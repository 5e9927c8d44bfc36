"""deterministic=True: which buckets stay, and that those which stay agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from tiny_runner_model import VOCAB, build_runner

from jaxserve.runner.deterministic import NotDeterministic, keep_equal_buckets
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import RowWork, SampleWork, StepDecision

PARAMS = SamplingParams(temperature=0.9, top_p=0.9, logprobs=20)
Outcome = list[tuple[bytes, ...]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return build_runner(deterministic=True, dtype=request.param, max_num_rows=3, max_step_tokens=12)


def generate(runner: ModelRunner, chunk: int, neighbours: int, place: int) -> Outcome:
    """Bits of everything that six steps of one request return, beside neighbours that also prefill."""
    prompt = np.random.default_rng(0).integers(0, VOCAB, 19, np.int32)
    pages = np.arange(1 + 10 * place, 11 + 10 * place, dtype=np.int32)
    outcome: Outcome = []
    start, step = 0, 0
    while len(outcome) < 6:
        rows, samples, used = [], [], 0
        others = [p for p in range(3) if p != place][:neighbours]
        is_decode = start >= len(prompt)
        mine = np.array([-1], np.int32) if is_decode else prompt[start : start + chunk]
        for other in others:
            ids = np.random.default_rng(step).integers(0, VOCAB, 1 + (step + other) % 3, np.int32)
            rows.append(RowWork(50 + other, other, 0, ids, np.array([40 + other], np.int32)))
            samples.append(SampleWork(50 + other, other, used, 1, 3, 0, PARAMS))
            used += len(ids)
        at = 0 if is_decode else len(rows)
        rows.insert(at, RowWork(9, place, start, mine, pages))
        shift = 1 if is_decode else 0
        samples = [SampleWork(s.request_id, s.row, s.token_index + shift, 1, 3, 0, PARAMS) for s in samples]
        start += len(mine)
        if start >= len(prompt):
            index = 0 if is_decode else used + len(mine) - 1
            samples.insert(at, SampleWork(9, place, index, start, 77, len(outcome), PARAMS))
        decision = StepDecision(step, tuple(rows), int(is_decode), tuple(samples))
        result = runner.collect(runner.dispatch(decision))
        if start >= len(prompt):
            mine_at = 0 if is_decode else len(samples) - 1
            parts = (result.token_ids, result.logprobs, result.ranks, result.top_ids, result.top_logprobs)
            outcome.append(tuple(part[mine_at].tobytes() for part in parts))
        step += 1
    return outcome


def test_a_request_is_bitwise_the_same_in_any_company(runner: ModelRunner) -> None:
    alone = generate(runner, chunk=12, neighbours=0, place=0)
    for chunk, neighbours, place in ((1, 0, 1), (2, 0, 2), (5, 0, 0), (12, 0, 2), (1, 2, 0), (3, 1, 1), (6, 2, 2)):
        assert generate(runner, chunk, neighbours, place) == alone, (chunk, neighbours, place)


def test_the_largest_buckets_stay(runner: ModelRunner) -> None:
    assert runner.shapes.token_buckets[-1] == 12
    assert runner.shapes.sample_buckets == (3, 15)  # one for decodes, one for prefill: see keep_equal_buckets
    assert runner.shapes.prefill_samples == 15
    assert {key[1] for key in runner._steps.programs if key[0] == "forward"} == set(runner.shapes.token_buckets)


def nudged(program: Callable, factor: np.float32) -> Callable:
    """The program with its first result off by the last bit."""

    def call(*arguments):
        result = program(*arguments)
        if isinstance(result, jax.Array):
            return result * factor
        return (result[0] * factor, *result[1:])

    return call


def test_buckets_that_differ_in_the_last_bit_are_dropped(runner: ModelRunner) -> None:
    steps = runner._steps
    kept = runner.shapes
    whole = dict(steps.programs)
    factor = np.float32(1 + 2**-23)
    token = kept.token_buckets[0]
    try:
        steps.programs["forward", token] = nudged(whole["forward", token], factor)
        found = keep_equal_buckets(steps, parts_decodes=True)
    finally:
        steps.programs.update(whole)
    assert found.token_buckets == kept.token_buckets[1:]
    assert found.sample_buckets == kept.sample_buckets


@pytest.mark.parametrize("size", [3, 15])
def test_a_shape_that_disagrees_with_itself_is_an_error(runner: ModelRunner, size: int) -> None:
    steps = runner._steps
    whole = dict(steps.programs)
    slope = 1 + np.arange(size, dtype=np.float32)[:, None] * np.float32(2**-23)
    try:
        steps.programs["head", size] = nudged(whole["head", size], slope)
        with pytest.raises(NotDeterministic, match="deterministic=False"):
            keep_equal_buckets(steps, parts_decodes=True)
    finally:
        steps.programs.update(whole)
