"""What a mesh costs: bytes of latent cache on a device, bytes that a layer's collectives move, copies of pages."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from jaxserve.models.loading import load_config
from jaxserve.sharding.shape import parse_mesh, resolve_shape
from mesh_runner import TINY

from benchmarks.mesh_shapes import collectives, expected_collectives, forward_program, gathered_shapes
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
    config = config_of("deepseek_v3")
    config = dataclasses.replace(config, num_layers=1, layers=config.layers[-1:])
    shape = resolve_shape(parse_mesh(mesh), config.moe.num_experts)
    expected = expected_collectives(config, shape, num_tokens=T, dispatch=dispatch, value_bytes=4, is_ragged=False)
    assert sum(expected.values()) > 0
    found = {kind: size for kind, (_, size) in collectives(compiled(mesh, dispatch).as_text()).items()}
    assert found == expected


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
