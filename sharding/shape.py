"""How many devices lie along each mesh axis. Plain numbers, no jax: the configuration is checked with them."""

from __future__ import annotations

import dataclasses
import math

AXES = ("data", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis; static in every program.

    data     groups of requests: own rows, pages and prefixes; every group holds all weights
    expert   as data, and the experts of a layer are split over it
    tensor   heads, feed-forward width (each expert's too) and vocabulary are split; requests are not

    A rank is one place along data and expert together: what owns rows, pages and prefixes.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh: got {axis}={size!r}; allowed: 1 or more")

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.tensor

    @property
    def num_ranks(self) -> int:
        return self.data * self.expert

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)


ONE_DEVICE = MeshShape()


def parse_mesh(text: str) -> dict[str, int]:
    """ "data=4,tensor=2" -> {"data": 4, "tensor": 2}. ValueError for an unknown or repeated axis, or a bad size."""
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise ValueError(f"mesh: got axis {axis!r} in {text!r}; allowed: {', '.join(AXES)}")
        if not equals or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh: got {part.strip()!r} in {text!r}; allowed: AXIS=SIZE with a size of 1 or more")
        if axis in found:
            raise ValueError(f"mesh: got axis {axis!r} twice in {text!r}; allowed: once")
        found[axis] = int(size)
    return found


def resolve_shape(axes: dict[str, int], num_experts: int = 0) -> MeshShape:
    """The mesh of a model with `num_experts` (0: none) experts in a layer.

    When `expert` is not named, a model with experts has them split over as much of `data` as divides their number:
    a copy of all experts on every rank is what expert=1 asks for. ValueError when the experts do not divide.
    """
    data, tensor = axes.get("data", 1), axes.get("tensor", 1)
    if "expert" not in axes:
        expert = math.gcd(data, num_experts) if num_experts else 1
        return MeshShape(data // expert, expert, tensor)
    expert = axes["expert"]
    if num_experts and num_experts % expert:
        raise ValueError(f"mesh: got expert={expert}; allowed: a divisor of the model's {num_experts} experts")
    return MeshShape(data, expert, tensor)
