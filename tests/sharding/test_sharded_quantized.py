"""Quantised weights on meshes: what they compute on one device, with no more of them on a device than its share."""

from __future__ import annotations

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import llama_gguf
from mesh_runner import TINY, Served, build, largest_difference, reference, serve
from quantised_files import write_quantised
from tiny_weights import checkpoint

from jaxserve.hub import ModelSource
from jaxserve.runner.runner import ModelRunner
from jaxserve.sampling_params import SamplingParams

MAX_ERROR = 1e-4


def serve_all(name: str, mesh: str, **options: object) -> tuple[ModelRunner, Served]:
    runner = build(name, mesh, **({"weights": "stored"} | options))
    cases = reference(name)
    params = [SamplingParams(temperature=0.0, max_tokens=len(tokens)) for _, tokens, _ in cases]
    return runner, serve(runner, [prompt for prompt, *_ in cases], params)


@functools.cache
def on_one_device(name: str, quantization: str, source: ModelSource | None = None) -> tuple[ModelRunner, Served]:
    return serve_all(name, "", quantization=quantization, source=source)


def check(name: str, mesh: str, quantization: str = "none", source: ModelSource | None = None) -> float:
    """Compares with one device; returns how many times the blocks of one device are on the mesh's first."""
    one, expected = on_one_device(name, quantization, source)
    many, found = serve_all(name, mesh, quantization=quantization, source=source)
    assert found.tokens == expected.tokens
    logits = [np.stack(expected.logits[request.number]) for request in expected.requests]
    assert largest_difference(found, logits) <= MAX_ERROR
    return block_bytes(many) / block_bytes(one)


def block_bytes(runner: ModelRunner) -> int:
    """Of quantised weights on the first device."""
    leaves = [leaf for leaf in runner._steps.leaves if leaf.dtype == jnp.uint8]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mesh, quantization, least, most",
    [
        # One scale a row: inputs are split anywhere, each device has its own copy of the scales.
        ("llama", "data=2,tensor=4", "int8", 1 / 4, 1 / 3),
        # Blocks of 32: the experts' inputs of `down` are 16 on a device, which makes that one dense.
        ("qwen3_moe", "expert=4,tensor=2", "int4", 1 / 8, 1 / 3),
    ],
)
def test_made_at_load(name: str, mesh: str, quantization: str, least: float, most: float) -> None:
    assert least <= check(name, mesh, quantization) <= most


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(
    "name, mesh",
    [
        ("llama", "data=8"), ("llama", "tensor=8"), ("qwen2", "data=2,tensor=2"), ("gemma3", "tensor=2"),
        ("mixtral", "expert=2,tensor=2"), ("gpt_oss", "expert=2,tensor=2"), ("deepseek_v3", "expert=4,tensor=2"),
        ("qwen3_moe", "expert=8"),
    ],
)  # fmt: skip
def test_made_at_load_for_every_kind_of_layer(name: str, mesh: str, quantization: str) -> None:
    check(name, mesh, quantization)


def stored_experts(form: str, name: str, folder: Path) -> ModelSource:
    write_quantised(form, checkpoint(TINY / name), folder / form)
    return ModelSource(form, "safetensors", folder / form)


def test_experts_stay_in_the_blocks_of_their_file(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: fp8 with a scale for each square of a matrix."""
    source = stored_experts("fp8_block", "qwen3_moe", tmp_path)
    # Heads on two devices, experts on eight; a device's inputs of `down` are 16, which makes that one dense.
    assert check("qwen3_moe", "expert=4,tensor=2", source=source) < 1 / 2
    _, stored = on_one_device("qwen3_moe", "none", source)
    _, dense = serve_all("qwen3_moe", "", source=source, weights="dense")
    assert stored.tokens == dense.tokens


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "gptq", "fp8_output", "fp8_block"])
@pytest.mark.parametrize("name, mesh", [("llama", "data=2,tensor=2"), ("qwen3_moe", "expert=2,tensor=2")])
def test_published_forms(form: str, name: str, mesh: str, tmp_path: Path) -> None:
    check(name, mesh, source=stored_experts(form, name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "data=4,tensor=2"])
def test_parts_of_one_product_in_forms_of_their_own(mesh: str, tmp_path: Path) -> None:
    """As Q4_K_M files have them: queries, keys and values in three forms, one of them dense."""
    kinds = {"attn_v": Kind.Q8_0, "attn_q": Kind.Q4_0, "ffn_up": Kind.Q8_0, "attn_output": Kind.Q4_1}
    path = llama_gguf(TINY / "llama", tmp_path / "model.gguf", kinds=kinds)
    assert check("llama", mesh, source=ModelSource("tiny", "gguf", path)) == pytest.approx(1 / 2)
