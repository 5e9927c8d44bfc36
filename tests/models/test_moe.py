"""Routers and experts against plain numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve.models.config import MoEConfig
from jaxserve.models.moe import ExpertWeights, combine, compute_experts, route, sort_by_expert

PLAIN = MoEConfig(num_experts=16, num_experts_per_token=3, intermediate_size=8)
ROUTERS = {
    "softmax": PLAIN,
    "softmax, not normalised": dataclasses.replace(PLAIN, normalize_top_k=False, routed_scale=4.0),
    "softmax of the chosen": dataclasses.replace(PLAIN, scoring="softmax_topk"),
    "sigmoid, corrected": dataclasses.replace(PLAIN, scoring="sigmoid", has_correction_bias=True, routed_scale=2.5),
    "best groups by maximum": dataclasses.replace(PLAIN, num_groups=4, num_chosen_groups=2),
    "best groups by two": dataclasses.replace(
        PLAIN, scoring="sigmoid", has_correction_bias=True, num_groups=4, num_chosen_groups=2, group_score="top2_sum"
    ),
}


def choose(logits: np.ndarray, correction: np.ndarray, moe: MoEConfig) -> tuple[list[int], np.ndarray]:
    """One token's experts and weights, in float64 and by sorting."""
    if moe.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum()
    ranked = scores + correction
    size = moe.num_experts // moe.num_groups
    groups = [sorted(ranked[g * size : (g + 1) * size], reverse=True) for g in range(moe.num_groups)]
    quality = [group[0] if moe.group_score == "max" else group[0] + group[1] for group in groups]
    best = sorted(range(moe.num_groups), key=lambda g: -quality[g])[: moe.num_chosen_groups]
    allowed = [e for e in range(moe.num_experts) if e // size in best]
    ids = sorted(allowed, key=lambda e: -ranked[e])[: moe.num_experts_per_token]
    weights = scores[ids]
    if moe.normalize_top_k or moe.scoring == "softmax_topk":
        weights = weights / weights.sum()
    return ids, weights * moe.routed_scale


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str) -> None:
    moe, random = ROUTERS[name], np.random.default_rng(7)
    logits = random.standard_normal((50, 16)).astype(np.float32)
    correction = 0.3 * random.standard_normal(16).astype(np.float32) * moe.has_correction_bias
    ids, weights = route(logits, moe, correction=correction if moe.has_correction_bias else None)
    for token in range(50):
        expected_ids, expected = choose(logits[token].astype(np.float64), correction.astype(np.float64), moe)
        assert ids[token].tolist() == expected_ids
        np.testing.assert_allclose(weights[token], expected, rtol=2e-6)


def test_an_expert_of_a_worse_group_is_never_chosen() -> None:
    """Even where every score of the chosen group is below zero."""
    moe = dataclasses.replace(PLAIN, num_experts_per_token=4, scoring="sigmoid", num_groups=4, num_chosen_groups=1)
    correction = jnp.full(16, -3.0).at[8:12].set(-2.0)
    ids, _ = route(jnp.zeros((1, 16)), moe, correction=correction)
    assert sorted(ids[0].tolist()) == [8, 9, 10, 11]


@pytest.mark.parametrize("first, count", [(0, 16), (8, 4)])
def test_sorting_keeps_the_experts_of_one_device_and_puts_the_others_last(first: int, count: int) -> None:
    ids = np.random.default_rng(1).integers(0, 17, (9, 3)).astype(np.int32)  # 16: a token that is padding
    order, sizes = (np.asarray(part) for part in sort_by_expert(ids, count, first))
    flat = ids.reshape(-1)
    assert sizes.tolist() == [int((flat == first + e).sum()) for e in range(count)]
    assert flat[order[: sizes.sum()]].tolist() == sorted(e for e in flat if first <= e < first + count)
    assert sorted(order) == list(range(27))


@pytest.mark.parametrize("limit", [0.0, 0.7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_equal_a_loop_over_tokens(limit: float, has_bias: bool) -> None:
    random = np.random.default_rng(2)
    num_tokens, k, count, size, hidden = 11, 2, 5, 32, 64

    def draw(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    x, gate_up, down = draw(num_tokens, hidden), draw(count, 2 * size, hidden), draw(count, hidden, size)
    gate_up_bias, down_bias = draw(count, 2 * size), draw(count, hidden)
    ids = random.integers(0, count, (num_tokens, k)).astype(np.int32)
    ids[-2:] = count  # padding
    x[-2:] = np.nan
    weights = np.abs(draw(num_tokens, k)) * (ids < count)

    @jax.jit
    def compute() -> jax.Array:
        order, sizes = sort_by_expert(ids, count)
        stacked = ExpertWeights(*(jnp.asarray(part) for part in (gate_up, down)))
        if has_bias:
            stacked = dataclasses.replace(
                stacked, gate_up_bias=jnp.asarray(gate_up_bias), down_bias=jnp.asarray(down_bias)
            )
        rows = jnp.asarray(x)[order // k]
        out = compute_experts(rows, sizes, stacked, activation="silu", swiglu_limit=limit, backend="xla")
        return combine(out, order, jnp.asarray(weights))

    expected = np.zeros((num_tokens, hidden))
    for token in range(num_tokens - 2):
        for expert, weight in zip(ids[token], weights[token]):
            both = gate_up[expert].astype(np.float64) @ x[token] + has_bias * gate_up_bias[expert]
            gate, up = both[:size], both[size:]
            if limit:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            else:
                inner = gate / (1 + np.exp(-gate)) * up
            expected[token] += weight * (down[expert].astype(np.float64) @ inner + has_bias * down_bias[expert])
    np.testing.assert_allclose(compute(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("changes, message", [
    ({"scoring": "hash"}, "scoring: got 'hash'; allowed: softmax, softmax_topk, sigmoid"),
    ({"num_experts_per_token": 17}, "num_experts_per_token: got 17; allowed: 1 to 16"),
    ({"num_groups": 3}, "num_groups: got 3; allowed: a divisor of 16"),
    ({"num_groups": 4, "num_chosen_groups": 5}, "num_chosen_groups: got 5; allowed: 1 to 4"),
    ({"num_groups": 8, "num_experts_per_token": 3}, "num_experts_per_token: got 3; allowed: 1 to 2"),
    ({"group_score": "mean"}, "group_score: got 'mean'"),
    ({"num_experts": 0}, "got 0, 8; allowed: 1 or more"),
])  # fmt: skip
def test_descriptions_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(PLAIN, **changes)
    assert message in str(caught.value)
