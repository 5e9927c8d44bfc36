"""Families with experts and latent attention behind the real scheduler and runner: prefix hits, preemption, and the
same bits in any company."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from jaxserve.models.loading import load_config, load_model
from tiny_weights import FIXTURES, checkpoint

from jaxserve.config import EngineConfig
from jaxserve.hub import ModelSource
from jaxserve.request import Request
from jaxserve.runner.runner import ModelRunner, resolve_options
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.dp_balance import make_scheduler
from jaxserve.scheduler.scheduler import Scheduler

_numbers = itertools.count()
NUM_TOKENS = 6


def build(name: str, **changes: object) -> ModelRunner:
    wanted = {
        "dtype": "float32", "max_num_rows": 5, "max_step_tokens": 24, "num_pages": 40, "page_size": 8,
        "attention_backend": "xla", "matmul_backend": "xla", "compile_cache_dir": "", "warmup": False,
    }  # fmt: skip
    config = EngineConfig(model=name, **(wanted | changes))
    source = ModelSource(name, "safetensors", checkpoint(FIXTURES / name))
    model_config = load_config(source)
    options = resolve_options(config, "cpu", model_config)
    model = load_model(source, model_config, options)
    if config.deterministic:
        return ModelRunner.from_model(config, model, options)
    # One size of step: every size more is a program to compile.
    with mock.patch("jaxserve.runner.runner.token_ladder", lambda most: (most,)):
        return ModelRunner.from_model(config, model, options)


def start(runner: ModelRunner) -> Scheduler:
    return make_scheduler(runner.geometry, policy="fcfs", prefix_cache=True, deterministic=runner.options.deterministic)


def serve(
    runner: ModelRunner, scheduler: Scheduler, prompts: list[np.ndarray], num_tokens: int = NUM_TOKENS
) -> tuple[list[Request], list[list[float]]]:
    """All prompts at once. Returns the requests as they ended and the log-probabilities of their tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=1)
    requests = [Request(next(_numbers), p, params, 7, len(p) + num_tokens) for p in prompts]
    logprobs: list[list[float]] = [[] for _ in requests]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        decision = scheduler.schedule()
        assert decision is not None
        for event in scheduler.apply(decision, runner.collect(runner.dispatch(decision))):
            assert event.logprob is not None
            logprobs[requests.index(event.request)].append(event.logprob)
        scheduler.check_integrity()
    return requests, logprobs


def reference(name: str) -> tuple[list[np.ndarray], list[list[int]]]:
    with np.load(FIXTURES / name / "reference.npz") as data:
        indices = range(int(data["num_prompts"]))
        return [data[f"prompt_{i}"] for i in indices], [data[f"greedy_{i}"].tolist() for i in indices]


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_prefix_hits_and_preemption(name: str) -> None:
    prompts, expected = reference(name)
    runner = build(name, num_pages=26, page_size=4, max_num_rows=3, max_model_len=64)
    scheduler = start(runner)
    for prompt, tokens in zip(prompts[3:], expected[3:]):  # the two share 16 tokens, four pages
        (request,), _ = serve(runner, scheduler, [prompt])
        assert request.output_ids == tokens
    assert request.num_cached_tokens == 16

    # Three requests that together grow past the pool, against each of them alone.
    alone = [serve(runner, start(runner), [prompt], 40)[0][0].output_ids for prompt in prompts[:3]]
    scheduler = start(runner)
    together, _ = serve(runner, scheduler, prompts[:3], 40)
    assert scheduler.stats().num_preemptions > 0
    assert [request.output_ids for request in together] == alone
    assert [tokens[:NUM_TOKENS] for tokens in alone] == expected[:3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_deterministic(name: str) -> None:
    """Tokens and log-probabilities alone, with a prefix hit, and beside all others: bit for bit the same."""
    prompts, expected = reference(name)
    runner = build(name, deterministic=True, max_step_tokens=12, max_num_rows=3)
    together, logprobs = serve(runner, start(runner), prompts)
    assert [request.output_ids for request in together] == expected
    for prompt, tokens, bits in zip(prompts, expected, logprobs):
        scheduler = start(runner)
        for _ in range(2):  # the second time from cached pages
            (request,), (again,) = serve(runner, scheduler, [prompt])
            assert request.output_ids == tokens
            assert np.float32(again).tobytes() == np.float32(bits).tobytes()
