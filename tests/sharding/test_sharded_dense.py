"""Dense models on meshes against transformers: tokens equal, logits within 1e-4."""

from __future__ import annotations

import numpy as np
import pytest
from mesh_runner import build, largest_difference, reference, serve

from jaxserve.sampling_params import SamplingParams

MAX_ERROR = 1e-4


def check(name: str, mesh: str, **changes: object) -> None:
    cases = reference(name)
    runner = build(name, mesh, **changes)
    params = [SamplingParams(temperature=0.0, max_tokens=len(tokens)) for _, tokens, _ in cases]
    served = serve(runner, [prompt for prompt, *_ in cases], params)
    assert served.tokens == [tokens for _, tokens, _ in cases]
    assert largest_difference(served, [logits for *_, logits in cases]) <= MAX_ERROR


# Five prompts: on eight ranks three idle all the time, and the longest prompt takes steps of its own.
@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2", "tensor=8"])
def test_llama(mesh: str) -> None:
    check("llama", mesh)


@pytest.mark.parametrize("name, mesh", [("gemma2", "data=2,tensor=2"), ("qwen2", "tensor=4")])
def test_other_families(name: str, mesh: str) -> None:
    """Soft caps, windows and a tied, scaled embedding; biases and key/value heads on two devices each."""
    check(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "llama_bias_tied", "mistral_swa", "qwen3"])
@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4"])
def test_every_family(name: str, mesh: str) -> None:
    check(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh", [("phi3", "tensor=2"), ("smollm3", "tensor=2"), ("olmo2", "data=2")])
def test_families_with_packed_weights_no_rotation_and_wide_norms(name: str, mesh: str) -> None:
    check(name, mesh)


@pytest.mark.parametrize("backend", ["xla", "cpu_ffi"])
def test_attention_and_product_backends_under_the_mesh(backend: str) -> None:
    """qwen2 has heads of 16: the compiled kernels run on each device by themselves."""
    check("qwen2", "data=2,tensor=2", attention_backend=backend, matmul_backend=backend)


def test_idle_ranks_write_nothing() -> None:
    """One request on eight ranks: the pages of seven stay as they were."""
    runner = build("llama", "data=8")
    prompt, tokens, _ = reference("llama")[0]
    assert serve(runner, [prompt]).tokens == [tokens]
    page = np.asarray(runner._steps.state.pages[0]).reshape(8, runner.geometry.num_pages, -1)
    assert np.abs(page[0]).max() > 0
    assert np.abs(page[1:]).max() == 0
