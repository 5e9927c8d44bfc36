"""Experts over several devices against transformers, by both ways in which tokens reach them."""

from __future__ import annotations

import pytest
from mesh_runner import build, largest_difference, reference, serve

from jaxserve.sampling_params import SamplingParams

MAX_ERROR = 1e-4
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def check(name: str, mesh: str, dispatch: str) -> None:
    """Five prompts of unequal length: some ranks idle, one computes a long prompt, experts have no tokens at all."""
    cases = reference(name)
    params = [SamplingParams(temperature=0.0, max_tokens=len(tokens)) for _, tokens, _ in cases]
    runner = build(name, mesh, expert_dispatch=dispatch)
    served = serve(runner, [prompt for prompt, *_ in cases], params)
    assert served.tokens == [tokens for _, tokens, _ in cases]
    computed = sum(decision.num_tokens for decision in served.decisions)
    load = runner.expert_load()
    assert (load.sum(axis=1) == computed * runner.model_config.moe.num_experts_per_token).all()
    assert largest_difference(served, [logits for *_, logits in cases]) <= MAX_ERROR


@pytest.mark.parametrize(
    "name, mesh, dispatch",
    [
        ("deepseek_v3", "expert=4,tensor=2", "gather"),
        ("deepseek_v3", "expert=8", "all_to_all"),
        ("qwen3_moe", "data=2,expert=4", "all_to_all"),
        ("gpt_oss", "expert=2,tensor=2", "gather"),
        ("mixtral", "data=8", "gather"),
    ],
)
def test_families(name: str, mesh: str, dispatch: str) -> None:
    check(name, mesh, dispatch)


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh", [
    ("qwen2_moe", "tensor=2"), ("olmoe", "expert=2"), ("deepseek_v2", "tensor=2"), ("deepseek_v2_lite", "expert=4"),
    ("gpt_oss_mxfp4", "expert=2"),
])  # fmt: skip
def test_other_families(name: str, mesh: str) -> None:
    """A shared expert behind a gate, norms over all heads, groups of experts, queries without a latent, MXFP4."""
    check(name, mesh, "gather")


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2", "expert=8", "data=2,expert=4", "data=8,expert=1"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_on_every_mesh(name: str, mesh: str, dispatch: str) -> None:
    if name in ("mixtral", "gpt_oss"):  # six experts
        mesh = {"expert=8": "data=4,expert=2", "data=2,expert=4": "expert=2,tensor=4"}.get(mesh, mesh)
    check(name, mesh, dispatch)
