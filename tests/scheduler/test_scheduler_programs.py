"""Requests of one program: kept pages, forks by reference, scores without sampling, the order of programs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_steps import VOCAB, Steps, check_tokens, geometry, prompt_of

from jaxserve.messages import FINISH_LENGTH, ProgramPart
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.simulator.runner import expected_scores

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class ProgramSteps(Steps):
    """Requests are named n0, n1, ... after their numbers."""

    def part(self, prompt: np.ndarray, max_tokens: int = 4, *, eos: frozenset[int] = frozenset(), **part) -> Request:
        keeps = part.get("keep", False)
        start = part.pop("score_from", len(prompt))
        place = ProgramPart(**part)
        request = Request(
            number=self._number,
            prompt=prompt,
            params=SamplingParams(prompt_logprobs=0 if place.next_ids else None, prompt_logprobs_start=start),
            seed=1000 + self._number,
            max_total_tokens=len(prompt) + (0 if place.next_ids else max_tokens),
            eos_token_ids=eos,
            part=place,
            keep_as=f"n{self._number}" if keeps else "",
        )
        self._number += 1
        self.scheduler.add(request)
        return request

    def finish(self) -> None:
        """Until nothing is left; kept pages may stay."""
        for _ in range(2000):
            if not self.scheduler.has_work and not self.flights:
                return
            before = len(self.flights)
            assert self.step() is not None or before, f"nothing can run: {self.scheduler.stats()}"
        raise AssertionError("not done")

    def computed(self) -> int:
        return self.scheduler.stats().num_computed_prefill_tokens

    def check_released(self) -> None:
        """Nothing is kept once every name is released."""
        for number in range(self._number):
            self.scheduler.release_kept(f"n{number}")
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_pages_held == 0 == len(self.scheduler.kept)
        assert stats.num_pages_free + stats.num_pages_cached == self.geometry.num_pages - 1


def whole(request: Request, more: np.ndarray) -> np.ndarray:
    return np.concatenate((request.prompt, request.output_ids, more)).astype(np.int32)


@DEPTHS
def test_a_continuation_computes_its_own_tokens_only(depth: int):
    steps = ProgramSteps(depth=depth)
    first = steps.part(prompt_of(10), 5, keep=True)  # 15 tokens, pages of 4
    steps.finish()
    before = steps.computed()
    second = steps.part(whole(first, prompt_of(3, 500)), 4, base="n0")
    steps.finish()
    # The last token sampled was never computed, unless the step in flight did it.
    assert steps.computed() - before in (3, 4)
    check_tokens(first, second)
    steps.check_released()


def test_without_keep_the_partly_filled_page_is_computed_again():
    steps = ProgramSteps()
    first = steps.part(prompt_of(10), 5)
    steps.finish()
    before = steps.computed()
    steps.part(whole(first, prompt_of(3, 500)), 4)
    steps.finish()
    assert steps.computed() - before == 18 - 12


@DEPTHS
def test_forks_share_the_kept_pages_and_copy_the_last(depth: int):
    steps = ProgramSteps(depth=depth)
    parent = steps.part(prompt_of(10), keep=True, next_ids=(0,))
    steps.finish()
    assert steps.computed() == 10 and not parent.output_ids
    children = [steps.part(np.append(prompt_of(10), 100 + k).astype(np.int32), 6, base="n0") for k in range(5)]
    steps.finish()
    assert steps.computed() == 15
    copies = [copy for decision in steps.decisions for copy in decision.copies]
    assert len(copies) == 5 and len({copy.source for copy in copies}) == 1
    check_tokens(*children)
    steps.check_released()


@DEPTHS
def test_a_part_waits_for_its_base(depth: int):
    steps = ProgramSteps(depth=depth)
    steps.part(prompt_of(10), keep=True, next_ids=(0,))
    children = [steps.part(np.append(prompt_of(10), k).astype(np.int32), base="n0") for k in range(3)]
    steps.finish()
    assert steps.computed() == 13
    check_tokens(*children)


def test_a_part_goes_on_without_its_base_when_that_is_aborted_or_unknown():
    steps = ProgramSteps()
    base = steps.part(prompt_of(10), keep=True)
    child = steps.part(prompt_of(11), base="n0")
    stray = steps.part(prompt_of(9), base="nobody")
    steps.scheduler.abort(base.number)
    steps.finish()
    assert len(child.output_ids) == len(stray.output_ids) == 4
    check_tokens(child, stray)
    steps.check_released()


@DEPTHS
def test_only_the_common_prefix_of_a_base_is_used(depth: int):
    steps = ProgramSteps(depth=depth)
    steps.part(prompt_of(30), keep=True, next_ids=(0,))
    steps.finish()
    other = prompt_of(30)
    other[21:] += 1
    child = steps.part(other % VOCAB, base="n0")
    steps.finish()
    assert steps.computed() == 30 + 9
    check_tokens(child)
    steps.check_released()


@DEPTHS
def test_next_ids_are_scored_and_nothing_is_sampled(depth: int):
    steps = ProgramSteps(depth=depth)
    request = steps.part(prompt_of(10), next_ids=(5, 6, 7))
    steps.finish()
    assert request.is_finished and request.finish_reason == FINISH_LENGTH and not request.output_ids
    mine = [event for event in steps.events if event.request is request]
    assert [event.token_id for event in mine] == [5, 6, 7]
    # The simulator's score is that of the history alone.
    extended = expected_scores(prompt_of(11), request.seed)
    assert {event.logprob for event in mine} == {extended[-1]}
    assert {event.prompt_index for event in mine} == {10}


@DEPTHS
def test_scores_from_a_position_use_the_cache_before_it(depth: int):
    steps = ProgramSteps(depth=depth)
    steps.part(prompt_of(18), keep=True, next_ids=(0,))
    request = steps.part(prompt_of(22), base="n0", score_from=19, next_ids=(9,))
    steps.finish()
    assert steps.computed() == 18 + 4
    expected = expected_scores(prompt_of(23), request.seed)
    assert steps.scores_of(request) == {index: expected[index - 1] for index in (19, 20, 21, 22)}
    steps.check_released()


def test_deterministic_mode_shares_whole_pages_of_prompts_only():
    steps = ProgramSteps(deterministic=True)
    first = steps.part(prompt_of(10), 5, keep=True)
    steps.finish()
    second = steps.part(whole(first, prompt_of(3, 500)), 4, base="n0")
    steps.finish()
    assert steps.computed() == 10 + 18 - 8
    check_tokens(first, second)
    steps.check_released()


def test_kept_pages_make_room_before_anybody_is_thrown_out():
    steps = ProgramSteps(geometry(num_pages=17), depth=2)
    kept = [steps.part(prompt_of(10, 100 * k), 2, keep=True) for k in range(4)]
    steps.finish()
    assert len(steps.scheduler.kept) == 4
    large = steps.part(prompt_of(50, 7), 10)
    steps.finish()
    assert steps.scheduler.stats().num_preemptions == 0
    assert len(steps.scheduler.kept) < 4
    check_tokens(*kept, large)
    steps.check_released()


def test_a_base_that_stands_in_its_own_way_is_given_up():
    steps = ProgramSteps(geometry(num_pages=6), depth=2)
    first = steps.part(prompt_of(13), 2, keep=True)
    steps.finish()
    second = steps.part(whole(first, prompt_of(2, 500)), 2, base="n0")
    steps.finish()
    assert len(second.output_ids) == 2
    check_tokens(first, second)
    steps.check_released()


def test_leases_end():
    steps = ProgramSteps()
    steps.part(prompt_of(10), keep=True, lease_s=5.0)
    steps.part(prompt_of(10, 300), keep=True, lease_s=50.0)
    steps.finish()
    kept = steps.scheduler.kept
    for now, count in ((0.0, 2), (4.9, 2), (5.0, 1), (60.0, 0)):
        kept.expire(now)
        assert len(kept) == count
    steps.check_released()


def test_using_a_base_renews_its_lease():
    steps = ProgramSteps()
    steps.part(prompt_of(10), keep=True, lease_s=5.0)
    steps.finish()
    kept = steps.scheduler.kept
    kept.expire(0.0)
    steps.part(prompt_of(11), base="n0")
    steps.finish()
    kept.expire(7.0)
    assert len(kept) == 1
    kept.expire(12.0)
    assert len(kept) == 0


def test_release_of_a_request_that_still_runs():
    steps = ProgramSteps()
    steps.part(prompt_of(10), keep=True)
    steps.step()
    steps.scheduler.release_kept("n0")
    steps.finish()
    assert len(steps.scheduler.kept) == 0
    steps.check_released()


def test_programs_that_began_earlier_go_first():
    steps = ProgramSteps(geometry(max_num_rows=1))
    steps.part(prompt_of(4), 1, program="a")
    steps.part(prompt_of(4, 50), 1, program="b")
    steps.finish()
    blocker = steps.part(prompt_of(4, 100), 3)
    steps.step()
    late_b = steps.part(prompt_of(4, 150), 1, program="b")
    alone = steps.part(prompt_of(4, 200), 1)
    late_a = steps.part(prompt_of(4, 250), 1, program="a")
    steps.finish()
    ended = list(dict.fromkeys(event.request for event in steps.events))
    assert ended[2:] == [blocker, late_a, late_b, alone]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_families_of_parts(data: st.DataObject):
    """Prompts that go on from earlier ones in a small pool, aborted and released at random: tokens are right, and no
    page is lost."""
    draw = data.draw
    shape = geometry(num_pages=draw(st.integers(30, 60)), max_num_rows=draw(st.integers(1, 5)), max_num_samples=12)
    steps = ProgramSteps(shape, depth=draw(st.integers(1, 2)), policy=draw(st.sampled_from(["fcfs", "lpm"])))
    requests: list[Request] = []
    counter = itertools.count()
    for _ in range(draw(st.integers(1, 25))):
        action = draw(st.integers(0, 9))
        if action < 6 or not requests:
            base = draw(st.sampled_from(requests)) if requests and action < 4 else None
            prompt = prompt_of(draw(st.integers(1, 12)), next(counter) * 31)
            if base is not None:
                known = whole(base, np.empty(0, np.int32))
                prompt = np.concatenate((known[: draw(st.integers(0, len(known)))], prompt)).astype(np.int32)
            if len(prompt) > 60:
                continue
            part = {"keep": draw(st.booleans()), "base": f"n{base.number}" if base else "", "program": f"p{action % 3}"}
            if draw(st.integers(0, 3)) == 0:
                part["next_ids"] = tuple(range(draw(st.integers(1, 3))))
                part["score_from"] = draw(st.integers(0, len(prompt)))
            requests.append(steps.part(prompt, draw(st.integers(1, 8)), eos=frozenset(range(0, VOCAB, 9)), **part))
        elif action == 6:
            steps.scheduler.abort(draw(st.sampled_from(requests)).number)
        elif action == 7:
            steps.scheduler.release_kept(f"n{draw(st.sampled_from(requests)).number}")
        else:
            for _ in range(draw(st.integers(1, 6))):
                if steps.scheduler.has_work or steps.flights:
                    steps.step()
    steps.finish()
    check_tokens(*requests)
    for request in requests:
        if request.part.next_ids and request.finish_reason == FINISH_LENGTH:
            expected = expected_scores(np.append(request.prompt, 0), request.seed)
            scored = range(max(1, request.params.prompt_logprobs_start), len(request.prompt) + 1)
            assert steps.scores_of(request) == {index: expected[index - 1] for index in scored}
    steps.check_released()
