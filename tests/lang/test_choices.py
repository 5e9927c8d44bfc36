"""The three rules of select() against numpy, on log-probabilities made by hand and at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.lang import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from jaxserve.lang.choices import decide


def oracle_mean(rows: list[list[float]]) -> int:
    return int(np.argmax([np.mean(np.array(row, np.float64)) for row in rows]))


def oracle_greedy(rows: list[list[float]]) -> int:
    """Shorter rows are filled with their mean; column by column only the rows at the maximum stay."""
    width = max(len(row) for row in rows)
    table = np.array([row + [float(np.mean(row))] * (width - len(row)) for row in rows], np.float64)
    alive = np.ones(len(rows), bool)
    for column in table.T:
        if alive.sum() == 1:
            break
        alive &= column == column[alive].max()
    return int(np.flatnonzero(alive)[0])


def oracle_unconditional(rows: list[list[float]], alone: list[list[float | None]]) -> int:
    values = [
        np.mean(np.array(row, np.float64) - np.array([0.0 if x is None else x for x in other], np.float64))
        for row, other in zip(rows, alone)
    ]
    return int(np.argmax(values))


def scored(rows: list[list[float | None]]) -> list[list[tuple]]:
    return [[(logprob, 7, "x") for logprob in row] for row in rows]


def pick(method, rows, alone=None) -> int:
    choices = [f"choice {index}" for index in range(len(rows))]
    decision = decide(method, choices, scored(rows), None if alone is None else scored(alone))
    return choices.index(decision.decision)


@pytest.mark.parametrize(
    ("rows", "mean", "greedy"),
    [
        ([[-1.0], [-2.0]], 0, 0),
        ([[-2.0, -2.0], [-1.0, -3.5]], 0, 1),  # the second begins better and is worse on the whole
        ([[-1.0, -1.0], [-1.0, -1.0]], 0, 0),  # ties go to the first
        ([[-3.0], [-1.0, -1.0], [-1.0, -1.0]], 1, 1),
        ([[-1.0, -4.0], [-1.0]], 1, 1),  # the same first token; the shorter goes on with its mean
        ([[-1.0], [-1.0, -1.0], [-1.0, -0.5]], 2, 2),
        ([[-0.5, -2.0, -2.0], [-0.5, -2.0], [-9.0]], 1, 1),  # the mean that goes on is -1.25
        ([[-1.0, -2.0, -1.0], [-1.0, -2.0]], 0, 1),  # -1.333 against -1.5; the third column is -1.0 against -1.5
    ],
)
def test_rules_by_hand(rows, mean, greedy):
    assert oracle_mean(rows) == mean == pick(token_length_normalized, rows)
    expected = oracle_greedy(rows)
    assert pick(greedy_token_selection, rows) == expected
    if rows != [[-1.0, -2.0, -1.0], [-1.0, -2.0]]:
        assert expected == greedy
    else:
        assert expected == 0


@pytest.mark.parametrize(
    ("rows", "alone", "expected"),
    [
        ([[-1.0], [-2.0]], [[-1.0], [-5.0]], 1),
        ([[-1.0], [-2.0]], [[None], [None]], 0),
        ([[-1.0, -3.0], [-2.0]], [[None, -6.0], [None]], 0),
        ([[-2.0], [-2.0]], [[-3.0], [-3.0]], 0),
    ],
)
def test_minus_the_unconditional_likelihood_by_hand(rows, alone, expected):
    assert oracle_unconditional(rows, alone) == expected
    assert pick(unconditional_likelihood_normalized, rows, alone) == expected


# Quarters are exact in binary, so that ties are ties for everybody.
_LOGPROB = st.integers(-40, 0).map(lambda quarters: quarters / 4)
_ROWS = st.lists(st.lists(_LOGPROB, min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(_ROWS, st.data())
def test_rules_at_random(rows, data):
    # Sizes 1, 2 and 4 keep means exact.
    rows = [row[:2] if len(row) == 3 else row for row in rows]
    alone = [[data.draw(_LOGPROB) for _ in row] for row in rows]
    for row in alone:
        if data.draw(st.booleans()):
            row[0] = None
    assert pick(token_length_normalized, rows) == oracle_mean(rows)
    assert pick(greedy_token_selection, rows) == oracle_greedy(rows)
    assert pick(unconditional_likelihood_normalized, rows, alone) == oracle_unconditional(rows, alone)


def test_a_rule_of_lengths_that_differ_is_refused():
    with pytest.raises(ValueError):
        pick(unconditional_likelihood_normalized, [[-1.0, -2.0]], [[-1.0]])
    with pytest.raises(ValueError, match="unconditional_token_logprobs"):
        pick(unconditional_likelihood_normalized, [[-1.0]])
