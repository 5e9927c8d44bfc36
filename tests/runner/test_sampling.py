"""Sampling on the device against numpy float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runner import sampling
from jaxserve.runner.sampling import SampleInputs

ROWS = 6
NO_ROW = 99


def make_inputs(**columns: Any) -> SampleInputs:
    """ROWS rows of neutral random options; a scalar sets every row."""
    wanted: dict[str, Any] = {
        "row": (np.arange(ROWS), np.int32), "count_row": (NO_ROW, np.int32), "bias_row": (NO_ROW, np.int32),
        "position": (0, np.int32), "seed": (np.zeros((ROWS, 2)), np.uint32), "forced": (-1, np.int32),
        "top_k": (0, np.int32), "is_greedy": (0, np.int32), "inverse_temperature": (1.0, np.float32),
        "top_p": (1.0, np.float32), "log_min_p": (-np.inf, np.float32), "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32), "repetition": (1.0, np.float32),
    }  # fmt: skip
    built = {}
    for name, (default, dtype) in wanted.items():
        value = np.asarray(columns.get(name, default), dtype)
        built[name] = jnp.asarray(np.broadcast_to(value, (ROWS,)) if value.ndim == 0 else value)
    return SampleInputs(**built)


def kept_tokens(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities in float64 after truncation by full sorts; ties at a threshold are kept."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    keep = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        keep &= scaled >= np.sort(scaled)[-top_k]
    weight = np.where(keep, np.exp(scaled), 0.0)
    if top_p < 1.0:
        order = np.argsort(-weight, kind="stable")
        enough = np.searchsorted(np.cumsum(weight[order]), top_p * weight.sum())
        keep &= scaled >= scaled[order[min(enough, len(order) - 1)]]
    keep &= scaled >= (np.log(min_p) if min_p > 0 else -np.inf)
    weight = np.where(keep, np.exp(scaled), 0.0)
    return weight / weight.sum()


@functools.cache
def compiled_threshold(branch: bool):
    def run(logits: jax.Array, inputs: SampleInputs) -> jax.Array:
        blocks = sampling._blocks(logits)
        block_max = jnp.max(blocks, axis=-1)
        top = jnp.max(block_max, axis=-1)
        scale = sampling._Scale(top, inputs.inverse_temperature)
        threshold = sampling._threshold(blocks, block_max, scale, inputs, branch=branch)
        scaled = scale(blocks)
        keep = (scaled >= threshold[:, None, None]) & (jnp.exp(scaled) > 0)
        return keep.reshape(logits.shape[0], -1)[:, : logits.shape[1]]

    return jax.jit(run)


draw = jax.jit(functools.partial(sampling.draw_tokens, branch=True))


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("vocab", [40, 20_011])  # inside the candidates; over several candidate selections
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_the_kept_set_is_that_of_a_full_sort(vocab: int, spread: float, branch: bool) -> None:
    random = np.random.default_rng(int(vocab + 10 * spread))
    logits = (random.standard_normal((ROWS, vocab)) * spread).astype(np.float32)
    for top_k, top_p, min_p, temperature in (
        (0, 1.0, 0.0, 1.0), (1, 1.0, 0.0, 1.0), (5, 1.0, 0.0, 0.7), (700, 1.0, 0.0, 1.0),
        (vocab - 1, 1.0, 0.0, 1.0), (10**6, 1.0, 0.0, 1.0), (0, 1e-6, 0.0, 1.0), (0, 0.5, 0.0, 1.3),
        (0, 0.95, 0.0, 1.0), (0, 0.999, 0.0, 2.0), (30, 0.9, 0.0, 1.0), (9000, 0.9, 0.0, 1.0),
        (0, 1.0, 0.05, 1.0), (50, 0.9, 0.2, 0.5),
    ):  # fmt: skip
        inputs = make_inputs(
            top_k=0 if top_k >= vocab else top_k, top_p=top_p, inverse_temperature=1 / temperature,
            log_min_p=np.log(min_p) if min_p else -np.inf,
        )  # fmt: skip
        kept = np.asarray(compiled_threshold(branch)(logits, inputs))
        for row in range(ROWS):
            expected = kept_tokens(logits[row], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            wrong = kept[row] != (expected > 0)
            # float32 sums may place the edge one or two tokens away; their mass is what counts.
            assert expected[wrong].sum() < 1e-4, (top_k, top_p, min_p, temperature, row)
            if top_p == 1.0:
                assert not wrong.any(), (top_k, min_p, temperature, row, int(wrong.sum()))


def test_rows_with_different_options_do_not_touch_each_other() -> None:
    logits = (np.random.default_rng(3).standard_normal((ROWS, 9000)) * 2).astype(np.float32)
    top_k = np.array([0, 1, 40, 0, 5000, 0])
    top_p = np.array([1.0, 1.0, 0.9, 0.3, 1.0, 0.99])
    together = np.asarray(compiled_threshold(True)(logits, make_inputs(top_k=top_k, top_p=top_p)))
    for row in range(ROWS):
        alone = np.asarray(compiled_threshold(True)(logits, make_inputs(top_k=top_k[row], top_p=top_p[row])))
        np.testing.assert_array_equal(together[row], alone[row])


def test_ties_at_the_threshold_are_all_kept() -> None:
    logits = np.tile(np.repeat([3.0, 2.0, 1.0], [1, 4, 395]).astype(np.float32), (ROWS, 1))
    kept = np.asarray(compiled_threshold(True)(logits, make_inputs(top_k=3)))
    np.testing.assert_array_equal(kept.sum(axis=1), 5)
    equal = np.zeros((ROWS, 9000), np.float32)
    kept = np.asarray(compiled_threshold(True)(equal, make_inputs(top_k=3, top_p=0.5)))
    np.testing.assert_array_equal(kept.sum(axis=1), 9000)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard score of Pearson's statistic over tokens expected at least five times, the rest in one cell."""
    common = expected >= 5
    cells = np.append(counts[common], counts[~common].sum()), np.append(expected[common], expected[~common].sum())
    used = cells[1] > 0
    statistic = ((cells[0][used] - cells[1][used]) ** 2 / cells[1][used]).sum()
    freedom = used.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.7}],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    vocab, draws = 2500, 3000
    logits = (np.random.default_rng(5).standard_normal(vocab) * 2).astype(np.float32)
    inputs = {
        "top_k": options.get("top_k", 0), "top_p": options.get("top_p", 1.0),
        "inverse_temperature": 1 / options.get("temperature", 1.0),
        "log_min_p": np.log(options["min_p"]) if "min_p" in options else -np.inf,
    }  # fmt: skip
    counts = np.zeros(vocab)
    tiled = jnp.tile(jnp.asarray(logits), (ROWS, 1))
    for start in range(0, draws, ROWS):
        tokens = np.asarray(draw(tiled, make_inputs(position=start + np.arange(ROWS), **inputs)))
        np.add.at(counts, tokens, 1)
    expected = kept_tokens(logits, **options) * counts.sum()
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < 4.5


