"""Programs of random structure: text, generations, selections, branches of branches, joins, roles, mistakes."""

from __future__ import annotations

import random

from jaxserve import lang

WORDS = ["alpha ", "beta ", "gamma\n", "delta: ", "x", "1 2 3 "]
CHOICES = [["yes", "no"], ["one", "two", "three"], ["a", "ab", "abc"]]


MISTAKE = "a mistake of the program"


def random_program(seed: int, *, may_fail: bool) -> lang.api.Function:
    """Always the same for a seed. may_fail: some generations have an option that is refused, some functions raise."""

    @lang.function
    def program(s, word):
        return play(s, word, seed, may_fail=may_fail)

    return program


def play(s, word: str, seed: int, *, may_fail: bool) -> str:
    rng = random.Random(seed)
    s += "Program " + word + "\n"
    _play(rng, s, 0, may_fail)
    s += lang.gen("last", max_tokens=2)
    if may_fail and rng.random() < 0.05:
        raise RuntimeError(MISTAKE)
    return s["last"]


def _play(rng: random.Random, s, depth: int, may_fail: bool) -> None:
    for _ in range(rng.randint(1, 3)):
        action = rng.random()
        name = rng.choice("abcd")
        if action < 0.25:
            s += rng.choice(WORDS) * rng.randint(1, 4)
        elif action < 0.5:
            limit = -1 if may_fail and rng.random() < 0.04 else rng.randint(1, 6)
            s += rng.choice(WORDS) + lang.gen(name, max_tokens=limit, stop=rng.choice([None, "e", ["k", "Z"]]))
        elif action < 0.6:
            method = rng.choice(
                [
                    lang.token_length_normalized,
                    lang.greedy_token_selection,
                    lang.unconditional_likelihood_normalized,
                ]
            )
            s += lang.select(name, rng.choice(CHOICES), choices_method=method)
        elif action < 0.7:
            s += lang.user(rng.choice(WORDS)) + lang.assistant(lang.gen(name, max_tokens=rng.randint(1, 4)))
        elif action < 0.8 and name in s:
            value = s[name]
            if not isinstance(value, list):
                s += value
        elif action < 0.95 and depth < 2:
            branches = s.fork(rng.randint(1, 3))
            for branch in branches:
                branch += rng.choice(WORDS)
                _play(rng, branch, depth + 1, may_fail)
            if rng.random() < 0.8:
                branches.join(rng.choice(["gather_variable", "concate_and_append"]))
        else:
            with s.var_scope("scope"):
                s += rng.choice(WORDS) + lang.gen(name, max_tokens=2)
