"""Parts of programs through the engine: scores without sampling, kept pages, refusals, messages."""

from __future__ import annotations

import pytest
from engine_fakes import make_engine, run_dry

from jaxserve.messages import (
    FINISH_ERROR,
    FINISH_LENGTH,
    AddRequest,
    ProgramPart,
    ReleaseKept,
    decode_to_engine,
    encode,
)
from jaxserve.sampling_params import SamplingParams

SCORES = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=9)


def part_request(request_id: str = "r", prompt: bytes = b"hello wor", params: SamplingParams = SCORES, **part):
    return AddRequest(request_id=request_id, prompt=list(prompt), params=params, part=ProgramPart(**part))


def test_scores_without_sampling():
    engine = make_engine()
    engine.add(part_request(params=SamplingParams(prompt_logprobs=0, prompt_logprobs_start=6), next_ids=(97, 98)))
    (output,) = run_dry(engine)
    assert output.finish_reason == FINISH_LENGTH
    assert output.token_ids == [] and output.text == "" and output.num_output_tokens == 0
    assert output.next_logprobs == pytest.approx([-0.97, -0.98])  # the scripted runner gives token t -t / 100
    assert output.prompt_logprobs[:6] == [None] * 6
    assert [score.logprob for score in output.prompt_logprobs[6:]] == pytest.approx([-t / 100 for t in b"wor"])


def test_kept_pages_are_used_and_released():
    engine = make_engine()
    engine.add(part_request(keep=True, next_ids=(0,)))
    run_dry(engine)
    assert engine.stats().num_pages_held == 3
    before = engine.stats().num_computed_prefill_tokens
    engine.add(part_request("s", b"hello world", SamplingParams(max_tokens=2), base="r"))
    run_dry(engine)
    assert engine.stats().num_computed_prefill_tokens - before == 2
    engine.handle(ReleaseKept(["r", "unknown"]))
    assert engine.stats().num_pages_held == 0
    engine.scheduler.check_integrity()


def test_leases_follow_the_clock():
    now = 0.0
    engine = make_engine(clock=lambda: now)
    engine.add(part_request(keep=True, lease_s=3.0, next_ids=(0,)))
    run_dry(engine)
    engine.step()
    assert engine.stats().num_pages_held == 3
    now = 4.0
    engine.step()
    assert engine.stats().num_pages_held == 0


@pytest.mark.parametrize(
    ("part", "params", "parameter"),
    [
        ({"lease_s": 0.0}, SCORES, "lease_s"),
        ({"next_ids": (1000,)}, SCORES, "next_ids"),
        ({"next_ids": tuple(range(200))}, SCORES, "next_ids"),
        ({"next_ids": (1,)}, SamplingParams(prompt_logprobs=0, n=2), "n"),
        ({"next_ids": (1,)}, SamplingParams(), "prompt_logprobs"),
    ],
)
def test_mistakes_are_named(part, params, parameter):
    engine = make_engine()
    engine.add(part_request(params=params, **part))
    outputs = run_dry(engine)
    assert {output.finish_reason for output in outputs} == {FINISH_ERROR}
    assert {output.parameter for output in outputs} == {parameter}


def test_messages_travel():
    for message in (part_request(program="p", base="b", keep=True, next_ids=(1, 2)), ReleaseKept(["a"])):
        assert decode_to_engine(encode(message)) == message