def test_seeds_and_positions_give_independent_draws() -> None:
    logits = jnp.zeros((ROWS, 4096), jnp.float32)
    by_position = [np.asarray(draw(logits, make_inputs(position=i * ROWS + np.arange(ROWS)))) for i in range(20)]
    seeds = [np.stack([np.zeros(ROWS), i * ROWS + np.arange(ROWS)], axis=1) for i in range(20)]
    by_seed = [np.asarray(draw(logits, make_inputs(seed=seed))) for seed in seeds]
    high = [np.asarray(draw(logits, make_inputs(seed=seed[:, ::-1]))) for seed in seeds]
    for drawn in (by_position, by_seed, high):
        assert len(np.unique(np.concatenate(drawn))) > 110  # of 120 over 4096 tokens; 118 expected
    assert (np.concatenate(by_seed) != np.concatenate(high)).sum() > 110


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros((ROWS, 1000), np.float32)
    logits[1, [400, 70, 999]] = 2.0
    logits[2, :] = -np.inf
    logits[2, 123] = -5.0
    expected = [0, 70, 123, 0, 0, 0]
    np.testing.assert_array_equal(jax.jit(sampling.greedy_tokens)(logits), expected)
    np.testing.assert_array_equal(draw(logits, make_inputs(is_greedy=1)), expected)


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-2])
def test_tiny_temperatures_take_the_largest_and_stay_finite(temperature: float) -> None:
    logits = (np.random.default_rng(1).standard_normal((ROWS, 3000)) * 5).astype(np.float32)
    logits[:, 7] = -np.inf
    logits[0] *= 1000
    logits[np.arange(ROWS), 11 * np.arange(ROWS)] = logits.max() + 1
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}):
        tokens = draw(logits, make_inputs(inverse_temperature=1 / temperature, **options))
        np.testing.assert_array_equal(tokens, 11 * np.arange(ROWS))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_broken_row_still_gives_a_token_of_the_vocabulary(value: float) -> None:
    logits = np.full((ROWS, 203), value, np.float32)
    for inputs in (make_inputs(), make_inputs(top_k=5, top_p=0.5), make_inputs(is_greedy=1)):
        tokens = np.asarray(draw(logits, inputs))
        assert ((tokens >= 0) & (tokens < 203)).all()


