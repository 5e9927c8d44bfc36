"""Mesh shapes, the rules table, and what is refused before any weight is read."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec
from jaxserve.models.loading import load_config
from jaxserve.models.tensor_parallel import kv_heads_of, local_vocab_size
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.rules import RULES, spec
from jaxserve.sharding.shape import AXES, MeshShape, resolve_shape
from mesh_runner import TINY

from jaxserve.config import EngineConfig
from jaxserve.hub import ModelSource
from jaxserve.runner.runner import ModelRunner


@pytest.mark.parametrize(
    "options, num_experts, expected",
    [
        ({}, 0, MeshShape()),
        ({"mesh": "data=4,tensor=2"}, 0, MeshShape(4, 1, 2)),
        ({"dp": 4, "tp": 2}, 0, MeshShape(4, 1, 2)),
        ({"dp": 2, "ep": 4}, 8, MeshShape(2, 4, 1)),
        ({"mesh": " tensor = 2 , expert=4"}, 8, MeshShape(1, 4, 2)),
        # Experts are split over the ranks unless the axis is named.
        ({"dp": 8}, 256, MeshShape(1, 8, 1)),
        ({"dp": 8}, 4, MeshShape(2, 4, 1)),
        ({"mesh": "data=8,expert=1"}, 256, MeshShape(8, 1, 1)),
    ],
)
def test_mesh_of_a_configuration(options: dict, num_experts: int, expected: MeshShape) -> None:
    assert EngineConfig(**options).mesh_shape(num_experts) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mesh": "model=2"}, r"mesh: got axis 'model' in 'model=2'; allowed: data, expert, tensor"),
        ({"mesh": "data=0"}, r"mesh: got 'data=0'.*allowed: AXIS=SIZE with a size of 1 or more"),
        ({"mesh": "data"}, r"mesh: got 'data'.*AXIS=SIZE"),
        ({"mesh": "data=2,data=4"}, r"mesh: got axis 'data' twice"),
        ({"mesh": "data=2", "tp": 2}, r"mesh: got 'data=2' beside dp, tp or ep"),
        ({"dp": 0}, r"dp: got 0; allowed: 1 or more"),
        ({"ep": -1}, r"ep: got -1; allowed: 0 or more"),
    ],
)
def test_bad_options_are_refused_with_the_configuration(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_experts_must_divide() -> None:
    with pytest.raises(ValueError, match=r"mesh: got expert=3; allowed: a divisor of the model's 8 experts"):
        resolve_shape({"expert": 3}, 8)


@pytest.mark.parametrize(
    "mesh, message",
    [
        ("data=3", r"mesh: got data=3,expert=1,tensor=1, which is 3 devices; allowed: a divisor of the 8 devices here"),
        ("data=16", r"which is 16 devices; allowed: a divisor of the 8 devices"),
        ("tensor=3", r"mesh: got tensor=3; allowed: a divisor of the model's heads, 8"),
        ("expert=2", r"mesh: got expert=2 for a model without experts; allowed: 1"),
    ],
)
def test_bad_meshes_are_refused_before_weights_are_read(
    mesh: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("jaxserve.models.loading.load_model", read)
    with pytest.raises(ValueError, match=message):
        ModelRunner(EngineConfig(model=str(TINY / "llama"), mesh=mesh))


def test_a_mesh_has_neighbours_in_one_tensor_group() -> None:
    mesh = make_mesh(MeshShape(2, 2, 2))
    assert mesh.axis_names == AXES
    assert [[d.id for d in pair] for pair in mesh.devices.reshape(4, 2)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert make_mesh(MeshShape(4)).devices.size == 4 < jax.device_count()


def test_specs_come_from_the_table() -> None:
    assert spec("kv_heads", None) == PartitionSpec("tensor", None)
    assert spec("experts", "expert_mlp", None) == PartitionSpec("expert", "tensor", None)
    assert spec("ranks", "vocab") == PartitionSpec(("data", "expert"), "tensor")
    assert {axis for axes in RULES.values() for axis in axes} == set(AXES)


def test_an_array_cannot_be_split_twice_over_one_axis() -> None:
    with pytest.raises(ValueError, match=r"'heads' and 'mlp' of one array are both split over 'tensor'"):
        spec("heads", "mlp")
    with pytest.raises(ValueError, match=r"'ranks' and 'experts' of one array are both split over 'expert'"):
        spec("ranks", "experts")
    with pytest.raises(ValueError, match=r"logical axis: got 'head'; allowed: ranks"):
        spec("head")
    with pytest.raises(TypeError):
        RULES["heads"] = ("data",)  # type: ignore[index]


@pytest.mark.parametrize("num_heads, num_kv_heads, tensor", [(8, 2, 8), (8, 4, 2), (12, 6, 4), (14, 2, 7), (6, 3, 2)])
def test_every_query_head_finds_its_key_head(num_heads: int, num_kv_heads: int, tensor: int) -> None:
    """By brute force: local query head h of a device reads local kv head h // (heads / kv heads of the device)."""
    config = load_config(ModelSource("llama", "safetensors", TINY / "llama"))
    object.__setattr__(config, "num_heads", num_heads)
    object.__setattr__(config, "num_kv_heads", num_kv_heads)
    heads = num_heads // tensor
    for index in range(tensor):
        held = kv_heads_of(config, tensor, index)
        assert heads % len(held) == 0
        for head in range(heads):
            wanted = (index * heads + head) // (num_heads // num_kv_heads)
            assert held[head // (heads // len(held))] == wanted


@pytest.mark.parametrize("vocab_size, tensor, expected", [(203, 1, 203), (203, 2, 128), (128000, 8, 16000)])
def test_parts_of_the_vocabulary(vocab_size: int, tensor: int, expected: int) -> None:
    assert local_vocab_size(vocab_size, tensor) == expected
    assert expected * tensor >= vocab_size
