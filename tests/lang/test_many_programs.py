"""A thousand programs of random structure at once: no deadlock, no leaked page, errors in their own program alone."""

from __future__ import annotations

import gc
import random
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lang_fakes import make_llm
from random_programs import play

from jaxserve import lang
from jaxserve.sampling_params import InvalidParameter

NUM_PROGRAMS = 1000
NUM_ALONE = 40  # of them are run once more, one at a time, with the whole engine to themselves


@lang.function
def random_structure(s, word, seed):
    return play(s, word, seed, may_fail=True)


def check_idle(llm) -> None:
    """Nothing runs, nothing is held, every page and every reference is accounted for."""
    gc.collect()
    for _ in range(500):
        stats = llm.stats()
        if not stats.num_running + stats.num_waiting + stats.num_pages_held:
            break
        time.sleep(0.01)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_held) == (0, 0, 0)
    llm.engine_thread.call(lambda engine: engine.scheduler.check_integrity())


def check_many(how: str, seed: int) -> None:
    rng = random.Random(seed)
    batch = [{"word": f"w{index % 7}", "seed": rng.getrandbits(32)} for index in range(NUM_PROGRAMS)]
    # So few pages that kept prefixes are given up and requests are thrown out again and again.
    with make_llm(num_pages=160, max_num_rows=32) as llm, make_llm() as other:
        if how == "interpreted":
            states = random_structure.run_batch(batch, backend=llm, seed=1, num_threads=NUM_PROGRAMS)
        else:
            states = random_structure.compile().run_batch(batch, backend=llm, seed=1)
        assert len(states) == NUM_PROGRAMS
        errors = [state.error() for state in states]
        assert all(error is None or isinstance(error, InvalidParameter | RuntimeError) for error in errors)
        assert 20 < sum(error is not None for error in errors) < NUM_PROGRAMS // 2
        for index in rng.sample(range(NUM_PROGRAMS), NUM_ALONE):
            (alone,) = random_structure.run_batch([batch[index]], backend=other, seed=1)
            assert str(alone.error()) == str(errors[index])
            if errors[index] is None:
                assert alone.text() == states[index].text()
        del states, alone, errors
        random_structure._prefixes.clear()
        check_idle(llm)


@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@pytest.mark.parametrize("how", ["interpreted", "compiled"])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_thousand_programs_at_once(how: str, seed: int):
    check_many(how, seed)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@pytest.mark.parametrize("how", ["interpreted", "compiled"])
@given(seed=st.integers(0, 2**32 - 1))
def test_ten_times_a_thousand_programs(how: str, seed: int):
    check_many(how, seed)
