"""What one device does, a mesh does too: options of requests, prefixes, preemption, determinism, no late compiles."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from mesh_runner import build, reference, serve, warm_runner

from jaxserve.request import Request
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.dp_balance import make_scheduler

NUMBERS = itertools.count(2 * 10**6)  # a runner tells requests apart by their numbers
MESH = "data=2,tensor=2"
OPTIONS = [
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=3),
    SamplingParams(temperature=1.0, max_tokens=8, logprobs=2),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=8),
    SamplingParams(temperature=1.2, top_p=0.7, min_p=0.02, max_tokens=8),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7, max_tokens=8),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 200: 5.0, 7: -100.0}, max_tokens=8),
    SamplingParams(temperature=1.0, allowed_token_ids=[1, 5, 77, 90, 201], max_tokens=8),
    SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[11, 12], max_tokens=8, prompt_logprobs=2),
]


def runner_of(mesh: str) -> ModelRunner:
    return warm_runner("llama", mesh)


def prompts(count: int, name: str = "llama") -> list[np.ndarray]:
    known = [prompt for prompt, *_ in reference(name)]
    return [known[i % len(known)] for i in range(count)]


def test_every_option_gives_the_tokens_of_one_device_and_compiles_nothing() -> None:
    many, one = runner_of(MESH), runner_of("")
    found = serve(many, prompts(8), OPTIONS)
    expected = serve(one, prompts(8), OPTIONS)
    assert found.tokens == expected.tokens
    assert len({tuple(tokens) for tokens in found.tokens}) == 8
    for values, wanted in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(values, wanted, atol=1e-4)
    assert len(expected.logprobs[0]) == 8
    assert many.compiles_after_warmup == 0


def test_prefixes_are_found_on_the_rank_that_has_them() -> None:
    runner = runner_of(MESH)
    prompt = prompts(5)[np.argmax([len(p) for p in prompts(5)])]
    first = serve(runner, [prompt])
    again = serve(runner, [prompt], scheduler=first.scheduler)
    assert again.tokens == first.tokens
    assert again.requests[0].num_cached_tokens == (len(prompt) - 1) // 8 * 8


def test_forks_share_pages_and_copy_the_last_one() -> None:
    runner = runner_of(MESH)
    scheduler = serve(runner, []).scheduler
    prompt = prompts(1)[0]
    params = SamplingParams(temperature=1.0, max_tokens=6, n=3)
    parent = Request(10**6, prompt, params, 100, len(prompt) + 6)
    family = [parent]
    for i in (1, 2):
        family.append(Request(10**6 + i, prompt, params, 100 + i, len(prompt) + 6, index=i, parent=parent))
    for request in family:
        scheduler.add(request)
    copies = 0
    while scheduler.has_work:
        decision = scheduler.schedule()
        copies += sum(len(part.copies) for part in decision.ranks if part is not None)
        scheduler.apply(decision, runner.collect(runner.dispatch(decision)))
        scheduler.check_integrity()
    assert copies == 2 and len(prompt) % 8
    # Requests of their own with the same seeds (100, 101, 102) draw the same.
    expected = serve(runner_of(""), [prompt] * 3, SamplingParams(temperature=1.0, max_tokens=6))
    assert [request.output_ids for request in family] == expected.tokens
    assert len({tuple(tokens) for tokens in expected.tokens}) == 3


def test_preemption_recomputes() -> None:
    """Seven pages of 8 tokens for each rank, four requests that grow to 40 tokens each."""
    small = build("llama", MESH, num_pages=8, max_model_len=56)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    chosen = sorted(prompts(5), key=len)[:4]
    found = serve(small, chosen, params)
    assert found.scheduler.stats().num_preemptions > 0
    assert found.tokens == serve(runner_of(""), chosen, params).tokens


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("llama", MESH),
        pytest.param("qwen3_moe", "expert=4,tensor=2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "expert=8", marks=pytest.mark.slow),
    ],
)
def test_traffic_with_aborts_and_too_few_pages(name: str, mesh: str) -> None:
    """Requests of two namespaces that come and go over several ranks: whoever stays gets the tokens of one device."""
    runner, random = warm_runner(name, mesh), np.random.default_rng(5)
    known = prompts(5, name)
    chosen = [np.concatenate([known[i % 5], known[random.integers(5)][:7]]) for i in range(36)]
    lengths = random.integers(4, 24, len(chosen)).tolist()
    params = [msgspec.structs.replace(OPTIONS[i % 4], max_tokens=length) for i, length in enumerate(lengths)]
    expected = serve(warm_runner(name, ""), chosen, params).tokens
    geometry = dataclasses.replace(runner.geometry, num_pages=14)
    scheduler = make_scheduler(geometry, policy="fcfs", prefix_cache=True, deterministic=False)
    requests = [
        Request(next(NUMBERS), prompt, one, 100 + i, len(prompt) + one.max_tokens, namespace="ab"[i % 2])
        for i, (prompt, one) in enumerate(zip(chosen, params))
    ]
    coming, flying, aborted = list(requests), [], set()
    while coming or scheduler.has_work or flying:
        for _ in range(min(len(coming), random.integers(4))):
            scheduler.add(coming.pop(0))
        number = requests[random.integers(36)].number
        if random.random() < 0.15 and scheduler.abort(number) is not None:
            aborted.add(number)
        while len(flying) < 2 and (decision := scheduler.schedule()) is not None:
            flying.append((decision, runner.dispatch(decision)))
        if flying:
            decision, handle = flying.pop(0)
            scheduler.apply(decision, runner.collect(handle))
        scheduler.check_integrity()
    assert 0 < len(aborted) < 18 and scheduler.stats().num_preemptions > 0
    for request, tokens in zip(requests, expected):
        assert request.number in aborted or request.output_ids == tokens
    assert runner.compiles_after_warmup == 0


@pytest.mark.parametrize(
    "name, mesh, dispatch",
    [
        ("llama", "data=4,tensor=2", "auto"),
        pytest.param("qwen3_moe", "expert=4,tensor=2", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "expert=8", "all_to_all", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "expert=8", "auto", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "data=4,expert=2", "auto", marks=pytest.mark.slow),
    ],
)
def test_deterministic_tokens_and_logprobs_do_not_depend_on_the_batch(name: str, mesh: str, dispatch: str) -> None:
    """Bitwise: alone, with others on all ranks, and with its prefix cached."""
    runner = build(name, mesh, deterministic=True, max_step_tokens=8, max_num_rows=2, expert_dispatch=dispatch)
    params = SamplingParams(temperature=1.0, max_tokens=6, logprobs=0)
    alone = serve(runner, prompts(1, name), params)
    full = serve(runner, prompts(8, name), params)
    cached = serve(runner, prompts(1, name), params, scheduler=full.scheduler)
    assert full.tokens[0] == alone.tokens[0] == cached.tokens[0]
    assert full.logprobs[0] == alone.logprobs[0] == cached.logprobs[0]
    assert cached.requests[0].num_cached_tokens == (len(prompts(1, name)[0]) - 1) // 8 * 8
    assert runner.compiles_after_warmup == 0
