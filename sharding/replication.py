"""Which experts to hold more than once, and where, so that devices get equal work. Planned from counted loads.

The greedy plan of DeepSeek's expert-parallel load balancer (EPLB, 2025): every free slot goes to the expert with the
most tokens per copy, then copies are dealt out, the heaviest first, to the device with the least load that has room
and does not hold that expert yet.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ReplicationPlan:
    """For one layer. experts_of[d] are the experts that device d holds; an expert's tokens are shared equally by its
    copies. imbalance: load of the busiest device / mean (1: perfect)."""

    experts_of: tuple[tuple[int, ...], ...]
    num_copies: tuple[int, ...]
    imbalance: float


def plan_replicas(load: np.ndarray, num_devices: int, slots_per_device: int) -> ReplicationPlan:
    """load [E]: tokens that chose each expert. Raises ValueError when the experts do not fit into the slots."""
    load = np.asarray(load, np.float64)
    num_experts, num_slots = len(load), num_devices * slots_per_device
    if load.ndim != 1 or (load < 0).any():
        raise ValueError(
            f"load: got shape {load.shape}, least {load.min()}; allowed: one number of 0 or more an expert"
        )
    if num_slots < num_experts or num_devices < 1:
        raise ValueError(
            f"slots: got {num_devices} devices of {slots_per_device} slots; allowed: at least {num_experts} in all"
        )
    copies = np.ones(num_experts, np.int64)
    for _ in range(num_slots - num_experts):
        share = np.where(copies < num_devices, load / copies, -1.0)
        if share.max() <= 0:
            break  # nothing left that a copy would help
        copies[int(share.argmax())] += 1
    return _deal_out(load, copies, num_devices, slots_per_device)


def _deal_out(load: np.ndarray, copies: np.ndarray, num_devices: int, slots_per_device: int) -> ReplicationPlan:
    held: list[list[int]] = [[] for _ in range(num_devices)]
    share = load / copies
    work = np.zeros(num_devices)
    order = sorted(range(len(share)), key=lambda expert: (-share[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            open_devices = [
                device
                for device in range(num_devices)
                if len(held[device]) < slots_per_device and expert not in held[device]
            ]
            if not open_devices:
                # Every device with room holds it already: the others carry its tokens.
                copies = copies.copy()
                copies[expert] -= 1
                continue
            device = min(open_devices, key=lambda one: (work[one], len(held[one]), one))
            held[device].append(expert)
            work[device] += share[expert]
    work = np.array([sum(load[expert] / copies[expert] for expert in experts) for experts in held])
    mean = work.sum() / num_devices
    return ReplicationPlan(
        tuple(tuple(sorted(experts)) for experts in held),
        tuple(int(count) for count in copies),
        float(work.max() / mean) if mean else 1.0,
    )


def imbalance(load: np.ndarray, num_devices: int) -> float:
    """Load of the busiest device / mean, with each expert once, E / num_devices neighbours on a device."""
    work = np.asarray(load, np.float64).reshape(num_devices, -1).sum(axis=1)
    return float(work.max() / work.mean()) if work.sum() else 1.0
