"""What lies along which mesh axis: one table for weights, pages and steps.

    spec("kv_heads", None) -> PartitionSpec("tensor", None)

A logical axis says what a dimension means, the table says over which devices it is split. Nothing else in the tree
names a mesh axis in a PartitionSpec.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import PartitionSpec

# Logical axis -> mesh axes that split it, outermost first; (): every device has all of it.
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # steps
        "ranks": ("data", "expert"),  # rows, their tokens, samples and tables
        "devices": ("data", "expert", "tensor"),  # page arrays: what a device keeps for its rank
        # weights
        "vocab": ("tensor",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("tensor",),
        "experts": ("expert",),
        "expert_mlp": ("tensor",),
        "once": ("tensor",),  # a summand of results that are summed over tensor: zeros on all devices but the first
        "hidden": (),
    }
)


def spec(*axes: str | None) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions mean `axes`; None: not split.

    Raises ValueError for an axis that the table does not have, and when two dimensions would be split over the same
    mesh axis.
    """
    used: dict[str, str] = {}
    entries: list[str | tuple[str, ...] | None] = []
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"logical axis: got {axis!r}; allowed: {', '.join(RULES)}")
        mesh_axes = () if axis is None else RULES[axis]
        for mesh_axis in mesh_axes:
            if mesh_axis in used:
                raise ValueError(
                    f"logical axes {used[mesh_axis]!r} and {axis!r} of one array are both split over {mesh_axis!r}; "
                    "allowed: each mesh axis once"
                )
            used[mesh_axis] = str(axis)
        entries.append(None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
    return PartitionSpec(*entries)
