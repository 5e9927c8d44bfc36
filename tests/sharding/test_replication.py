"""Plans of copies: rules of any plan, and what it is worth."""

from __future__ import annotations

import numpy as np
import pytest
from jaxserve.sharding.replication import imbalance, plan_replicas


@pytest.mark.parametrize("seed", range(20))
def test_plans_keep_the_rules_and_balance(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_devices, experts = int(random.choice([2, 4, 8])), int(random.choice([16, 32, 64]))
    slots = experts // num_devices + int(random.integers(0, 4))
    load = random.zipf(1.6, experts).clip(max=10_000).astype(float)
    plan = plan_replicas(load, num_devices, slots)
    assert all(len(held) <= slots and len(set(held)) == len(held) for held in plan.experts_of)
    counted = np.bincount([expert for held in plan.experts_of for expert in held], minlength=experts)
    assert counted.min() >= 1
    assert counted.tolist() == list(plan.num_copies)
    work = np.array([sum(load[expert] / counted[expert] for expert in held) for held in plan.experts_of])
    assert work.sum() == pytest.approx(load.sum())
    assert work.max() / work.mean() == pytest.approx(plan.imbalance)
    assert plan.imbalance <= imbalance(load, num_devices) + 1e-9


def test_one_hot_expert_is_held_everywhere() -> None:
    load = np.ones(16)
    load[5] = 1000
    plan = plan_replicas(load, 4, 5)
    assert plan.num_copies[5] == 4
    assert plan.imbalance < 1.01 < 3.9 < imbalance(load, 4)


def test_an_idle_layer_needs_no_copies() -> None:
    plan = plan_replicas(np.zeros(8), 4, 3)
    assert plan.num_copies == (1,) * 8 and plan.imbalance == 1.0


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slots: got 4 devices of 1 slots; allowed: at least 8 in all"):
        plan_replicas(np.ones(8), 4, 1)
