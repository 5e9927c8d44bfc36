"""Quantised K/V on a mesh and on one device: prefixes, forks of pages and preemption change no token."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from mesh_runner import build, reference, serve

from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams


@functools.cache
def runner_of(page_dtype: str) -> ModelRunner:
    return build("llama", "", page_dtype=page_dtype)


def test_a_mesh_serves_the_tokens_of_one_device() -> None:
    prompts = sorted((prompt for prompt, *_ in reference("llama")), key=len)[:4]
    one = runner_of("int8")
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = serve(one, prompts, params)
    again = serve(one, prompts, params, scheduler=expected.scheduler)
    assert again.tokens == expected.tokens
    assert sum(request.num_cached_tokens for request in again.requests) > 0
    # Seven pages of 8 tokens for each rank, requests that grow to 40 tokens each.
    many = build("llama", "data=2,tensor=2", page_dtype="int8", num_pages=8, max_model_len=56)
    found = serve(many, prompts, params)
    assert found.scheduler.stats().num_preemptions > 0
    assert found.tokens == expected.tokens
    codes, scales = jax.tree.leaves(many._steps.state.pages[0])
    assert (codes.dtype, scales.dtype) == (np.int8, np.float32) and np.asarray(scales).any()


@pytest.mark.parametrize(("page_dtype", "limit"), [("int8", 0.02), ("fp8", 0.1)])
def test_the_logits_are_near_those_of_exact_pages(page_dtype: str, limit: float) -> None:
    prompts, _, logits = zip(*reference("llama"))
    served = serve(runner_of(page_dtype), list(prompts), SamplingParams(temperature=0.0))
    for request, expected in zip(served.requests, logits, strict=True):
        first = served.logits[request.number][0]
        assert 0 < np.abs(first - expected[0]).max() / np.abs(expected[0]).max() <= limit
