"""n continuations of one prompt."""

from __future__ import annotations

import pytest
from scheduler_steps import Steps, check_tokens, geometry, prompt_of

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_all_first_tokens_come_from_one_row_of_logits(depth: int, prefix_cache: bool):
    steps = Steps(depth=depth, prefix_cache=prefix_cache)
    group = steps.add(prompt_of(10), 7, n=4)
    decision = steps.step()
    assert decision is not None
    assert [row.request_id for row in decision.rows] == [group[0].number]
    assert [work.request_id for work in decision.samples] == [request.number for request in group]
    assert {work.token_index for work in decision.samples} == {9}
    assert len({work.row for work in decision.samples}) == len({work.seed for work in decision.samples}) == 4
    steps.run()
    assert len({tuple(request.output_ids) for request in group}) == 4
    check_tokens(*group)
    assert steps.scheduler.stats().num_computed_prefill_tokens == 10


@DEPTHS
@pytest.mark.parametrize(("length", "copies"), [(10, 3), (8, 0), (3, 3)])
def test_a_partly_filled_page_is_copied_by_all_but_the_last(depth: int, length: int, copies: int):
    steps = Steps(depth=depth)
    group = steps.add(prompt_of(length), 6, n=4)
    steps.run()
    made = [copy for decision in steps.decisions for copy in decision.copies]
    assert len(made) == copies
    assert len({copy.source for copy in made}) <= 1
    check_tokens(*group)


def test_an_aborted_fork_leaves_the_page_to_the_others():
    steps = Steps(depth=2)
    group = steps.add(prompt_of(10), 6, n=3)
    steps.schedule()
    steps.scheduler.abort(group[0].number)
    steps.scheduler.abort(group[1].number)
    steps.run()
    assert not [copy for decision in steps.decisions for copy in decision.copies]
    assert len(group[2].output_ids) == 6
    check_tokens(*group)


@DEPTHS
def test_more_continuations_than_rows(depth: int):
    """Those for which no row is left start later and compute only the end of the prompt."""
    steps = Steps(geometry(num_pages=256, max_num_rows=4, max_num_samples=4), depth=depth)
    group = steps.add(prompt_of(50), 5, n=11)
    steps.run()
    assert [len(request.output_ids) for request in group] == [5] * 11
    check_tokens(*group)
    assert steps.scheduler.stats().num_computed_prefill_tokens <= 50 + 7 * 4


@DEPTHS
def test_all_continuations_report_what_the_cache_gave_the_first(depth: int):
    steps = Steps(geometry(num_pages=256, max_num_rows=3, max_num_samples=3), depth=depth)
    steps.add_one(prompt_of(32), 2)
    steps.run()
    group = steps.add(prompt_of(50), 4, n=7)
    steps.run()
    assert {request.num_cached_tokens for request in group} == {32}
    stats = steps.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (32 + 50, 32)  # one prompt, counted once


def test_the_prompt_of_n_continuations_is_scored_once():
    steps = Steps(geometry(num_pages=256, max_num_rows=3, max_num_samples=3))
    group = steps.add(prompt_of(20), 3, n=6, prompt_logprobs=0)
    steps.run()
    assert list(steps.scores_of(group[0])) == list(range(1, 20))
    assert not any(steps.scores_of(request) for request in group[1:])
    check_tokens(*group)


def test_scores_are_completed_when_the_first_continuation_leaves():
    steps = Steps()
    group = steps.add(prompt_of(30), 3, n=3, prompt_logprobs=0)
    steps.step()
    steps.scheduler.abort(group[0].number)
    steps.run()
    indices = [index for request in group for index in steps.scores_of(request)]
    assert sorted(indices) == list(range(1, 30))
    check_tokens(*group)


@DEPTHS
@pytest.mark.parametrize("when", range(6))
def test_the_others_go_on_when_the_first_leaves(depth: int, when: int):
    steps = Steps(geometry(max_step_tokens=8), depth=depth)
    group = steps.add(prompt_of(21), 6, n=3)
    for _ in range(when):
        steps.step()
    steps.scheduler.abort(group[0].number)
    steps.run()
    assert [len(request.output_ids) for request in group[1:]] == [6, 6]
    check_tokens(*group)


def test_forks_with_penalties_count_from_the_prompt():
    steps = Steps(depth=2)
    group = steps.add(prompt_of(9), 6, n=3, frequency_penalty=0.5)
    decision = steps.step()
    assert decision is not None
    assert {reset.row for reset in decision.resets} == {work.row for work in decision.samples}
    steps.run()  # the simulated runner compares what each row counts with its pages
    check_tokens(*group)
