"""The engine over compiled programs: a tiny model's tokens against its recomputation in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fakes import ByteTokenizer, last_of, run_dry

sys.path.append(str(Path(__file__).parents[1] / "runner"))

from tiny_runner_model import EOS, VOCAB, build_model, build_runner, full_logits

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.messages import AddRequest, Heartbeat, ModelInfo, OutputBatch, encode
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams

NUM_TOKENS = 12


class TinyTokenizer(ByteTokenizer):
    vocab_size = VOCAB
    special_ids = frozenset({EOS})


def prompt_of(k: int) -> list[int]:
    return list(range(10 + k, 20 + 2 * k))


def params_of(k: int) -> SamplingParams:
    """Greedy and drawn, with scores and without, side by side."""
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=float(k % 2),
        seed=k,
        ignore_eos=True,
        logprobs=3 if k % 3 == 0 else None,
        prompt_logprobs=2 if k == 4 else None,
    )


def greedy_tokens(prompt: list[int]) -> list[int]:
    model, sequence = build_model(), list(prompt)
    for _ in range(NUM_TOKENS):
        sequence.append(int(full_logits(model, sequence)[-1].argmax()))
    return sequence[len(prompt) :]


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = build_runner()
    yield runner
    runner.close()


def generate(runner: ModelRunner, *, overlap: bool, **options: object) -> dict[str, list[int]]:
    config = EngineConfig(max_num_rows=4, max_step_tokens=16, overlap=overlap, **options)
    geometry = runner.geometry
    model = ModelInfo(
        name="tiny", tokenizer_path="", vocab_size=VOCAB, max_model_len=geometry.max_model_len, eos_token_ids=[EOS],
        max_num_rows=4, dtype="float32", num_pages=geometry.num_pages, page_size=geometry.page_size,
    )  # fmt: skip
    engine = Engine(runner, TinyTokenizer(), config, model=model)
    for k in range(8):
        engine.add(AddRequest(request_id=f"{k}", prompt=prompt_of(k), params=params_of(k)))
    outputs = run_dry(engine)
    assert encode(OutputBatch(outputs)) and encode(Heartbeat(engine.stats()))
    for k in range(8):
        assert last_of(outputs, f"{k}").finish_reason == "length"
    engine.scheduler.check_integrity()
    assert engine.stats().num_compiles_after_warmup == 0
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.fixture(scope="module")
def overlapped(runner) -> dict[str, list[int]]:
    return generate(runner, overlap=True)


def test_greedy_tokens_equal_the_recomputation(overlapped):
    for k in range(0, 8, 2):
        assert overlapped[f"{k}"] == greedy_tokens(prompt_of(k))


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True, "prefix_cache": False}])
def test_overlap_and_cache_change_no_token(runner, overlapped, options):
    assert generate(runner, **options) == overlapped
