"""Texts under a grammar, through the engine with a scripted runner and tokens of one byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxserve.messages import AbortRequest, AddRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from engine_fakes import EOS, alphabet, last_of, make_engine, run_dry, scripted, text_of

RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def run(engine, params: SamplingParams, **fields):
    engine.handle(AddRequest(request_id="r", prompt=[1, 2, 3], params=params, **fields))
    outputs = run_dry(engine)
    engine.scheduler.check_integrity()
    return outputs


def under(grammar: Grammar, **options) -> SamplingParams:
    return SamplingParams(grammar=grammar, temperature=0, **options)


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_text_follows_the_schema_and_ends_by_itself(overlap: bool, jump_forward: bool) -> None:
    engine = make_engine(overlap=overlap, jump_forward=jump_forward)
    outputs = run(engine, under(Grammar.json_schema(RECORD)))
    assert json.loads(text_of(outputs))["name"] in ("Ada", "Grace")
    last = last_of(outputs)
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    tokens = [token for output in outputs for token in output.token_ids]
    assert bytes(tokens[:-1]).decode() == text_of(outputs)
    assert tokens[-1] == EOS
    assert last.num_output_tokens == len(tokens)
    assert engine.scheduler.stats().num_pages_held == 0


def test_jumps_change_nothing_but_the_number_of_steps() -> None:
    texts, steps = [], []
    for jump_forward in (True, False):
        engine = make_engine(scripted({7: b'{"name":"Grace","age":42}'}), jump_forward=jump_forward)
        outputs = run(engine, under(Grammar.json_schema(RECORD), seed=7))
        texts.append([token for output in outputs for token in output.token_ids])
        steps.append(engine.stats().num_steps)
    assert texts[0] == texts[1]
    assert bytes(texts[0][:-1]) == b'{"name":"Grace","age":42}'
    assert steps[0] * 2 < steps[1]


def test_free_rows_beside_constrained_ones_write_what_they_write_alone() -> None:
    engine = make_engine()
    engine.handle(AddRequest(request_id="r", prompt=[1], params=under(Grammar.regex("[x-z]{9}"))))
    engine.handle(AddRequest(request_id="free", prompt=[2], params=SamplingParams(temperature=0, max_tokens=20)))
    outputs = run_dry(engine)
    assert text_of(outputs, "free") == "abcdefghijklmnopqrst"
    assert text_of(outputs) == "xxxxxxxyx" or set(text_of(outputs)) <= set("xyz")


def test_n_continuations_have_places_of_their_own() -> None:
    engine = make_engine(lambda work: ord("a") + work.seed % 3 if work.num_outputs % 2 else ord("c"))
    outputs = run(engine, SamplingParams(grammar=Grammar.regex("[a-c]{6}"), n=4, seed=5))
    texts = [text_of(outputs, index=index) for index in range(4)]
    assert all(len(text) == 6 and set(text) <= set("abc") for text in texts)
    assert len(set(texts)) > 1


def test_preemption_keeps_the_place_in_the_grammar() -> None:
    engine = make_engine(num_pages=14, max_num_rows=4, max_model_len=40)
    for number in range(4):
        params = under(Grammar.regex("[a-z]{30}"), seed=number)
        engine.handle(AddRequest(request_id=str(number), prompt=[9, number], params=params))
    outputs = run_dry(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    assert {text_of(outputs, str(number)) for number in range(4)} == {"abcdefghijklmnopqrstuvwxyzabcd"}


def test_limits_and_stops_hold_inside_a_grammar() -> None:
    schema = Grammar.json_schema({"const": "a long fixed value"})
    for limit in (1, 3, 7):
        last = last_of(run(make_engine(), under(schema, max_tokens=limit)))
        assert (last.finish_reason, last.num_output_tokens) == ("length", limit)
    outputs = run(make_engine(), under(schema, stop=("fixed",)))
    assert text_of(outputs) == '"a long '
    assert last_of(outputs).stop_reason == "fixed"
    assert last_of(outputs).num_output_tokens == len('"a long fixed')


def test_a_grammar_may_allow_the_empty_text() -> None:
    assert text_of(run(make_engine(lambda work: EOS), under(Grammar.regex("a*")))) == ""


def test_scores_of_forced_tokens_are_reported() -> None:
    outputs = run(make_engine(), under(Grammar.json_schema(RECORD), logprobs=1))
    tokens = [token for output in outputs for token in output.token_ids]
    scores = [score for output in outputs for score in output.logprobs]
    assert [score.token_id for score in scores] == tokens
    assert [score.logprob for score in scores] == pytest.approx([-token / 100 for token in tokens])


def test_reasoning_before_a_grammar_is_free_but_bounded() -> None:
    grammar = Grammar("start: /[0-9]{4}/", begins_after="</think>", max_free_tokens=10)
    outputs = run(make_engine(alphabet), under(grammar))
    text = text_of(outputs)
    assert text.startswith("abcdefghij</think>")
    assert text.removeprefix("abcdefghij</think>").isdecimal()
    early = run(make_engine(scripted({3: b"hm</think>\n1234"})), under(grammar, seed=3))
    assert text_of(early).startswith("hm</think>")
    assert text_of(early).endswith("1234") or text_of(early).split(">")[-1].strip().isdecimal()
    # It cannot end before it has reasoned to the end.
    silent = run(make_engine(lambda work: EOS), under(grammar))
    assert "</think>" in text_of(silent)


def test_a_budget_leaves_a_text_alone_that_does_not_reason() -> None:
    grammar = Grammar("", begins_after="</think>", max_free_tokens=9, only_behind="<think>")
    assert text_of(run(make_engine(alphabet), under(grammar, max_tokens=20))) == "abcdefghijklmnopqrst"
    thinking = run(make_engine(scripted({1: b"\n<think>abcdefg"})), under(grammar, seed=1, max_tokens=30))
    assert text_of(thinking).startswith("\n<think>a</think>")


def test_a_budget_alone_needs_no_grammar() -> None:
    grammar = Grammar("", begins_after="</think>", max_free_tokens=4)
    outputs = run(make_engine(alphabet), under(grammar, max_tokens=20))
    assert text_of(outputs) == "abcd</think>mnopqrst"


def test_a_grammar_that_does_not_compile_is_the_requests_own_problem() -> None:
    engine = make_engine()
    for grammar, word in (
        (Grammar.json_schema({"not": {"type": "string"}}, parameter="response_format"), "not"),
        (Grammar.regex("(", parameter="regex"), "unclosed"),
        (Grammar.lark("start: nowhere"), "nowhere"),
        (Grammar.lark('start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "not"),
    ):
        last = last_of(run(engine, under(grammar)))
        assert last.finish_reason == "error"
        assert last.parameter == grammar.parameter
        assert word in last.error
    assert text_of(run(engine, SamplingParams(max_tokens=3))) == "abc"


def test_a_grammar_that_outgrows_its_limits_ends_its_own_request() -> None:
    engine = make_engine(lambda work: ord("a" if work.num_outputs < 3 else "b"), max_model_len=640, num_pages=400)
    engine.handle(AddRequest(request_id="other", prompt=[1], params=SamplingParams(max_tokens=300)))
    outputs = run(engine, under(Grammar.regex("((a|aa)+){1,300}(b{1,300}){1,300}", parameter="guided_regex")))
    last = last_of(outputs)
    assert (last.finish_reason, last.parameter) == ("error", "guided_regex")
    assert text_of(outputs).startswith("aaabb")
    assert text_of(outputs, "other") == "aaa" + "b" * 297


def test_a_request_may_leave_while_its_grammar_is_compiled() -> None:
    engine = make_engine()
    engine.handle(AddRequest(request_id="r", prompt=[1], params=under(Grammar.regex("[a-z]{1,50}(x|y)"), n=2)))
    engine.handle(AbortRequest("r"))
    outputs = run_dry(engine)
    assert [output.finish_reason for output in outputs] == ["abort"] * 2
    assert not engine.has_work
