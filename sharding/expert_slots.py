"""Experts that lie on several devices: where their copies are, and the file that says so. No jax.

    jaxserve serve MODEL --dp 8 --expert-load load.json           # counts the choices of real requests
    python -m jaxserve.sharding.expert_slots load.json --devices 8 --slots 36 -o plan.json
    jaxserve serve MODEL --dp 8 --expert-replicas plan.json

A load file is {"layers": {"3": [tokens that chose expert 0, 1, ...], ...}} by number of the layer, a plan file
{"layers": {"3": [[experts of device 0], [of device 1], ...], ...}}. Layers that a plan leaves out have no copies.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxserve.sharding.replication import imbalance, plan_replicas


@dataclasses.dataclass(frozen=True)
class ExpertSlots:
    """Where the experts of one layer lie: experts_of[d] are those of device d along the expert axis. A device has
    as many slots as the fullest one needs; slots are numbered device after device.

    Raises ValueError unless each expert is somewhere, and on a device once at most.
    """

    num_experts: int
    experts_of: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = [expert for experts in self.experts_of for expert in experts]
        if set(held) != set(range(self.num_experts)):
            wrong = sorted(set(held) ^ set(range(self.num_experts)))
            raise ValueError(f"experts: got {wrong[0]} too many or not at all; allowed: each of {self.num_experts}")
        for device, experts in enumerate(self.experts_of):
            if len(set(experts)) < len(experts) or not experts:
                raise ValueError(f"experts of device {device}: got {list(experts)}; allowed: one or more, each once")

    @property
    def per_device(self) -> int:
        return max(len(experts) for experts in self.experts_of)

    @property
    def num_slots(self) -> int:
        return self.per_device * len(self.experts_of)

    def contents(self) -> np.ndarray:
        """[slots] the expert in each slot. A free one repeats its device's first expert; no token goes there."""
        room = self.per_device
        return np.array([e for experts in self.experts_of for e in (*experts, *experts[:1] * (room - len(experts)))])

    def copies(self) -> tuple[np.ndarray, np.ndarray]:
        """(slots [E, most copies] int32 of each expert, their number [E] int32). Past its copies a row repeats."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for device, experts in enumerate(self.experts_of):
            for place, expert in enumerate(experts):
                found[expert].append(device * self.per_device + place)
        counts = np.array([len(slots) for slots in found], np.int32)
        return np.array([np.resize(slots, counts.max()) for slots in found], np.int32), counts


def read_plan(path: Path, *, num_experts: int, num_devices: int, layers: set[int]) -> dict[int, ExpertSlots]:
    """Slots by layer. layers: those of the model that have experts. Raises ValueError naming the file and the layer."""
    found = {}
    for layer, devices in _layers(path).items():
        if layer not in layers:
            raise ValueError(f"{path}: layer {layer} has no experts; allowed: {min(layers)} to {max(layers)}")
        if len(devices) != num_devices:
            raise ValueError(f"{path}: layer {layer} is for {len(devices)} devices; allowed: {num_devices}, the mesh's")
        try:
            found[layer] = ExpertSlots(num_experts, tuple(tuple(int(one) for one in experts) for experts in devices))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: layer {layer}: {error}") from None
    return found


def write_layers(path: Path, layers: Mapping[int, Any]) -> None:
    """A load file or a plan file."""
    path.write_text(json.dumps({"layers": {str(layer): value for layer, value in layers.items()}}))


def _layers(path: Path) -> dict[int, list[Any]]:
    try:
        return {int(layer): list(value) for layer, value in json.loads(path.read_text())["layers"].items()}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f'{path}: {error!r}; allowed: {{"layers": {{"<number>": [...]}}}}') from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plan copies of hot experts from counted choices.")
    parser.add_argument("load", type=Path, help="what serve --expert-load wrote")
    parser.add_argument("--devices", type=int, required=True, help="along the expert axis")
    parser.add_argument("--slots", type=int, required=True, help="experts that a device may hold in each layer")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    plans = {
        layer: (np.array(load), plan_replicas(np.array(load), options.devices, options.slots))
        for layer, load in _layers(options.load).items()
    }
    write_layers(options.output, {layer: plan.experts_of for layer, (_, plan) in plans.items()})
    for layer, (load, plan) in plans.items():
        copies = sum(plan.num_copies) - len(plan.num_copies)
        before = imbalance(load, options.devices)
        print(f"layer {layer}: {copies} copies, busiest device / mean {before:.2f} -> {plan.imbalance:.2f}")


if __name__ == "__main__":
    main()
