"""What a mesh costs: bytes of latent cache on a device, bytes that a layer's collectives move, copies of pages."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from jaxserve.models.loading import load_config
from jaxserve.sharding.expert_parallel import received_bytes
from mesh_runner import TINY

from benchmarks.mesh_shapes import collectives, forward_program, gathered_shapes
from benchmarks.mla_memory import measure
from jaxserve.hub import ModelSource

T, NUM_PAGES = 16, 2049  # tokens and pages of each rank


def config_of(name: str, **changes: object):
    config = load_config(ModelSource(name, "safetensors", TINY / name))
    return dataclasses.replace(config, **changes)


def test_data_parallel_latents_take_an_eighth_of_the_memory() -> None:
    config = config_of("deepseek_v3", num_heads=8, num_kv_heads=8)
    tensor = measure(config, "tensor=8", num_tokens=4096, kv_bytes=2**22)
    data = measure(config, "data=8", num_tokens=4096, kv_bytes=2**22)
    assert data.bytes_per_device * 8 == tensor.bytes_per_device
    assert data.largest == 8 * tensor.largest
    mla = config.mla
    assert tensor.bytes_per_device == 4096 * config.num_layers * (mla.kv_lora_rank + mla.rope_head_dim) * 2


@functools.cache
def compiled(mesh: str, dispatch: str) -> jax.stages.Compiled:
    """One layer with experts. XLA:CPU moves bfloat16 as float32, so everything is float32 here."""
    config = config_of("deepseek_v3")
    config = dataclasses.replace(config, num_layers=1, layers=config.layers[-1:])
    program = forward_program(
        config, mesh, jax.devices(), num_tokens=T, rows=4, pages_per_row=4, page_size=8, num_pages=NUM_PAGES,
        dtype="float32", page_dtype="float32", attention="reference", expert_dispatch=dispatch,
    )  # fmt: skip
    return program.lower().compile()


@pytest.mark.parametrize(
    "mesh, dispatch", [("expert=4,tensor=2", "gather"), ("expert=4,tensor=2", "all_to_all"), ("expert=8", "gather")]
)
def test_bytes_of_a_layer_are_those_of_the_formula(mesh: str, dispatch: str) -> None:
    """Bytes of the results on one device, its own part included."""
    config = config_of("deepseek_v3")
    sizes = dict(part.split("=") for part in mesh.split(","))
    num_devices, tensor = int(sizes["expert"]), int(sizes.get("tensor", 1))
    rows, chosen = T * config.hidden_size, config.moe.num_experts_per_token
    inputs = num_devices * (rows * 4 + T * chosen * 8)
    expected = {
        # of the embedding, of attention, and of the experts with the shared one
        "all-reduce": 3 * rows * 4 if tensor > 1 else 0,
        "all-gather": inputs if dispatch == "gather" else 0,
        "reduce-scatter": rows * 4 if dispatch == "gather" else 0,
        # inputs there, sums back: XLA:CPU's twin has room for all tokens of all sources
        "all-to-all": inputs + num_devices * rows * 4 if dispatch == "all_to_all" else 0,
    }
    found = {kind: size for kind, (_, size) in collectives(compiled(mesh, dispatch).as_text()).items()}
    assert found == {kind: size for kind, size in expected.items() if size}
    if dispatch == "gather":
        received = received_bytes(
            "gather", num_devices=num_devices, num_tokens=T, hidden=config.hidden_size,
            num_experts=config.moe.num_experts, num_chosen=chosen, value_bytes=4,
        )  # fmt: skip
        travelling = (num_devices - 1) / num_devices
        # A reduce-scatter reads the parts of all devices and leaves one.
        assert received == (inputs * travelling, found["reduce-scatter"] * num_devices * travelling)


def test_pages_stay_in_place_and_weights_where_they_are() -> None:
    program, config = compiled("expert=4,tensor=2", "gather"), config_of("deepseek_v3")
    page_bytes = NUM_PAGES * 8 * (config.mla.kv_lora_rank + config.mla.rope_head_dim) * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == page_bytes + 4 * config.moe.num_experts  # and the count of choices
    assert memory.temp_size_in_bytes < page_bytes  # not one more copy of the pool
    # What is gathered is tokens and their choices: no weight, no page.
    found = collectives(program.as_text())["all-gather"][1]
    chosen = config.moe.num_experts_per_token
    assert found == 4 * T * (config.hidden_size * 4 + chosen * 8)
    shapes = f"f32[{4 * T},{config.hidden_size}]", f"s32[{4 * T},{chosen}]", f"f32[{4 * T},{chosen}]"
    assert gathered_shapes(program.as_text()) == dict.fromkeys(shapes, 1)
