"""Which devices a configuration asks for, and which experts lie on which of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.tensor_parallel import check_mesh
from jaxserve.sharding.expert_slots import ExpertSlots, read_plan, write_layers
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.shape import MeshShape


def place_on_mesh(
    config: EngineConfig, model_config: ModelConfig, options: RuntimeOptions
) -> tuple[RuntimeOptions, Mesh | None]:
    """The mesh of this configuration (None: one device), and the options that go with it. Raises ValueError for one
    that the model or the devices cannot be split over."""
    shape = config.mesh_shape(0 if model_config.moe is None else model_config.moe.num_experts)
    if shape.num_devices == 1:
        if config.expert_replicas or config.expert_load:
            raise ValueError("expert_replicas, expert_load: got a file on one device; allowed: on a mesh")
        return options, None
    check_mesh(model_config, shape)
    slots = _expert_slots(config, model_config, shape)
    return dataclasses.replace(options, mesh=shape, expert_slots=slots), make_mesh(shape)


def _expert_slots(
    config: EngineConfig, model_config: ModelConfig, shape: MeshShape
) -> tuple[tuple[int, ExpertSlots], ...]:
    if not config.expert_replicas:
        return ()
    if config.deterministic:
        # Which copy takes a token depends on its place in the step, and with it the order of sums over devices.
        raise ValueError(f"expert_replicas: got {config.expert_replicas!r} with deterministic; allowed: none")
    if shape.expert == 1 or model_config.moe is None:
        raise ValueError(f"expert_replicas: got {config.expert_replicas!r} on {shape}; allowed: on an expert axis")
    layers = {number for number, layer in enumerate(model_config.layers) if layer.uses_moe}
    plan = read_plan(
        Path(config.expert_replicas),
        num_experts=model_config.moe.num_experts,
        num_devices=shape.expert,
        layers=layers,
    )
    return tuple(plan.items())


def write_expert_load(path: Path, model_config: ModelConfig, load: np.ndarray) -> None:
    """load [layers with experts, E] as a file for sharding/expert_slots.py."""
    layers = [number for number, layer in enumerate(model_config.layers) if layer.uses_moe]
    write_layers(path, dict(zip(layers, load.tolist(), strict=True)))
