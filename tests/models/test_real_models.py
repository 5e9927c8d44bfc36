"""The two packaged models against transformers in float32, on the same dequantised weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import load_config, load_model
from jaxserve.pallas_kernels.matmul.quantized import QuantizedWeight
from paged_steps import PagedSteps

from jaxserve.hub import ModelSource

FIXTURES = Path(__file__).parents[1] / "fixtures"
CLOSE_CALL = 1e-4  # a gap between the two best logits below which rounding may choose
MAX_LOGPROB_ERROR = 1e-3


def references(name: str) -> list[dict[str, Any]]:
    path = FIXTURES / f"{name.replace('-', '_')}_greedy.json"
    if not path.exists():
        pytest.skip(f"{path.name} has not been made: tests/fixtures/make_reference.py writes it")
    return json.loads(path.read_text())["rows"]


@functools.lru_cache(maxsize=2)
def compiled(source: ModelSource, dtype: str, weights: str) -> PagedSteps:
    options = RuntimeOptions(dtype=dtype, attention="cpu_ffi", matmul="cpu_ffi", page_size=16)
    model = load_model(source, load_config(source), options, weights=weights)
    return PagedSteps(model, num_tokens=64, num_rows=1, pages_per_row=20)


def steps_for(source: ModelSource, dtype: str, *, weights: str = "dense") -> PagedSteps:
    return compiled(source, dtype, weights).clear()


def log_probabilities(steps: PagedSteps, case: dict[str, Any]) -> np.ndarray:
    """[tokens of the continuation, V]: each behind the prompt and the reference's tokens before it, in chunks."""
    ids = case["prompt"] + case["tokens"][:-1]
    sequence = steps.clear().start()
    parts = [steps.run([(sequence, ids[start : start + 64])])[0] for start in range(0, len(ids), 64)]
    logits = np.concatenate(parts)[len(case["prompt"]) - 1 :]
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m"])
def test_greedy_tokens_and_log_probabilities_in_float32(name: str, packaged: Callable[[str], ModelSource]) -> None:
    """Given the reference's tokens so far, the best token is the reference's next one: by induction the greedy
    continuation is the same."""
    steps = steps_for(packaged(name), "float32")
    worst, num_split = 0.0, 0
    for case in references(name):
        found = log_probabilities(steps, case)
        chosen = found.argmax(axis=1)
        for step, (token, gap) in enumerate(zip(case["tokens"], case["gaps"], strict=True)):
            if chosen[step] != token:
                assert gap < CLOSE_CALL, f"prompt {case['prompt'][:8]}: token {step} is {chosen[step]}, not {token}"
                num_split += 1
        errors = np.abs(found[np.arange(len(found)), case["tokens"]] - np.array(case["logprobs"]))
        worst = max(worst, float(errors.max()))
    print(f"{name}: largest error of a log-probability {worst:.1e}, close calls decided otherwise: {num_split}")
    assert worst <= MAX_LOGPROB_ERROR


@pytest.mark.parametrize("weights", ["dense", "stored", "both"])
def test_smaller_weights_change_little(weights: str, packaged: Callable[[str], ModelSource]) -> None:
    """The default on CPU, and blocks of the file multiplied as they are: mean KL divergence to float32 and agreement
    of the best token over all positions."""
    name = "smollm2-135m"
    divergences, agreements = [], []
    exact = steps_for(packaged(name), "float32")
    rounded = steps_for(packaged(name), "bfloat16", weights=weights)
    for case in references(name)[:10]:
        p, q = log_probabilities(exact, case), log_probabilities(rounded, case)
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        agreements.append(p.argmax(axis=1) == q.argmax(axis=1))
    divergence, agreement = np.concatenate(divergences).mean(), np.concatenate(agreements).mean()
    print(f"{name}: mean KL {divergence:.1e}, same best token {agreement:.2%}")
    assert divergence <= 2e-3
    assert agreement >= 0.97


def test_stored_blocks_decode_to_the_same_weights(packaged: Callable[[str], ModelSource]) -> None:
    """Products of few rows take the blocks with float32 activations: only the order of sums differs from float32."""
    case = references("smollm2-135m")[3]
    exact = steps_for(packaged("smollm2-135m"), "float32")
    kept = steps_for(packaged("smollm2-135m"), "float32", weights="stored")
    for weight in (kept.model.embedding.table, kept.model.layers[0].attention.qkv.weight):
        assert isinstance(weight.get_value(), QuantizedWeight)
    ids = (case["prompt"] + case["tokens"])[:12]
    found = []
    for steps in (exact, kept):
        sequence = steps.start()
        found.append(steps.run([(sequence, ids)])[0])
    np.testing.assert_allclose(found[1], found[0], atol=1e-3)