VOCAB = 70


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2.0),
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
)
def test_changed_logits_equal_a_loop_over_tokens(outputs, prompt, presence, frequency, repetition, allowed) -> None:
    logits = np.random.default_rng(len(outputs)).standard_normal((ROWS, VOCAB)).astype(np.float32) * 3
    counts = np.zeros((ROWS, VOCAB), np.int16)
    counts[2, sorted(set(prompt))] = -32768
    for token in outputs:
        counts[2, token] += 1
    bias = np.zeros((ROWS, VOCAB), np.float32)
    bias[2, ::3] = 1.5
    words = np.full((ROWS, 3), -1, np.int32)
    bits = sum(1 << token for token in allowed)
    words[2] = np.array([(bits >> (32 * i)) & 0xFFFFFFFF for i in range(3)], np.uint32).view(np.int32)
    rows = np.array([NO_ROW, NO_ROW, 2, NO_ROW, NO_ROW, NO_ROW])
    inputs = make_inputs(
        row=np.arange(ROWS),
        count_row=rows,
        bias_row=rows,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
    )
    last_token = np.arange(10, 10 + ROWS, dtype=np.int32)
    forbidden = np.full((ROWS, 4, 2), sampling.AFTER_NONE, np.int32)
    forbidden[2, :3] = [(sampling.AFTER_ANY, 7), (last_token[2], 20), (last_token[2] + 1, 21)]
    out = np.asarray(jax.jit(sampling.adjust_logits)(logits, inputs, counts, bias, words, last_token, forbidden))
    allowed = allowed - {7, 20}
    expected = []
    for token in range(VOCAB):
        value = float(logits[2, token])
        if token in outputs or token in prompt:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * outputs.count(token) + presence * (token in outputs)
        value += 1.5 if token % 3 == 0 else 0.0
        expected.append(value if token in allowed else -np.inf)
    np.testing.assert_allclose(out[2], expected, rtol=1e-5, atol=1e-5)
    others = np.arange(ROWS) != 2
    assert out[others].tobytes() == logits[others].tobytes()


def test_counts_grow_and_saturate() -> None:
    counts = np.zeros((3, VOCAB), np.int16)
    counts[1, 4] = 0x7FFF
    counts[1, 5] = np.uint16(0x8000 | 0x7FFF).view(np.int16)
    counts[0, 9] = -32768
    counted = jax.jit(sampling.count_tokens)
    out = np.asarray(counted(counts, jnp.array([1, NO_ROW, 0]), jnp.array([4, 6, 9])))
    out = np.asarray(counted(out, jnp.array([1, 2, NO_ROW]), jnp.array([5, 6, 9])))
    counts[0, 9], counts[2, 6] = -32767, 1
    np.testing.assert_array_equal(out, counts)


@pytest.mark.parametrize("vocab", [12, 3000])
def test_logprobs_ranks_and_best_tokens(vocab: int) -> None:
    logits = (np.random.default_rng(8).standard_normal((ROWS, vocab)) * 4).astype(np.float32)
    logits[0, [3, 8]] = logits[0].max() + 1  # equal best
    logits[1, 2] = -1e30
    tokens = np.array([3, 2, 5, 0, 1, 7], np.int32)
    named = np.tile(np.array([0, 11, 4], np.int32), ROWS)
    found = jax.device_get(jax.jit(sampling.token_logprobs)(logits, tokens, named))
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for row, token in enumerate(tokens):
        expected = max(exact[row, token], -9999.0)
        assert found.token[row] == pytest.approx(expected, abs=2e-5)
        assert found.rank[row] == 1 + (logits[row] > logits[row, token]).sum()
        order = np.argsort(-logits[row], kind="stable")[:20]
        np.testing.assert_array_equal(found.top_ids[row], order)
        np.testing.assert_allclose(found.top[row], np.maximum(exact[row, order], -9999.0), atol=2e-5)
        np.testing.assert_allclose(found.named[row], np.maximum(exact[row, [0, 11, 4]], -9999.0), atol=2e-5)
    assert np.isfinite(found.token).all() and np.isfinite(found.top).all()
