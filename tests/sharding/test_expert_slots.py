"""Copies of hot experts: the files, who takes which copy, and that no token notices."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxserve.sharding import expert_slots
from jaxserve.sharding.expert_parallel import choose_copies
from jaxserve.sharding.expert_slots import ExpertSlots
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.replication import plan_replicas
from jaxserve.sharding.shape import MeshShape
from mesh_runner import build, largest_difference, reference, serve

from jaxserve.sampling_params import SamplingParams

EXPERTS = PartitionSpec("expert")


def skewed(random: np.random.Generator, num_tokens: int, num_experts: int, chosen: int) -> np.ndarray:
    """ids [T, k]: different experts for each token, some of them far more often."""
    weight = 1 / (1 + np.arange(num_experts)) ** 1.5
    noise = -np.log(random.random((num_tokens, num_experts)))
    return np.argsort(noise / weight, axis=1)[:, :chosen].astype(np.int32)


def test_tokens_take_turns_among_copies_and_devices_get_equal_work() -> None:
    num_devices, num_experts, chosen, num_tokens = 4, 16, 3, 512
    ids = skewed(np.random.default_rng(0), num_devices * num_tokens, num_experts, chosen)
    ids[-5:] = num_experts  # padding
    load = np.bincount(ids.reshape(-1), minlength=num_experts + 1)[:num_experts]
    plan = plan_replicas(load, num_devices, 6)
    slots = ExpertSlots(num_experts, plan.experts_of)

    choose = jax.shard_map(
        lambda part: choose_copies(part, slots), mesh=make_mesh(MeshShape(expert=num_devices)), in_specs=(EXPERTS,),
        out_specs=EXPERTS, check_vma=False,
    )  # fmt: skip
    found = np.asarray(jax.jit(choose)(ids))
    assert (found[-5:] == slots.num_slots).all()
    real = found[:-5]
    assert (slots.contents()[real] == ids[:-5]).all()
    work = np.bincount(real.reshape(-1) // slots.per_device, minlength=num_devices)
    assert work.max() / work.mean() == pytest.approx(plan.imbalance, abs=0.05)
    before = load.reshape(num_devices, -1).sum(axis=1)
    assert plan.imbalance < 1.1 < before.max() / before.mean()


def plan_file(path: Path, name: str, num_devices: int, slots: int) -> tuple[Path, dict[int, list]]:
    """A plan for every layer with experts of a tiny model, from loads that differ by layer."""
    config = build(name, "").model_config
    layers = [number for number, layer in enumerate(config.layers) if layer.uses_moe]
    loads = {number: np.roll(2.0 ** -np.arange(config.moe.num_experts), number).tolist() for number in layers}
    expert_slots.write_layers(path / "load.json", loads)
    options = ["--devices", str(num_devices), "--slots", str(slots), "-o", str(path / "plan.json")]
    expert_slots.main([str(path / "load.json"), *options])
    return path / "plan.json", json.loads((path / "plan.json").read_text())["layers"]


@pytest.mark.parametrize(
    "name, mesh, slots, dispatch, quantization",
    [
        ("qwen3_moe", "expert=4,tensor=2", 3, "gather", "none"),
        pytest.param("qwen3_moe", "data=2,expert=4", 4, "all_to_all", "none", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "expert=8", 2, "all_to_all", "none", marks=pytest.mark.slow),
        # Biases of experts, summed over tensor.
        pytest.param("gpt_oss", "expert=2,tensor=2", 5, "gather", "none", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "expert=4", 3, "gather", "int8", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_copies(
    name: str, mesh: str, slots: int, dispatch: str, quantization: str, tmp_path: Path
) -> None:
    num_devices = int(mesh.partition("expert=")[2][0])
    path, layers = plan_file(tmp_path, name, num_devices, slots)
    assert all(sum(map(len, devices)) > len({e for held in devices for e in held}) for devices in layers.values())
    cases = reference(name)
    params = [SamplingParams(temperature=0.0, max_tokens=len(tokens)) for _, tokens, _ in cases]
    prompts = [prompt for prompt, *_ in cases]
    common = {"expert_dispatch": dispatch, "quantization": quantization, "weights": "stored"}
    runner = build(name, mesh, expert_replicas=str(path), expert_load=str(tmp_path / "counted.json"), **common)
    served = serve(runner, prompts, params)
    if quantization == "none":
        tokens, logits = [tokens for _, tokens, _ in cases], [logits for *_, logits in cases]
    else:
        plain = serve(build(name, mesh, **common), prompts, params)
        tokens, logits = plain.tokens, [np.stack(plain.logits[request.number]) for request in plain.requests]
    assert served.tokens == tokens
    assert largest_difference(served, logits) <= 1e-4
    load = runner.expert_load()
    runner.close()
    counted = json.loads((tmp_path / "counted.json").read_text())["layers"]
    assert counted.keys() == layers.keys()
    np.testing.assert_array_equal(list(counted.values()), load)
    assert load.sum() > 0


@pytest.mark.parametrize(
    "content, options, message",
    [
        ({"layers": {"1": [[0, 1, 2, 3], [4, 5, 6]]}}, {}, r"layer 1: experts: got 7 .*allowed: each of 8"),
        ({"layers": {"1": [[0, 1, 2, 3, 3], [4, 5, 6, 7]]}}, {}, r"experts of device 0: got \[0, 1, 2, 3, 3\]"),
        ({"layers": {"1": [list(range(8))]}}, {}, r"layer 1 is for 1 devices; allowed: 2, the mesh's"),
        ({"layers": {"9": [[0], [1]]}}, {}, r"layer 9 has no experts; allowed: 1 to 1"),
        ({"layers": {"1": 3}}, {}, r"plan.json: TypeError"),
        ({"layers": {}}, {"deterministic": True}, r"expert_replicas: got .* with deterministic; allowed: none"),
        ({"layers": {}}, {"mesh": "data=2,expert=1"}, r"expert_replicas: got .*allowed: on an expert axis"),
        ({"layers": {}}, {"mesh": ""}, r"got a file on one device; allowed: on a mesh"),
    ],
)
def test_bad_plans_are_refused_before_weights_are_read(
    content: dict, options: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("mesh_runner.load_model", read)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        build("qwen3_moe", **({"mesh": "expert=2", "expert_replicas": str(path)} | options))
