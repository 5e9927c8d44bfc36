"""The whole engine on real weights, against the transformers implementation (tests/fixtures/make_reference.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cpu_marks import needs_cpu_bytes, needs_cpu_tiles
from jaxserve.pallas_kernels.backend import has_tile_registers

from jaxserve import LLM, SamplingParams

ROWS = json.loads((Path(__file__).parent.parent / "fixtures" / "smollm2_135m_greedy.json").read_text())["rows"]
SHORT = [row for row in ROWS if len(row["prompt"]) <= 80]
SPLIT_GAP = 1e-4


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    """Float32, in a pool so small that requests preempt each other and prompts come in chunks."""
    with LLM(
        smollm2,
        dtype="float32",
        max_model_len=160,
        max_num_rows=6,
        max_step_tokens=24,
        num_pages=24,
        warmup=False,
        progress=False,
    ) as engine:
        yield engine


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)


def compare(llm: LLM, rows: list[dict]) -> None:
    outputs = llm.generate([row["prompt"] for row in rows], greedy(len(rows[0]["tokens"])))
    for row, output in zip(rows, outputs, strict=True):
        for n, (expected, token) in enumerate(zip(row["tokens"], output.token_ids, strict=True)):
            if expected != token:
                assert row["gaps"][n] < SPLIT_GAP, f"token {n}: {token}, transformers has {expected}"
                break
            assert abs(output.logprobs[n].logprob - row["logprobs"][n]) <= 1e-3


def test_tokens_equal_transformers_in_batches_chunks_and_after_preemption(llm: LLM) -> None:
    compare(llm, SHORT[:8])
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_pages_held == 0


def test_tokens_equal_transformers_behind_a_cached_prefix(llm: LLM) -> None:
    longest = max(SHORT, key=lambda row: len(row["prompt"]))
    compare(llm, [longest])
    before = llm.stats().num_cached_tokens
    compare(llm, [longest])
    assert llm.stats().num_cached_tokens - before == (len(longest["prompt"]) - 1) // 16 * 16


def test_continuations_of_one_prompt_differ_by_seed_alone(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, temperature=1.0, max_tokens=12)
    first, second = (llm.generate(SHORT[0]["prompt"], params)[0] for _ in range(2))
    texts = [completion.token_ids for completion in first.outputs]
    assert texts == [completion.token_ids for completion in second.outputs]
    assert len({tuple(text) for text in texts}) > 1


@needs_cpu_tiles
def test_where_products_are_made_in_tiles_company_changes_no_token(smollm2: str) -> None:
    """In bfloat16, with sizes of steps and of samples as they come."""
    params = [SamplingParams(seed=n, temperature=1.0, max_tokens=16, ignore_eos=True) for n in range(8)]
    prompts = [row["prompt"] for row in SHORT[:8]]
    with LLM(
        smollm2, matmul_backend="cpu_tiles", max_model_len=256, max_num_rows=8, warmup=False, progress=False
    ) as engine:
        alone = [engine.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params)]
        engine.flush_cache()
        together = [output.token_ids for output in engine.generate(prompts, params)]
    assert together == alone


@needs_cpu_bytes
def test_inputs_in_bytes_leave_a_prompt_its_probabilities(smollm2: str) -> None:
    """Of 4-bit weights, whose prompts are products in bytes: log-probabilities beside those of the default."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [row["prompt"] for row in SHORT[:4]]
    found = []
    for backend in ("cpu_ffi", "cpu_int8"):
        with LLM(
            smollm2, matmul_backend=backend, max_model_len=256, max_num_rows=8, warmup=False, progress=False
        ) as engine:
            outputs = engine.generate(prompts, params)
        found.append([[token.logprob for token in output.prompt_logprobs[1:]] for output in outputs])
    default, in_bytes = (np.concatenate(each) for each in found)
    if not has_tile_registers():
        assert (default != in_bytes).any()
    assert np.abs(default - in_bytes).mean() <= 0.1


@needs_cpu_tiles
@pytest.mark.slow
@pytest.mark.parametrize("page_dtype", ["int8", "fp8"])
def test_quantised_pages_change_with_no_company(smollm2: str, page_dtype: str) -> None:
    """Alone; in a batch, in chunks and preempted; behind cached prefixes; as forks: the same tokens."""
    params = [SamplingParams(seed=n, temperature=1.0, max_tokens=64, ignore_eos=True) for n in range(8)]
    prompts = [row["prompt"] for row in SHORT[:8]]
    with LLM(
        smollm2, matmul_backend="cpu_tiles", page_dtype=page_dtype, max_model_len=160, max_num_rows=8,
        max_step_tokens=24, num_pages=24, warmup=False, progress=False,
    ) as engine:  # fmt: skip
        alone = [engine.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params)]
        engine.flush_cache()
        together = [output.token_ids for output in engine.generate(prompts, params)]
        assert engine.stats().num_preemptions > 0
        before = engine.stats().num_cached_tokens
        longest = max(range(len(prompts)), key=lambda n: len(prompts[n]))
        cached = [engine.generate(prompts[longest], params[longest])[0].token_ids for _ in range(2)]
        assert engine.stats().num_cached_tokens > before
        forks = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=16, ignore_eos=True)
        first, second = (engine.generate(prompts[0], forks)[0].outputs for _ in range(2))
        stats = engine.stats()
    assert together == alone
    assert cached == [alone[longest]] * 2
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert stats.num_pages_held == 0
