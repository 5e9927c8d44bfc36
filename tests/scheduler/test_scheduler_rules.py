"""What a step may hold, which prefixes are shared, how requests end."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_steps import VOCAB, Steps, check_tokens, geometry, prompt_of

from jaxserve.messages import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from jaxserve.scheduler.decision import LAST_TOKEN
from jaxserve.simulator.runner import expected_tokens

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


# ---------------------------------------------------------------------- steps


@DEPTHS
def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget(depth: int):
    steps = Steps(geometry(max_step_tokens=16), depth=depth)
    running = [steps.add_one(prompt_of(3, first), 20) for first in (1, 2, 3)]
    while any(not request.output_ids for request in running):
        steps.step()
    late = steps.add_one(prompt_of(40, 9), 4)
    chunks = []
    while not late.output_ids:
        decision = steps.step()
        assert decision is not None and decision.num_decodes >= 3
        assert [row.num_tokens for row in decision.rows[: decision.num_decodes]] == [1] * decision.num_decodes
        chunks += [row.num_tokens for row in decision.rows if row.request_id == late.number and row.num_tokens > 1]
    assert chunks == [13, 13, 13]  # and one token more
    steps.run()
    check_tokens(late, *running)


def test_with_two_steps_in_flight_the_newest_token_is_the_devices():
    steps = Steps(depth=2)
    steps.add_one(prompt_of(4), 6)
    steps.schedule()
    decision = steps.schedule()
    assert decision is not None
    assert decision.rows[0].token_ids.tolist() == [LAST_TOKEN]
    assert decision.rows[0].start == 4 and decision.samples[0].position == 5


def test_a_row_whose_length_limit_is_certain_is_not_computed_again():
    steps = Steps(depth=2)
    request = steps.add_one(prompt_of(4), 2)
    steps.run()
    assert len(steps.decisions) == 2
    assert request.finish_reason == FINISH_LENGTH and len(request.output_ids) == 2


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_request_alone_gives_the_expected_tokens(depth: int, page_size: int):
    steps = Steps(geometry(num_pages=128, page_size=page_size), depth=depth)
    request = steps.add_one(prompt_of(45), 17)
    steps.run()
    assert len(request.output_ids) == 17
    check_tokens(request)


# ---------------------------------------------------------------------- ends


def test_end_of_sequence_and_stop_tokens():
    first = expected_tokens(prompt_of(5), 1000, 4, VOCAB)
    steps = Steps(depth=2)
    request = steps.add_one(prompt_of(5), 10, eos_token_ids=frozenset({first[2]}))
    steps.run()
    assert (request.output_ids, request.finish_reason, request.stop_reason) == (first[:3], FINISH_STOP, None)

    steps = Steps(depth=2)
    request = steps.add_one(prompt_of(5), 10, stop_token_ids=(first[1],))
    steps.run()
    assert (request.output_ids, request.finish_reason, request.stop_reason) == (first[:2], FINISH_STOP, first[1])


def test_ignore_eos_and_min_tokens():
    first = expected_tokens(prompt_of(5), 1000, 6, VOCAB)
    eos = frozenset({first[1]})
    steps = Steps()
    request = steps.add_one(prompt_of(5), 6, eos_token_ids=eos, ignore_eos=True)
    steps.run()
    assert (request.output_ids, request.finish_reason) == (first, FINISH_LENGTH)

    steps = Steps()
    request = steps.add_one(prompt_of(5), 6, eos_token_ids=eos, min_tokens=2)
    steps.run()
    assert (request.output_ids, request.finish_reason) == (first, FINISH_LENGTH)

    steps = Steps()
    request = steps.add_one(prompt_of(5), 6, eos_token_ids=eos, min_tokens=1)
    steps.run()
    assert (request.output_ids, request.finish_reason) == (first[:2], FINISH_STOP)


def test_finish_drops_what_is_in_flight():
    steps = Steps(depth=2)
    request, other = steps.add_one(prompt_of(5), 50), steps.add_one(prompt_of(6, 3), 50)
    while len(request.output_ids) < 3:
        steps.step()
    assert steps.flights
    steps.scheduler.finish(request.number, FINISH_STOP, "END")
    steps.scheduler.finish(request.number, FINISH_STOP, "again")  # known no more: nothing happens
    assert (request.finish_reason, request.stop_reason, len(request.output_ids)) == (FINISH_STOP, "END", 3)
    steps.run()
    assert len(request.output_ids) == 3 and len(other.output_ids) == 50
    check_tokens(request, other)


@DEPTHS
@pytest.mark.parametrize("when", range(8))
def test_abort_in_any_state_gives_everything_back(depth: int, when: int):
    steps = Steps(geometry(max_step_tokens=8), depth=depth)
    request, other = steps.add_one(prompt_of(25), 12), steps.add_one(prompt_of(10, 5), 12)
    for _ in range(when):
        steps.step()
    assert steps.scheduler.abort(request.number) is request
    assert steps.scheduler.abort(request.number) is None
    steps.scheduler.check_integrity()
    steps.run()
    assert request.finish_reason == FINISH_ABORT
    assert len(other.output_ids) == 12
    check_tokens(request, other)
    steps.scheduler.flush_cache()
    assert steps.scheduler.stats().num_pages_free == 63


# ---------------------------------------------------------------------- refusals


def test_what_can_never_fit_is_refused_with_numbers():
    steps = Steps(geometry(num_pages=5, page_size=4))
    with pytest.raises(ValueError, match=r"prompt: got 16 tokens; allowed: at most 15.*4 pages of 4 tokens"):
        steps.add_one(prompt_of(16))
    with pytest.raises(ValueError, match=r"prompt: got 8 tokens; allowed: at most 7"):
        steps.add_one(prompt_of(8), 0)
    steps = Steps(geometry(max_model_len=10))
    with pytest.raises(ValueError, match=r"prompt: got 10 tokens; allowed: at most 9"):
        steps.add_one(prompt_of(10))
    assert not steps.scheduler.has_work


def test_a_lone_request_ends_with_length_when_it_has_filled_the_pool():
    steps = Steps(geometry(num_pages=3, page_size=32, max_step_tokens=64), depth=2)
    request = steps.add_one(prompt_of(33), 400)
    steps.run()
    assert request.finish_reason == FINISH_LENGTH
    assert request.num_tokens == request.max_total_tokens == 64
    check_tokens(request)


# ---------------------------------------------------------------------- prefixes


@DEPTHS
def test_the_cache_gives_whole_pages_and_never_the_last_token(depth: int):
    steps = Steps(depth=depth)
    steps.add_one(prompt_of(16), 2)
    steps.run()
    for length, cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (15, 12), (16, 12), (17, 16)):
        request = steps.add_one(prompt_of(length), 2)
        steps.run()
        assert request.num_cached_tokens == cached, length
        check_tokens(request)


def test_output_tokens_are_cached_too():
    steps = Steps(depth=2)
    first = steps.add_one(prompt_of(10), 12)
    steps.run()
    turn = steps.add_one(np.concatenate((first.prompt, np.array(first.output_ids, np.int32), prompt_of(3, 5))), 2)
    steps.run()
    assert turn.num_cached_tokens in (20, 24)  # 22 tokens; the newest may not have been computed
    check_tokens(turn)


def test_namespaces_share_nothing():
    steps = Steps()
    for namespace, cached in (("", 0), ("a", 0), ("b", 0), ("a", 16), ("", 16)):
        request = steps.add_one(prompt_of(18), 2, namespace=namespace)
        steps.run()
        assert request.num_cached_tokens == cached


@DEPTHS
def test_a_prefix_that_arrives_together_is_computed_once(depth: int):
    steps = Steps(geometry(num_pages=256, max_step_tokens=24), depth=depth)
    shared = prompt_of(64)
    group = [steps.add_one(np.concatenate((shared, prompt_of(5, first))), 3) for first in range(1, 8)]
    steps.run()
    assert [request.num_cached_tokens for request in group] == [0] + [64] * 6
    assert steps.scheduler.stats().num_computed_prefill_tokens == 64 + 7 * 5
    check_tokens(*group)


def test_those_who_wait_for_a_prefix_go_on_when_its_producer_leaves():
    steps = Steps(geometry(max_step_tokens=8), depth=2)
    producer, waiting = steps.add_one(prompt_of(40), 3), steps.add_one(prompt_of(41), 3)
    steps.step()
    steps.step()
    assert {row.request_id for decision in steps.decisions for row in decision.rows} == {producer.number}
    steps.scheduler.abort(producer.number)
    steps.run()
    assert waiting.num_cached_tokens == 16
    assert len(waiting.output_ids) == 3
    check_tokens(waiting)


def test_a_prefix_that_is_being_scored_is_waited_for():
    """A scored prompt takes few tokens a step; others could overtake it and compute the same once more."""
    steps = Steps(depth=2)
    steps.add_one(prompt_of(40), 2, prompt_logprobs=0)
    other = steps.add_one(np.concatenate((prompt_of(40), prompt_of(3, 9))), 2)
    steps.run()
    assert other.num_cached_tokens == 40
    assert steps.scheduler.stats().num_computed_prefill_tokens == 43


def test_nobody_waits_for_a_prefix_of_another_namespace():
    steps = Steps(geometry(max_step_tokens=64))
    steps.add_one(prompt_of(20), namespace="a")
    steps.add_one(prompt_of(20), namespace="b")
    decision = steps.step()
    assert decision is not None and len(decision.rows) == 2


def test_without_prefix_cache_nothing_is_kept():
    steps = Steps(prefix_cache=False)
    for _ in range(3):
        request = steps.add_one(prompt_of(20))
        steps.run()
        assert request.num_cached_tokens == 0
        assert steps.scheduler.stats().num_pages_free == 63


# ---------------------------------------------------------------------- prompt scores


@DEPTHS
def test_prompt_scores_are_complete_and_the_same_each_time(depth: int):
    steps = Steps(depth=depth)
    seen = []
    for _ in range(3):
        request = steps.add_one(prompt_of(37), 2, prompt_logprobs=0)
        request.seed = 5
        other = steps.add_one(np.concatenate((prompt_of(30), prompt_of(3, 9))), 2)
        steps.run()
        seen.append(steps.scores_of(request))
        assert request.num_cached_tokens == 0
        check_tokens(request, other)
    assert list(seen[0]) == list(range(1, 37))
    assert seen[0] == seen[1] == seen[2]
    assert all(len(decision.samples) <= 8 for decision in steps.decisions)


def test_scores_name_the_token_and_its_place():
    steps = Steps()
    request = steps.add_one(prompt_of(20), 2, prompt_logprobs=0)
    steps.run()
    scores = [work for decision in steps.decisions for work in decision.samples if work.is_score]
    assert [(work.position, work.forced_token) for work in scores] == list(enumerate(prompt_of(20).tolist()))[1:]
    kinds = ["score" if event.prompt_index else "token" for event in steps.events]
    assert kinds == ["score"] * 19 + ["token"] * 2
    assert [e.token_id for e in steps.events if e.prompt_index] == request.prompt[1:].tolist()


def test_scoring_a_long_prompt_lets_others_start():
    steps = Steps(geometry(num_pages=256))
    steps.add_one(prompt_of(300), 2, prompt_logprobs=0)
    steps.step()
    other = steps.add_one(prompt_of(5, 3), 3)
    for _ in range(5):
        steps.step()
    assert other.finish_reason == FINISH_LENGTH


# ---------------------------------------------------------------------- penalties


def test_rows_with_penalties_are_reset_when_they_start_and_only_those():
    steps = Steps()
    counted = steps.add_one(prompt_of(20), 3, presence_penalty=1.0)
    steps.add_one(prompt_of(9, 3), 3)
    steps.run()
    resets = [reset for decision in steps.decisions for reset in decision.resets]
    assert len(resets) == 1
    assert resets[0].prompt_ids.tolist() == counted.prompt.tolist() and not len(resets[0].output_ids)


# ---------------------------------------------------------------------- deterministic


@DEPTHS
def test_deterministic_steps_are_all_decode_or_all_prefill(depth: int):
    steps = Steps(geometry(num_pages=40), depth=depth, deterministic=True)
    group = [steps.add_one(prompt_of(10 + first, first), 10) for first in range(12)]
    forks = steps.add(prompt_of(14, 50), 6, n=3)
    steps.run()
    for decision in steps.decisions:
        assert decision.num_decodes in (0, len(decision.rows))
    assert steps.scheduler.stats().num_preemptions == 0
    check_tokens(*group, *forks)


def test_deterministic_caches_only_what_prefill_has_computed():
    steps = Steps(deterministic=True)
    first = steps.add_one(prompt_of(10), 20)
    steps.run()
    turn = steps.add_one(np.concatenate((first.prompt, np.array(first.output_ids, np.int32))), 2)
    steps.run()
    assert turn.num_cached_tokens == 8


def test_deterministic_continuations_have_their_pages_reserved():
    steps = Steps(geometry(num_pages=12), depth=2, deterministic=True)
    group = steps.add(prompt_of(20), 20, n=3)
    steps.run()
    assert steps.scheduler.stats().num_preemptions == 0
    assert all(len(request.output_ids) == 20 for request in group)
    check_tokens(*group)


def test_nobody_waits_for_pages_that_will_not_be_shared():
    """What is scored although the cache has its beginning stays out of the tree until it ends."""
    steps = Steps(geometry(num_pages=256), depth=2)
    steps.add_one(prompt_of(8), 2)
    steps.run()
    scored = steps.add_one(prompt_of(150), 2, prompt_logprobs=0)
    steps.step()
    other = steps.add_one(prompt_of(60), 2)
    while not other.is_finished:
        steps.step()
    assert not scored.output_ids
    steps.run()
    check_tokens(scored, other)
