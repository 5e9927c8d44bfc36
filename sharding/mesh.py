"""The devices of an engine as a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxserve.sharding.shape import AXES, MeshShape


def join_hosts(coordinator: str, num_hosts: int, host_id: int, *, timeout_s: int = 600) -> None:
    """Make the devices of all hosts visible to each other. Before anything else asks for devices.

    coordinator: HOST:PORT at which host 0 may listen. How a lost host is noticed: runner/host_link.py.
    """
    jax.distributed.initialize(coordinator, num_hosts, host_id, initialization_timeout=timeout_s)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of axes data, expert, tensor over the first devices (all hosts' when there are several).

    Devices of one tensor group are neighbours: theirs is the traffic of every layer. Raises ValueError when the
    number of devices is no multiple of the mesh, or some host would have no part in it.
    """
    devices = list(jax.devices() if devices is None else devices)
    wanted = shape.num_devices
    if wanted > len(devices) or len(devices) % wanted:
        raise ValueError(
            f"mesh: got {shape}, which is {wanted} devices; allowed: a divisor of the {len(devices)} devices here "
            f"({devices[0].platform})"
        )
    hosts = {device.process_index for device in devices}
    if len(hosts) > 1 and wanted != len(devices):
        raise ValueError(
            f"mesh: got {shape}, which is {wanted} devices; allowed: all {len(devices)} devices of {len(hosts)} hosts"
        )
    grid = np.array(devices[:wanted]).reshape(shape.data, shape.expert, shape.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
