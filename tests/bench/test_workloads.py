"""Workloads are what they say, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.bench import load, workloads
from jaxserve.bench.workloads import LengthRange


@settings(max_examples=30, deadline=None)
@given(
    num=st.integers(1, 12), low=st.integers(1, 20), extra=st.integers(0, 20), seed=st.integers(0, 2**32),
    vocab=st.sampled_from([2, 500, 5000]),
)  # fmt: skip
def test_random_lengths(num: int, low: int, extra: int, seed: int, vocab: int) -> None:
    lengths = LengthRange(low, low + extra)
    first = workloads.random_lengths(num, lengths, LengthRange(1, 7), vocab_size=vocab, seed=seed)
    assert first == workloads.random_lengths(num, lengths, LengthRange(1, 7), vocab_size=vocab, seed=seed)
    assert first.num_requests == num
    for conversation in first.conversations:
        (turn,) = conversation.turns
        assert low <= len(turn.new_ids) <= low + extra
        assert 1 <= turn.max_tokens <= 7
        assert all(0 <= token < vocab for token in turn.new_ids)


def test_seeds_differ() -> None:
    made = [workloads.random_lengths(2, LengthRange(8, 8), LengthRange(1, 1), vocab_size=5000, seed=s) for s in (0, 1)]
    assert made[0].conversations != made[1].conversations


def test_shared_prefix_is_shared_in_its_group_only() -> None:
    made = workloads.shared_prefix(6, 40, LengthRange(5, 9), LengthRange(3, 3), vocab_size=5000, num_groups=2)
    prompts = [conversation.turns[0].new_ids for conversation in made.conversations]
    assert made.num_priming == 2
    assert len({prompt[:40] for prompt in prompts}) == 2
    assert all(prompts[i][:40] == prompts[i % 2][:40] for i in range(6))
    assert len({prompt[40:45] for prompt in prompts}) == 6


def test_unique_prefixes_have_the_same_lengths() -> None:
    def make(is_shared: bool) -> list[tuple[int, ...]]:
        made = workloads.shared_prefix(
            6, 40, LengthRange(5, 9), LengthRange(3, 8), vocab_size=5000, seed=3, is_shared=is_shared
        )
        return [conversation.turns[0].new_ids for conversation in made.conversations]

    shared, unique = make(True), make(False)
    assert [len(prompt) for prompt in shared] == [len(prompt) for prompt in unique]
    assert len({prompt[:4] for prompt in unique}) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", LengthRange(5, 5)), ("1:9", LengthRange(1, 9)), ("2:8:log", LengthRange(2, 8, is_log=True))],
)
def test_length_ranges(text: str, expected: LengthRange) -> None:
    assert LengthRange.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(("is_log", "median"), [(False, 136), (True, 64)])
def test_lengths_have_their_distribution(is_log: bool, median: float) -> None:
    lengths, generator = LengthRange(16, 256, is_log=is_log), np.random.default_rng(5)
    drawn = [lengths.draw(generator) for _ in range(20_000)]
    assert (min(drawn), max(drawn)) == (16, 256)
    assert np.median(drawn) == pytest.approx(median, rel=0.03)  # half way between the bounds, or their logarithms


@pytest.mark.parametrize("text", ["", "0", "9:3", "a", "1:b", "-4", "1:2:3", "8:2:log", ":log"])
def test_bad_length_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="N, LOW:HIGH or"):
        LengthRange.parse(text)


def test_groups_are_bounded() -> None:
    with pytest.raises(ValueError, match="num_groups: got 3"):
        workloads.shared_prefix(2, 4, LengthRange(1, 1), LengthRange(1, 1), vocab_size=10, num_groups=3)


def test_arrivals_have_the_rate() -> None:
    times = load.arrival_times(20_000, 50.0, seed=1)
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    # Exponential gaps: mean and standard deviation are both 1 / rate.
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)
    assert (load.arrival_times(5, float("inf"), seed=1) == 0).all()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="request_rate"):
        load.arrival_times(3, rate, 0)
