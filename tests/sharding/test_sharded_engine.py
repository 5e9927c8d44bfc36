"""Engines over a mesh: grammars and embeddings beside plain requests, with what one device answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from mesh_runner import reference, warm_runner

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from engine_fakes import ByteTokenizer, last_of, run_dry, text_of

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AddEmbedding, AddRequest, ModelInfo, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar

ENGINES = itertools.count(1)
EOS = 2
RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make_engine(name: str, mesh: str, **options: object) -> Engine:
    runner = warm_runner(name, mesh)
    vocab_size, hidden = runner.model_config.vocab_size, runner.model_config.hidden_size

    class Bytes(ByteTokenizer):
        """Tokens of one byte, as far as the model's vocabulary goes."""

        special_ids = eos_token_ids = frozenset({EOS})

    Bytes.vocab_size = vocab_size
    model = ModelInfo(
        name=name, tokenizer_path="", vocab_size=vocab_size, max_model_len=runner.geometry.max_model_len,
        eos_token_ids=[EOS], max_num_rows=4, dtype="float32", num_pages=runner.geometry.num_pages, page_size=8,
        embedding_size=hidden,
    )  # fmt: skip
    engine = Engine(runner, Bytes(), EngineConfig(max_num_rows=4, max_step_tokens=16, **options), model=model)
    # A runner knows requests by their number and serves one engine; here it serves several, one after another.
    engine._maker._numbers = itertools.count(10**7 * next(ENGINES))
    return engine


def run(engine: Engine, messages: list[AddRequest | AddEmbedding]) -> list[RequestOutput]:
    for message in messages:
        engine.handle(message)
    outputs = run_dry(engine)
    engine.scheduler.check_integrity()
    assert engine.stats().num_compiles_after_warmup == 0
    assert engine.scheduler.stats().num_pages_held == 0
    return outputs


def prompt(number: int) -> list[int]:
    known = [tokens for tokens, *_ in reference("llama")]
    return [1 + int(token) % 120 for token in known[number % len(known)]]


def constrained() -> list[AddRequest]:
    """Grammars with long forced runs, without any, and with penalties; texts of their own, free texts beside them."""
    schema, letters = Grammar.json_schema(RECORD), Grammar.regex("[f-z]{3,9}[0-9]")
    params = [
        SamplingParams(grammar=schema, temperature=0),
        SamplingParams(grammar=schema, temperature=1.2, seed=5, n=3),
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(grammar=letters, temperature=0, frequency_penalty=1.5, repetition_penalty=1.3),
        SamplingParams(grammar=letters, temperature=0.9, top_k=9, seed=3, logprobs=2),
        SamplingParams(temperature=1.0, seed=8, max_tokens=12),
        SamplingParams(grammar=Grammar.choice(["yes", "no", "perhaps"]), temperature=0),
        SamplingParams(grammar=schema, temperature=0, max_tokens=4),
    ]
    return [AddRequest(request_id=f"{i}", prompt=prompt(i), params=one) for i, one in enumerate(params)]


def texts(outputs: list[RequestOutput]) -> dict[tuple[str, int], str]:
    return {(out.request_id, out.index): text_of(outputs, out.request_id, out.index) for out in outputs}


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("llama", "data=2,tensor=2"),
        pytest.param("llama", "data=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("llama", "tensor=8", marks=pytest.mark.slow),  # words of masks past the end of the vocabulary
        pytest.param("qwen3_moe", "expert=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "expert=8", marks=pytest.mark.slow),
    ],
)
def test_texts_under_grammars_are_those_of_one_device(name: str, mesh: str) -> None:
    engine = make_engine(name, mesh)
    outputs = run(engine, constrained())
    found = texts(outputs)
    assert found == texts(run(make_engine(name, ""), constrained()))
    for index in range(3):
        assert set(json.loads(found["1", index])) == {"name", "age"}
    assert re.fullmatch("[f-z]{3,9}[0-9]", found["3", 0]) and re.fullmatch("[f-z]{3,9}[0-9]", found["4", 0])
    assert found["6", 0] in ("yes", "no", "perhaps")
    assert last_of(outputs, "7").finish_reason == "length" and len(found["7", 0]) == 4
    assert engine.stats().num_jumped_tokens > 0
    # The steps of all ranks are constrained together; without jumps and overlap the texts are the same.
    if "tensor=2" in mesh:
        assert texts(run(make_engine(name, mesh, jump_forward=False, overlap=False), constrained())) == found


def embeddings() -> list[AddEmbedding | AddRequest]:
    """Both poolings of five prompts, some longer than a step, with texts generated beside them."""
    messages: list[AddEmbedding | AddRequest] = []
    for i in range(5):
        for pooling in ("last", "mean"):
            messages.append(
                AddEmbedding(request_id=f"{pooling}{i}", prompt=prompt(i), pooling=pooling, normalize=i % 2 == 0)
            )
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        messages.append(AddRequest(request_id=f"text{i}", prompt=prompt(i), params=params))
    return messages


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("llama", "data=2,tensor=2"),
        pytest.param("llama", "data=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "expert=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "expert=8", marks=pytest.mark.slow),
    ],
)
def test_embeddings_are_those_of_one_device(name: str, mesh: str) -> None:
    found, expected = (run(make_engine(name, one), embeddings()) for one in (mesh, ""))
    for i in range(5):
        for pooling in ("last", "mean"):
            vectors = [last_of(outputs, f"{pooling}{i}").embedding for outputs in (found, expected)]
            np.testing.assert_allclose(*vectors, atol=1e-4)
            assert np.abs(vectors[1]).max() > 0.05
        assert last_of(found, f"text{i}").finish_reason == "length"
    assert texts(found) == texts(expected)


@pytest.mark.slow
def test_pages_too_few_for_all_texts_at_once() -> None:
    """Continuations under a grammar throw each other out on their rank, and go on where they were."""
    runner = warm_runner("llama", "data=4,tensor=2")
    numbers = Grammar.json_schema({"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 14})
    params = SamplingParams(grammar=numbers, n=4, seed=3, temperature=1.0, max_tokens=40)
    messages = [AddRequest(request_id=f"{i}", prompt=prompt(i), params=params) for i in range(4)]
    wide = texts(run(make_engine("llama", "data=4,tensor=2"), messages))
    before, runner.geometry = runner.geometry, dataclasses.replace(runner.geometry, num_pages=16)
    try:
        engine = make_engine("llama", "data=4,tensor=2")
        assert texts(run(engine, messages)) == wide
        assert engine.stats().num_preemptions > 0
    finally:
        runner.geometry = before
