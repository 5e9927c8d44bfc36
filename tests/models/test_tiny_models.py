"""Every family against transformers: logits and greedy tokens of tiny checkpoints."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import load_config, load_model
from paged_steps import PagedSteps
from tiny_weights import FIXTURES, checkpoint

from jaxserve.hub import ModelSource

# Another folder of such models: JAXSERVE_TINY_MODELS=DIR pytest tests/models/test_tiny_models.py
TINY = Path(os.environ.get("JAXSERVE_TINY_MODELS", FIXTURES))
NAMES = sorted(path.name for path in TINY.iterdir())
MAX_ERROR = 2e-4
PAGE_SIZE = 8
# Whole families by every backend; the others by XLA, and by the backends that have forms of their own for them.
DENSE = ("gemma2", "gemma3", "llama", "llama_bias_tied", "mistral_swa", "qwen2", "qwen3")
PLAIN, NATIVE, SLOW = ("xla", "xla"), ("cpu_ffi", "cpu_ffi"), ("reference", "xla")
BACKENDS = [
    *((name, *backend) for name in NAMES for backend in ((SLOW, PLAIN, NATIVE) if name in DENSE else (PLAIN,))),
    *((name, *NATIVE) for name in ("gpt_oss", "mixtral", "olmo2") if name in NAMES),
    *((name, *SLOW) for name in ("deepseek_v3", "gpt_oss") if name in NAMES),
]


def load(folder: Path, **options: object) -> Decoder:
    source = ModelSource(folder.name, "safetensors", checkpoint(folder))
    # Within what longrope was trained for; other models do not ask.
    wanted = {"page_size": PAGE_SIZE, "attention": "xla", "max_model_len": 64} | options
    return load_model(source, load_config(source), RuntimeOptions(**wanted))


@functools.cache
def compiled(name: str, attention: str, matmul: str) -> PagedSteps:
    return PagedSteps(load(TINY / name, attention=attention, matmul=matmul), num_tokens=88)


def steps_of(name: str, attention: str = "xla", matmul: str = "xla") -> PagedSteps:
    """Compiled once for all tests, with empty pages for each."""
    return compiled(name, attention, matmul).clear()


def reference(name: str) -> list[tuple[list[int], np.ndarray, list[int], np.ndarray]]:
    """(prompt, logits behind it, greedy tokens, the logits that chose them) per prompt."""
    with np.load(TINY / name / "reference.npz") as data:
        return [
            (
                data[f"prompt_{i}"].tolist(),
                data[f"prompt_logits_{i}"][-1],
                data[f"greedy_{i}"].tolist(),
                data[f"greedy_logits_{i}"],
            )
            for i in range(int(data["num_prompts"]))
        ]


@pytest.mark.parametrize("name, attention, matmul", BACKENDS)
def test_prefill_then_decode_of_all_prompts_together(name: str, attention: str, matmul: str) -> None:
    cases = reference(name)
    steps = steps_of(name, attention, matmul)
    sequences = [steps.start() for _ in cases]
    logits = [
        rows[-1] for rows in steps.run([(sequence, case[0]) for sequence, case in zip(sequences, cases, strict=True)])
    ]
    for (_, expected, *_), row in zip(cases, logits, strict=True):
        np.testing.assert_allclose(row, expected, atol=MAX_ERROR, rtol=0)
    for step in range(len(cases[0][2])):
        chosen = [int(row.argmax()) for row in logits]
        assert chosen == [greedy[step] for _, _, greedy, _ in cases]
        for (*_, greedy_logits), row in zip(cases, logits, strict=True):
            np.testing.assert_allclose(row, greedy_logits[step], atol=MAX_ERROR, rtol=0)
        logits = [
            rows[-1]
            for rows in steps.run([(sequence, [token]) for sequence, token in zip(sequences, chosen, strict=True)])
        ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_beside_a_decoding_row(name: str, chunk: int) -> None:
    (first, _, greedy, _), (longest, expected, _, _) = reference(name)[1], reference(name)[-1]
    steps = steps_of(name)
    decoding, chunked = steps.start(), steps.start()
    (logits,) = steps.run([(decoding, first)])
    generated = [int(logits[-1].argmax())]
    for start in range(0, len(longest), chunk):
        row, rows = steps.run([(decoding, generated[-1:]), (chunked, longest[start : start + chunk])])
        generated.append(int(row[-1].argmax()))
    np.testing.assert_allclose(rows[-1], expected, atol=MAX_ERROR, rtol=0)
    common = min(len(generated), len(greedy))
    assert generated[:common] == greedy[:common]


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_that_takes_over_the_pages_of_a_shared_prefix(name: str) -> None:
    """The last two prompts share 16 tokens, two pages of 8."""
    cases = reference(name)[-2:]
    steps = steps_of(name)
    owner, reader = steps.start(), steps.start()
    steps.run([(owner, cases[0][0])])
    reader.pages[:2] = owner.pages[:2]
    reader.num_cached = 16
    (logits,) = steps.run([(reader, cases[1][0][16:])])
    np.testing.assert_allclose(logits[-1], cases[1][1], atol=MAX_ERROR, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_preempted_sequence_is_computed_again(name: str) -> None:
    """Its pages are lost after some tokens; prompt and tokens are prefilled into other pages, and it goes on."""
    prompt, _, greedy, greedy_logits = reference(name)[2]
    steps = steps_of(name)
    before, other = steps.start(), steps.start()
    steps.run([(before, prompt)])
    for token in greedy[:3]:
        steps.run([(before, [token]), (other, [token])])
    steps.forget(before)
    again = steps.start()
    (logits,) = steps.run([(again, [*prompt, *greedy[:3]])])
    for step in range(3, len(greedy)):
        np.testing.assert_allclose(logits[-1], greedy_logits[step], atol=MAX_ERROR, rtol=0)
        assert int(logits[-1].argmax()) == greedy[step]
        (logits,) = steps.run([(again, [greedy[step]])])


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_both_spellings_of_the_configuration_mean_the_same(name: str, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / name / "config_transformers5.json", tmp_path / "config.json")
    new, published = (load_config(ModelSource(name, "safetensors", path)) for path in (tmp_path, FIXTURES / name))
    assert new == published
    assert new.eos_token_ids == (2,) and new.bos_token_id == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_weights_stay_near_the_reference(name: str) -> None:
    """The stored weights are bfloat16, so only activations are rounded: 2**-9 of values near one, a few times."""
    prompt, expected, *_ = reference(name)[-1]
    steps = PagedSteps(load(FIXTURES / name, dtype="bfloat16"), num_tokens=48)
    (logits,) = steps.run([(steps.start(), prompt)])
    error = np.abs(logits[-1] - expected).max()
    assert 0 < error < 0.15
    model = load(FIXTURES / name, dtype="bfloat16")
    assert model.embedding.table.get_value().dtype == "bfloat16"
    assert model.final_norm.weight.get_value().dtype == "float32"


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = load(FIXTURES / "qwen2"), load(FIXTURES / "llama")
    assert tied.head is None and untied.head is not None
    assert json.loads((FIXTURES / "qwen2" / "config.json").read_text())["tie_word_embeddings"]


def test_windows_reach_the_attention_backend() -> None:
    assert [spec.sliding_window for spec in load(FIXTURES / "mistral_swa").attention_specs] == [8, 8]
    assert [spec.sliding_window for spec in load(FIXTURES / "gemma3").attention_specs] == [8, 8, 0]
    assert [spec.logit_softcap for spec in load(FIXTURES / "gemma2").attention_specs] == [3.0, 3.0]
