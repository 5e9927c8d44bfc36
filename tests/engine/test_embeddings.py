"""Embeddings by a generating model: beside requests that generate, in chunks, and with pages too few."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_fakes import ByteTokenizer, last_of, run_dry

sys.path.append(str(Path(__file__).parents[1] / "runner"))

from tiny_runner_model import EOS, HIDDEN, VOCAB, build_model, build_runner, full_hidden

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AbortRequest, AddEmbedding, AddRequest, ModelInfo, decode_to_engine, encode
from jaxserve.outputs import RequestRefused
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams

PROMPTS = [[7], list(range(20, 29)), list(range(30, 75)), [11, 3] * 20]


class TinyTokenizer(ByteTokenizer):
    vocab_size = VOCAB
    special_ids = frozenset({EOS})


def make_engine(runner: ModelRunner, *, task: str = "generate", **options: object) -> Engine:
    info = ModelInfo(
        name="tiny", tokenizer_path="", vocab_size=VOCAB, max_model_len=runner.geometry.max_model_len,
        eos_token_ids=[EOS], max_num_rows=4, dtype="float32", num_pages=runner.geometry.num_pages, page_size=4,
        embedding_size=HIDDEN, task=task,
    )  # fmt: skip
    config = EngineConfig(max_step_tokens=16, max_num_rows=4, **options)
    return Engine(runner, TinyTokenizer(), config, model=info)


def states(prompt: list[int]) -> np.ndarray:
    """The model's last operation before embeddings doubles the hidden states."""
    return 2 * full_hidden(build_model(), prompt)


def expected(prompt: list[int], pooling: str) -> np.ndarray:
    return states(prompt)[-1] if pooling == "last" else states(prompt).mean(axis=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("overlap", [True, False])
def test_embeddings_beside_generation_equal_float64(runner: ModelRunner, pooling: str, overlap: bool) -> None:
    """Chunks of 16 tokens, one prompt twice (its second time from the cache), texts generated in between."""
    engine = make_engine(runner, overlap=overlap)
    for k, prompt in enumerate(PROMPTS * 2):
        message = AddEmbedding(request_id=f"e{k}", prompt=prompt, pooling=pooling, normalize=False)
        engine.handle(decode_to_engine(encode(message)))
        engine.handle(AddRequest(request_id=f"g{k}", prompt=prompt, params=SamplingParams(max_tokens=4)))
    outputs = run_dry(engine)
    for k, prompt in enumerate(PROMPTS * 2):
        answer = last_of(outputs, f"e{k}")
        assert (answer.finish_reason, answer.text, answer.token_ids) == ("stop", "", [])
        assert answer.num_prompt_tokens == len(prompt) and answer.num_output_tokens == 0
        np.testing.assert_allclose(answer.embedding, expected(prompt, pooling), atol=2e-5)
        assert last_of(outputs, f"g{k}").embedding is None
    again = last_of(outputs, f"e{len(PROMPTS) + 2}")
    assert (again.num_cached_tokens > 0) == (pooling == "last")
    assert runner.compiles_after_warmup == 0
    assert engine.stats().num_output_tokens == 4 * 2 * len(PROMPTS)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_preempted_texts_start_again(runner: ModelRunner, pooling: str, overlap: bool, num_steps: int) -> None:
    """Thrown out by hand between two chunks (or behind the last): no pool is small enough to do it in three steps."""
    engine = make_engine(runner, overlap=overlap)
    engine.handle(AddEmbedding(request_id="e", prompt=PROMPTS[2], pooling=pooling, normalize=False))
    outputs = [out for _ in range(num_steps) for out in engine.step()]
    for sequence in list(engine.scheduler._queues.running):
        engine.scheduler._queues.preempt(sequence)
    outputs += run_dry(engine)
    np.testing.assert_allclose(last_of(outputs, "e").embedding, expected(PROMPTS[2], pooling), atol=2e-5)
    engine.scheduler.check_integrity()


def test_normalised_and_shortened(runner: ModelRunner) -> None:
    engine = make_engine(runner)
    engine.handle(AddEmbedding(request_id="all", prompt=PROMPTS[1]))
    engine.handle(AddEmbedding(request_id="five", prompt=PROMPTS[1], dimensions=5))
    outputs = run_dry(engine)
    whole = expected(PROMPTS[1], "last")
    np.testing.assert_allclose(last_of(outputs, "all").embedding, whole / np.linalg.norm(whole), atol=1e-6)
    np.testing.assert_allclose(last_of(outputs, "five").embedding, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "parameter", "allowed"),
    [
        ({"pooling": "cls"}, "pooling", "last, mean"),
        ({"dimensions": HIDDEN + 1}, "dimensions", f"1 to {HIDDEN}"),
        ({"prompt": []}, "prompt", "1 to 63 tokens"),
        ({"prompt": [VOCAB]}, "prompt", f"0 to {VOCAB - 1}"),
        ({"deadline_s": 0.0}, "deadline_s", "above 0"),
    ],
)
def test_mistakes_are_answered_by_name(
    runner: ModelRunner, wrong: dict[str, object], parameter: str, allowed: str
) -> None:
    engine = make_engine(runner)
    engine.handle(msgspec.structs.replace(AddEmbedding(request_id="e", prompt=[1, 2]), **wrong))
    answer = last_of(run_dry(engine), "e")
    assert (answer.finish_reason, answer.parameter, answer.embedding) == ("error", parameter, None)
    assert answer.error is not None and allowed in answer.error


def test_a_model_for_embeddings_refuses_to_generate(runner: ModelRunner) -> None:
    engine = make_engine(runner, task="embed")
    engine.handle(AddRequest(request_id="g", prompt=[1], params=SamplingParams(n=2)))
    engine.handle(AddEmbedding(request_id="e", prompt=[1]))
    outputs = run_dry(engine)
    assert [out.parameter for out in outputs if out.request_id == "g"] == ["model", "model"]
    assert last_of(outputs, "e").embedding is not None


def test_an_aborted_embedding_is_answered_without_a_vector(runner: ModelRunner) -> None:
    engine = make_engine(runner)
    engine.handle(AddEmbedding(request_id="e", prompt=PROMPTS[2]))
    engine.step()
    engine.handle(AbortRequest("e"))
    answer = last_of(run_dry(engine), "e")
    assert (answer.finish_reason, answer.embedding, answer.token_ids) == ("abort", None, [])


def test_llm_embeds_in_order(runner: ModelRunner) -> None:
    with LLM.from_engine(make_engine(build_runner(warmup=False))) as llm:
        found = llm.embed(["abc", list(range(30, 75)), "d"], pooling="mean")
        assert found.shape == (3, HIDDEN) and found.dtype == np.float32
        for row, prompt in zip(found, [list(b"abc"), list(range(30, 75)), list(b"d")], strict=True):
            whole = expected(prompt, "mean")
            np.testing.assert_allclose(row, whole / np.linalg.norm(whole), atol=1e-5)
        assert llm.embed([]).size == 0
        with pytest.raises(RequestRefused, match="pooling") as caught:
            llm.embed(["a", "b"], pooling="max")
        assert caught.value.parameter == "pooling"
        assert llm.embed("d", dimensions=4).shape == (1, 4)
