"""The engine over compiled programs: a tiny model's tokens against its recomputation in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from engine_fakes import ByteTokenizer, last_of, run_dry

sys.path.append(str(Path(__file__).parents[1] / "runner"))

from tiny_runner_model import EOS, VOCAB, build_model, full_logits

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


def run_one(runner: ModelRunner, params: SamplingParams, *, overlap: bool, prompt: list[int] | None = None) -> list:
    config = EngineConfig(max_num_rows=4, max_step_tokens=16, overlap=overlap)
    geometry = runner.geometry
    model = ModelInfo(
        name="tiny", tokenizer_path="", vocab_size=VOCAB, max_model_len=geometry.max_model_len, eos_token_ids=[EOS],
        max_num_rows=4, dtype="float32", num_pages=geometry.num_pages, page_size=geometry.page_size,
    )  # fmt: skip
    engine = Engine(runner, TinyTokenizer(), config, model=model)
    outputs = []
    for turn in range(2):  # the second time the prompt is in the prefix cache
        engine.add(AddRequest(request_id=f"{turn}", prompt=prompt or prompt_of(2), params=params))
        outputs.append(run_dry(engine))
    assert engine.stats().num_compiles_after_warmup == 0
    return outputs


def without_bad_words(prompt: list[int], words: tuple[tuple[int, ...], ...]) -> list[int]:
    """Greedy tokens, one by one, of which none completes a bad word."""
    model, sequence = build_model(), list(prompt)
    for _ in range(NUM_TOKENS):
        logits = full_logits(model, sequence)[-1].copy()
        made = tuple(sequence[len(prompt) :])
        for word in words:
            if len(word) == 1 or (len(made) >= len(word) - 1 and made[len(made) - len(word) + 1 :] == word[:-1]):
                logits[word[-1]] = -float("inf")
        sequence.append(int(logits.argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("overlap", [True, False])
def test_bad_words_never_appear_and_change_nothing_else(runner, overlap):
    prompt = prompt_of(2)
    free = greedy_tokens(prompt)
    words: tuple[tuple[int, ...], ...] = (tuple(free[3:5]),)
    words += (tuple(without_bad_words(prompt, words)[4:7]),)
    words += ((without_bad_words(prompt, words)[8],), tuple(prompt[-1:]) + tuple(free[:1]))
    expected = without_bad_words(prompt, words)
    assert expected != free
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, bad_word_ids=words)
    for outputs in run_one(runner, params, overlap=overlap):
        assert [token for output in outputs for token in output.token_ids] == expected


def test_named_tokens_are_scored_in_prompt_and_output(runner):
    prompt, named = prompt_of(2), (7, 0, 150)
    params = SamplingParams(
        max_tokens=3, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0, prompt_logprobs_start=6,
        logprob_token_ids=named,
    )  # fmt: skip
    model = build_model()
    for outputs in run_one(runner, params, overlap=True, prompt=prompt):
        scores = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs)
        assert [score is None for score in scores] == [True] * 6 + [False] * (len(prompt) - 6)
        tokens = [token for output in outputs for token in output.token_ids]
        found = {len(prompt) + k: s for k, s in enumerate(s for output in outputs for s in output.logprobs)}
        found |= {k: score for k, score in enumerate(scores) if score is not None}
        for position, score in found.items():
            logits = full_logits(model, (prompt + tokens)[:position])[-1]
            exact = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert score.token_id == (prompt + tokens)[position]
            assert score.logprob == pytest.approx(exact[score.token_id], abs=1e-4)
            assert [token for token, _ in score.named] == list(named)
            assert [value for _, value in score.named] == pytest.approx([exact[t] for t in named], abs=1e-4)
    assert outputs[0].num_cached_tokens > 0  # what precedes the first score came from the cache
