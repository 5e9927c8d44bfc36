"""Parameters of a model that is split over a mesh: global arrays, each device with its part, from the start.

The model is built with the sizes of one device (tensor_parallel.shard_config). What it asks for here is one device's
part; the answer is the global array, of which shard_map hands every device just that part. Rows of several weights
that share a product (q, k, v) are joined device by device.

A quantised weight is split along its outputs like any other, and along its inputs in whole blocks: bytes move, no value
changes. Forms with one scale for a row repeat it on each device. Where blocks lie across two devices' inputs the matrix
is expanded to the compute dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxserve.models.config import ModelConfig
from jaxserve.models.parameters import Parameters, WeightValue, layer_number
from jaxserve.models.quantization import dequantize_numpy
from jaxserve.models.tensor_parallel import kv_heads_of, local_vocab_size
from jaxserve.pallas_kernels.matmul.quantized import (
    BLOCK,
    ROW_KINDS,
    DoubleWeight,
    JoinedWeight,
    QuantizedWeight,
    row_bytes,
    tail_bytes,
)
from jaxserve.sharding.expert_slots import ExpertSlots
from jaxserve.sharding.rules import RULES, spec

Axis = str | None
# Last parts of a slot -> logical axes of its arrays: stack, rows, columns. Slots that are not here are not split.
SLOT_AXES: Mapping[str, tuple[Axis, Axis, Axis]] = MappingProxyType(
    {
        "embedding": (None, "vocab", None),
        "head": (None, "vocab", None),
        "q": (None, "heads", None),
        "k": (None, "kv_heads", None),
        "v": (None, "kv_heads", None),
        "o": (None, None, "heads"),
        "sinks": (None, "heads", None),
        # latent attention: latents are whole on every device
        "q_b": (None, "heads", None),
        "k_b": ("heads", None, None),
        "v_b": ("heads", None, None),
        "gate": (None, "mlp", None),
        "up": (None, "mlp", None),
        "down": (None, None, "mlp"),
        "experts.gate": ("experts", "expert_mlp", None),
        "experts.up": ("experts", "expert_mlp", None),
        "experts.down": ("experts", None, "expert_mlp"),
    }
)
_FLOAT32 = np.dtype(np.float32)
_BYTES = np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class _Dimension:
    """One dimension of an array: its parts (logical axis, size of all, size on one device), one behind the other."""

    parts: tuple[tuple[Axis, int, int], ...]

    @property
    def axis(self) -> Axis:
        """What splits the dimension. Parts that are not split are whole on every device along it."""
        return next((axis for axis, *_ in self.parts if _mesh_axis(axis)), None)

    @property
    def local(self) -> int:
        return sum(size for *_, size in self.parts)

    def cut(self, sizes: Sequence[int]) -> list[_Dimension]:
        """Neighbouring parts that are together of each of `sizes`, of the whole model."""
        found, parts = [], list(self.parts)
        for size in sizes:
            taken = []
            while sum(whole for _, whole, _ in taken) < size:
                taken.append(parts.pop(0))
            found.append(_Dimension(tuple(taken)))
        return found


class ShardedParameters:
    """Implements parameters.Parameters for one mesh.

    config   of the whole model
    values   the whole model's parameters as numpy arrays; each is read once, and only the parts of this host's devices
             are placed. None: shapes only (jax.ShapeDtypeStruct with their shardings)
    form     of quantised.KINDS: the form of the layers' matrices where there are shapes only; "": dense
    slots    by layer, where experts have copies: their stacks are then stacks of slots
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        dtype: str,
        values: Parameters | None,
        *,
        form: str = "",
        slots: Mapping[int, ExpertSlots] = MappingProxyType({}),
    ) -> None:
        self.config, self.mesh, self.values, self.form, self.slots = config, mesh, values, form, slots
        self.dtype = jnp.dtype(dtype)
        self.tensor = mesh.shape["tensor"]

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> WeightValue:
        dimensions = self._rows(slots, rows), self._dimension(_axes(slots[0])[2], columns)
        if self.values is None:
            return self._struct(dimensions, self.form if slots[0].startswith("layers.") else "")
        return self._weight(self.values.matrix(slots, _sizes(dimensions[0]), _size(dimensions[1])), dimensions)

    def table(self, slot: str, rows: int, columns: int) -> WeightValue:
        dimensions = self._rows((slot,), (rows,)), self._dimension(_axes(slot)[2], columns)
        if self.values is None:
            return self._struct(dimensions, "")
        return self._weight(self.values.table(slot, _size(dimensions[0]), _size(dimensions[1])), dimensions)

    def exact(self, slot: str, rows: int, columns: int) -> jax.Array:
        dimensions = self._rows((slot,), (rows,)), self._dimension(None, columns)
        return self._array(self._read("exact", slot, _size(dimensions[0]), columns), dimensions, _FLOAT32)

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> WeightValue:
        stack, _, column_axis = _axes(slots[0])
        dimensions = self._dimension(stack, count), self._rows(slots, rows), self._dimension(column_axis, columns)
        if self.values is None:
            return self._struct(dimensions, self.form if ".experts." in slots[0] else "")
        slots_of = self._slots(slots[0])
        num_read = _size(dimensions[0]) if slots_of is None else slots_of.num_experts
        whole = self.values.stack(slots, _sizes(dimensions[1]), _size(dimensions[2]), num_read)
        return self._weight(whole if slots_of is None else _fill_slots(whole, slots_of), dimensions)

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.Array:
        stack, _, column_axis = _axes(slots[0])
        joined = self._rows(slots, rows)
        if _mesh_axis(column_axis):
            # The devices' results are summed with the bias in them: one of them has it.
            joined = _Dimension(tuple(("once", whole, local) for _, whole, local in joined.parts))
        dimensions = self._dimension(stack, count), joined
        slots_of = self._slots(slots[0])
        num_read = _size(dimensions[0]) if slots_of is None else slots_of.num_experts
        whole = self._read("stack_bias", slots, _sizes(joined), num_read)
        if whole is not None and slots_of is not None:
            whole = whole[slots_of.contents()]
        return self._array(whole, dimensions, _FLOAT32)

    def vector(self, slot: str, size: int) -> jax.Array:
        dimension = self._rows((slot,), (size,))
        return self._array(self._read("vector", slot, _size(dimension)), (dimension,), _FLOAT32)

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.Array:
        dimension = self._rows(slots, rows)
        return self._array(self._read("bias", slots, _sizes(dimension)), (dimension,), _FLOAT32)

    def norm(self, slot: str, size: int) -> jax.Array:
        return self._array(self._read("norm", slot, size), (self._dimension(None, size),), _FLOAT32)

    def _read(self, kind: str, *arguments: object) -> np.ndarray | None:
        return None if self.values is None else np.asarray(getattr(self.values, kind)(*arguments))

    def _slots(self, slot: str) -> ExpertSlots | None:
        return self.slots.get(layer_number(slot)) if ".experts." in slot else None

    def _rows(self, slots: Sequence[str], rows: Sequence[int]) -> _Dimension:
        parts = [(_axes(slot)[1], size) for slot, size in zip(slots, rows, strict=True)]
        return _Dimension(tuple((axis, self._whole(axis, size), size) for axis, size in parts))

    def _dimension(self, axis: Axis, local: int) -> _Dimension:
        return _Dimension(((axis, self._whole(axis, local), local),))

    def _whole(self, axis: Axis, local: int) -> int:
        """Size along a logical axis of the whole model, from one device's."""
        if axis == "vocab":
            return self.config.vocab_size
        if axis == "kv_heads":
            return local // len(kv_heads_of(self.config, self.tensor, 0)) * self.config.num_kv_heads
        return local * self._num_devices(axis)

    def _weight(self, whole: WeightValue | np.ndarray, dimensions: tuple[_Dimension, ...]) -> WeightValue:
        """A weight of the whole model -> the same over the mesh, with one device's sizes in it."""
        if isinstance(whole, DoubleWeight):
            dense = self._weight(whole.dense, dimensions)
            stored = self._weight(whole.stored, dimensions)
            return DoubleWeight(stored, dense) if isinstance(stored, QuantizedWeight | JoinedWeight) else dense
        if isinstance(whole, JoinedWeight):
            rows = dimensions[0].cut([part.shape[0] for part in whole.parts])
            return JoinedWeight(
                tuple(self._weight(part, (one, dimensions[1])) for part, one in zip(whole.parts, rows, strict=True))
            )
        if not isinstance(whole, QuantizedWeight):
            return self._array(np.asarray(whole), dimensions, self.dtype)
        codes, columns = np.asarray(whole.codes), dimensions[-1]
        num_devices = self._num_devices(columns.axis)
        if not _keeps_blocks(whole.kind, num_devices, columns):
            matrices = codes.reshape(-1, *codes.shape[-2:])
            values = np.stack([dequantize_numpy(matrix, whole.kind) for matrix in matrices])
            return self._array(values.reshape(*codes.shape[:-1], -1), dimensions, self.dtype)
        if num_devices > 1 and (tail := tail_bytes(whole.kind)):
            parts = np.split(codes[..., :-tail], num_devices, axis=-1)
            codes = np.concatenate([piece for part in parts for piece in (part, codes[..., -tail:])], axis=-1)
        return self._blocks(codes, whole.kind, whole.expanded, dimensions)

    def _struct(self, dimensions: tuple[_Dimension, ...], kind: str) -> WeightValue:
        if not kind or not _keeps_blocks(kind, self._num_devices(dimensions[-1].axis), dimensions[-1]):
            return self._array(None, dimensions, self.dtype)
        return self._blocks(None, kind, self.dtype.name, dimensions)

    def _blocks(
        self, codes: np.ndarray | None, kind: str, expanded: str, dimensions: tuple[_Dimension, ...]
    ) -> QuantizedWeight:
        """codes: as the devices share them, each with the scales of its own inputs."""
        *before, rows, columns = dimensions
        size = row_bytes(kind, columns.local)
        stored = _Dimension(((columns.axis, size * self._num_devices(columns.axis), size),))
        array = self._array(codes, (*before, rows, stored), _BYTES)
        return QuantizedWeight(array, kind, (rows.local, columns.local), expanded)

    def _num_devices(self, axis: Axis) -> int:
        mesh_axis = _mesh_axis(axis)
        return self.mesh.shape[mesh_axis] if mesh_axis else 1

    def _array(self, whole: np.ndarray | None, dimensions: tuple[_Dimension, ...], dtype: np.dtype) -> jax.Array:
        axes = tuple(dimension.axis for dimension in dimensions)
        shape = tuple(dimension.local * self._num_devices(axis) for dimension, axis in zip(dimensions, axes))
        sharding = NamedSharding(self.mesh, spec(*axes))
        if whole is None:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[return-value]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            found = whole
            for place, dimension in enumerate(dimensions):
                device = (index[place].start or 0) // dimension.local if dimension.axis else 0
                found = self._take_joined(found, place, dimension, device)
            # A device's memory must not be shared with numpy's.
            return np.array(found, dtype, order="C")

        return jax.make_array_from_callback(shape, sharding, part)

    def _take_joined(self, values: np.ndarray, dimension: int, parts: _Dimension, device: int) -> np.ndarray:
        ends = np.cumsum([whole for _, whole, _ in parts.parts])[:-1]
        pieces = np.split(values, ends, axis=dimension)
        taken = [self._take(piece, dimension, axis, device) for piece, (axis, *_) in zip(pieces, parts.parts)]
        return taken[0] if len(taken) == 1 else np.concatenate(taken, axis=dimension)

    def _take(self, values: np.ndarray, dimension: int, axis: Axis, device: int) -> np.ndarray:
        """What device number `device` along its axis holds of `values`."""
        num_devices = self._num_devices(axis)
        if num_devices == 1:
            return values
        if axis == "once":
            return values if device == 0 else np.zeros_like(values)
        if axis == "kv_heads":
            heads = np.split(values, self.config.num_kv_heads, axis=dimension)
            held = kv_heads_of(self.config, self.tensor, device)
            return np.concatenate([heads[head] for head in held], axis=dimension)
        if axis == "vocab":
            size = local_vocab_size(self.config.vocab_size, self.tensor)
            found = values[device * size : (device + 1) * size]
            return np.pad(found, [(0, size - len(found)), *[(0, 0)] * (values.ndim - 1)])
        return np.split(values, num_devices, axis=dimension)[device]


def _axes(slot: str) -> tuple[Axis, Axis, Axis]:
    parts = slot.split(".")
    default = SLOT_AXES.get(parts[-1], (None, None, None))
    return SLOT_AXES.get(".".join(parts[-2:]), default)


def _mesh_axis(axis: Axis) -> str:
    """The mesh axis that splits a logical axis of weights; "": none."""
    found = () if axis is None else RULES[axis]
    return found[0] if found else ""


def _fill_slots(whole: WeightValue | np.ndarray, slots: ExpertSlots) -> WeightValue | np.ndarray:
    """A stack of experts -> one of slots."""
    if isinstance(whole, QuantizedWeight):
        return dataclasses.replace(whole, codes=np.asarray(whole.codes)[slots.contents()])
    return np.asarray(whole)[slots.contents()]


def _keeps_blocks(kind: str, num_devices: int, columns: _Dimension) -> bool:
    """Whether each device's inputs are whole blocks."""
    return num_devices == 1 or kind in ROW_KINDS or columns.local % BLOCK == 0


def _sizes(dimension: _Dimension) -> tuple[int, ...]:
    return tuple(whole for _, whole, _ in dimension.parts)


def _size(dimension: _Dimension) -> int:
    return sum(_sizes(dimension))
