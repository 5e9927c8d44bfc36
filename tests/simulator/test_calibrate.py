"""Fitting step costs: what made the steps is found again, also from disturbed and incomplete ones."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.bench.calibrate import TimedStep, fit
from jaxserve.simulator.step_cost import MeasuredCost, StepLoad, decode_load

TRUE = MeasuredCost(
    buckets=(1, 2, 4, 8, 16, 32, 64, 128),
    bucket_seconds=(0.010, 0.011, 0.012, 0.014, 0.02, 0.03, 0.055, 0.1),
    context=2e-6,
    pair=3e-8,
    row=1e-4,
)


def steps(rng: np.random.Generator, count: int, *, noise: float, disturbed: float = 0.0) -> list[TimedStep]:
    found = []
    for _ in range(count):
        if rng.random() < 0.5:
            rows = int(rng.integers(1, 33))
            load = decode_load(rows, int(rows * rng.integers(10, 1500)))
        else:
            size, start = int(rng.integers(2, 129)), int(rng.integers(0, 1500))
            load = StepLoad(size, 0, 1, start + size, size * (start + size / 2), 1)
        seconds = TRUE.seconds(load) * float(rng.lognormal(0, noise))
        if rng.random() < disturbed:
            seconds *= float(rng.uniform(3, 20))
        found.append(TimedStep(load, seconds))
    return found


def error(cost: MeasuredCost) -> float:
    """The largest relative error over loads that were not among the steps."""
    loads = [decode_load(rows, rows * context) for rows in (1, 3, 16, 32) for context in (50, 400, 1200)]
    loads += [StepLoad(size, 0, 1, size + 600, size * (600.0 + size / 2), 1) for size in (8, 40, 128)]
    return max(abs(cost.seconds(load) / TRUE.seconds(load) - 1) for load in loads)


def test_exact_steps_give_the_exact_cost():
    assert error(fit(steps(np.random.default_rng(0), 600, noise=0.0), TRUE.buckets)) < 0.005


def test_noise_and_disturbed_steps_do_little_harm():
    assert error(fit(steps(np.random.default_rng(1), 800, noise=0.1, disturbed=0.1), TRUE.buckets)) < 0.15


def test_buckets_that_were_never_seen_lie_between_and_beyond_the_others():
    seen = [s for s in steps(np.random.default_rng(2), 600, noise=0.0) if s.load.num_tokens <= 64]
    seen = [s for s in seen if not 8 < s.load.num_tokens <= 16]
    cost = fit(seen, TRUE.buckets)
    middle = cost.bucket_seconds[4]
    assert cost.bucket_seconds[3] < middle < cost.bucket_seconds[5]
    assert cost.bucket_seconds[7] == pytest.approx(2 * cost.bucket_seconds[6])


def test_slopes_are_never_negative():
    rng = np.random.default_rng(3)
    flat = [TimedStep(decode_load(r, r * c), 0.01 * (1 - 1e-4 * c)) for r in range(1, 9) for c in range(0, 600, 60)]
    cost = fit(flat + steps(rng, 0, noise=0.0), TRUE.buckets)
    assert min(cost.context, cost.pair, cost.row) >= 0


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="20 or more"):
        fit(steps(np.random.default_rng(4), 5, noise=0.0), TRUE.buckets)


def test_pauses_cost_their_median_and_longer_ones_never_less():
    pauses = [(0.2, 0.02), (0.05, 0.01), (0.2, 0.9), (0.2, 0.03), (1.0, 0.025)]
    cost = fit(steps(np.random.default_rng(5), 100, noise=0.0), TRUE.buckets, pauses=pauses)
    assert (cost.idle, cost.warm_ups) == ((0.05, 0.2, 1.0), (0.01, 0.03, 0.03))
    assert [cost.warm_up(idle) for idle in (0.0, 0.025, 5.0)] == pytest.approx([0.0, 0.005, 0.03])
