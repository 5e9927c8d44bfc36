"""Grammars over compiled programs: a tiny model's tokens against a search, token by token, in float64."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[1] / "runner")]

from engine_fakes import ByteTokenizer, last_of, run_dry
from tiny_runner_model import EOS, VOCAB, build_model, build_runner, full_logits

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AddRequest, ModelInfo
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.compiler import compile_grammar, make_vocabulary
from jaxserve.structured.grammar import Grammar

ENGINES = itertools.count()
PROMPT = list(range(10, 27))
WORDS = Grammar.lark('start: "{a:" W ",bcd:" W "}" W?\nW: /[f-z]{1,4}/')


class TinyTokenizer(ByteTokenizer):
    """Tokens of one byte, as far as the model's vocabulary goes."""

    vocab_size = VOCAB
    special_ids = frozenset({EOS})
    eos_token_ids = frozenset({EOS})


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = build_runner()
    yield runner
    runner.close()


def make_engine(runner: ModelRunner, **options: object) -> Engine:
    geometry = runner.geometry
    model = ModelInfo(
        name="tiny", tokenizer_path="", vocab_size=VOCAB, max_model_len=geometry.max_model_len, eos_token_ids=[EOS],
        max_num_rows=4, dtype="float32", num_pages=geometry.num_pages, page_size=geometry.page_size,
    )  # fmt: skip
    engine = Engine(runner, TinyTokenizer(), EngineConfig(max_num_rows=4, max_step_tokens=16, **options), model=model)
    # A runner knows requests by their number and serves one engine; here it serves many, one after another.
    engine._maker._numbers = itertools.count(1000 * next(ENGINES))
    return engine


def run(engine: Engine, params: SamplingParams, *, copies: int = 1) -> list[list[int]]:
    """Tokens of `copies` equal requests, which start together."""
    for k in range(copies):
        engine.add(AddRequest(request_id=f"{k}", prompt=PROMPT, params=params))
    outputs = run_dry(engine)
    engine.scheduler.check_integrity()
    assert engine.stats().num_compiles_after_warmup == 0
    assert engine.scheduler.stats().num_pages_held == 0
    return [
        [t for out in outputs if (out.request_id, out.index) == (f"{k}", i) for t in out.token_ids]
        for k in range(copies)
        for i in range(params.n)
    ]


def search(grammar: Grammar, params: SamplingParams) -> list[int]:
    """Greedy decoding under a mask, one token after another, penalties included."""
    model = build_model()
    matcher = compile_grammar(make_vocabulary(TinyTokenizer(), VOCAB), grammar.text)
    output: list[int] = []
    while len(output) < (params.max_tokens or 100):
        forced = matcher.compute_ff_tokens()
        if forced:
            token = forced[0]
        elif matcher.is_stopped():
            token = EOS
        else:
            logits = full_logits(model, PROMPT + output)[-1]
            counts = np.bincount(output, minlength=VOCAB)
            seen = (counts > 0) | np.isin(np.arange(VOCAB), PROMPT)
            factor = params.repetition_penalty
            logits = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
            logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little")[:VOCAB].astype(bool)
            if len(output) < params.min_tokens and allowed.sum() > allowed[EOS]:
                allowed[EOS] = False
            token = int(np.where(allowed, logits, -np.inf).argmax())
        output.append(token)
        if token == EOS:
            break
        assert matcher.consume_token(token)
    return output


OPTIONS = [
    {},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"min_tokens": 20, "max_tokens": 30},
    {"max_tokens": 7},
    {"logprobs": 2},
]


@pytest.mark.parametrize(
    ("options", "engine_options"),
    [(options, {}) for options in OPTIONS]
    + [(options, {"jump_forward": False}) for options in OPTIONS[:3]]
    + [(OPTIONS[1], {"overlap": False}), (OPTIONS[1], {"prefix_cache": False})],
)
def test_tokens_are_those_of_a_search(runner: ModelRunner, options: dict, engine_options: dict) -> None:
    params = SamplingParams(grammar=WORDS, temperature=0, **options)
    expected = search(WORDS, params)
    assert len(expected) > 6
    engine = make_engine(runner, **engine_options)
    for tokens in run(engine, params, copies=3):
        assert tokens == expected


def test_min_tokens_and_ignore_eos_hold_back_the_end_while_the_grammar_goes_on(runner: ModelRunner) -> None:
    letters = Grammar.regex("[f-z]{0,12}")
    for options in ({"min_tokens": 12}, {"ignore_eos": True}):
        params = SamplingParams(grammar=letters, temperature=0, logit_bias={EOS: 50.0}, **options)
        tokens = run(make_engine(runner), params)[0]
        assert len(tokens) == 13
        assert tokens[-1] == EOS
    early = SamplingParams(grammar=letters, temperature=0, logit_bias={EOS: 50.0})
    assert run(make_engine(runner), early)[0] == [EOS]


def test_continuations_preempted_and_forked_stay_inside(runner: ModelRunner) -> None:
    """Four continuations of 40 tokens do not fit: they share pages, copy them, and throw each other out."""
    small = dataclasses.replace(runner.geometry, num_pages=26)
    numbers = Grammar.json_schema({"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 14})
    params = SamplingParams(grammar=numbers, n=4, seed=3, temperature=1.0, max_tokens=40)
    wide = run(make_engine(runner), params)
    before, runner.geometry = runner.geometry, small
    try:
        engine = make_engine(runner)
        tight = run(engine, params)
        assert engine.stats().num_preemptions > 0
    finally:
        runner.geometry = before
    assert tight == wide
    assert len(set(map(tuple, wide))) > 1
    matcher = compile_grammar(make_vocabulary(TinyTokenizer(), VOCAB), numbers.text)
    for tokens in wide:
        assert matcher.deep_copy().consume_tokens(tokens)


def test_free_rows_draw_the_same_beside_constrained_ones(runner: ModelRunner) -> None:
    free = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True, presence_penalty=0.3)
    alone = run(make_engine(runner), free)[0]
    engine = make_engine(runner)
    engine.add(AddRequest(request_id="g", prompt=PROMPT[:9], params=SamplingParams(grammar=WORDS, temperature=0.7)))
    engine.add(AddRequest(request_id="f", prompt=PROMPT, params=free))
    outputs = run_dry(engine)
    assert [t for out in outputs if out.request_id == "f" for t in out.token_ids] == alone
    assert last_of(outputs, "g").finish_reason == "stop"
