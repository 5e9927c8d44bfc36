"""A model's arrays from the tensors of a checkpoint: which it needs, whether they fit, and their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_encoder import EncoderConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.family import WeightNames
from jaxserve.models.parameters import Parameters, WeightValue
from jaxserve.models.quantization import dequantize_numpy, quantize
from jaxserve.models.weights.buffers import aligned_empty
from jaxserve.models.weights.tensor_file import TensorFile
from jaxserve.pallas_kernels.matmul.planar import planar_parts
from jaxserve.pallas_kernels.matmul.quantized import DoubleWeight, JoinedWeight, QuantizedWeight, joined

AnyConfig = ModelConfig | EncoderConfig
Progress = Callable[[str, int, int], None]
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_MAX_LISTED = 8
_LAYER_PREFIX = r"(?:model\.layers|blk)\.(\d+)\."


def file_name(names: WeightNames, slot: str, expert: int | None = None) -> str:
    """What the file calls a slot, without ".weight" or ".bias"."""
    if slot in names.top:
        return names.top[slot]
    _, index, part = slot.split(".", 2)
    if part not in names.layer:
        raise ValueError(f"slot {slot!r} has no name in this family; allowed: {', '.join(names.layer)}")
    return names.layer[part].format(i=index, e=expert)


def _tensors(
    names: WeightNames, slots: Sequence[str], rows: Sequence[int], expert: int | None = None
) -> list[tuple[str, str, int]]:
    """(first slot, name, rows) of the tensors that hold the slots: neighbours of one name are one tensor."""
    found: list[tuple[str, str, int]] = []
    for slot, count in zip(slots, rows, strict=True):
        name = file_name(names, slot, expert)
        if found and found[-1][1] == name:
            found[-1] = (found[-1][0], name, found[-1][2] + count)
        else:
            found.append((slot, name, count))
    return found


def _is_split(names: WeightNames, slot: str) -> bool:
    """Whether the file stores each matrix of a stack as a tensor of its own."""
    return "{e}" in names.layer.get(slot.split(".", 2)[-1], "")


def check_tensors(
    config: AnyConfig, names: WeightNames, file: TensorFile, build: Callable[[Parameters], object]
) -> dict[str, tuple[int, ...]]:
    """Compare the tensors a model needs with those of a file; ValueError with all differences. Returns their shapes.

    build: makes the model from what answers it
    """
    plan = PlannedParameters(names)
    build(plan)
    shapes = file.shapes
    missing = [name for name in plan.shapes if name not in shapes]
    misshapen = [
        f"{name} is {list(shapes[name])}, allowed {list(shape)}"
        for name, shape in plan.shapes.items()
        if name in shapes and shapes[name] != shape
    ]
    surplus = [name for name in shapes if name not in plan.shapes and not _is_ignored(name, config, names, shapes)]
    problems = [
        f"{len(found)} tensors {what}: {_listed(found)}"
        for what, found in (("missing", missing), ("left over", surplus), ("of the wrong shape", misshapen))
        if found
    ]
    if problems:
        first = missing[0] if missing else surplus[0] if surplus else misshapen[0].split()[0]
        raise ValueError(f"{file.where(first)}: {'; '.join(problems)}")
    return plan.shapes


def _is_ignored(name: str, config: AnyConfig, names: WeightNames, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if any(re.fullmatch(pattern, name) for pattern in names.ignored):
        return True
    layer = re.match(_LAYER_PREFIX, name)
    if layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_draft_layers:
        return True
    # Some files store the tied head a second time; CheckpointParameters compares the values.
    embedding, head = (f"{names.top.get(slot)}.weight" for slot in ("embedding", "head"))
    if config.task == "embed":
        return name == head
    return config.tie_word_embeddings and name == head and shapes[name] == shapes.get(embedding)


def _listed(found: Sequence[str]) -> str:
    more = f", and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return ", ".join(found[:_MAX_LISTED]) + more


def on_device(values: np.ndarray) -> jax.Array:
    """An array that nobody else will change. On CPU its memory becomes the device's where it is aligned: weights are
    never donated, and a copy would double the largest of them."""
    return jax.device_put(values, may_alias=True)


class PlannedParameters:
    """Answers with shapes only and notes which tensors of which shape the model asks for."""

    def __init__(self, names: WeightNames) -> None:
        self.names = names
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _note(
        self, slots: Sequence[str], suffix: str, rows: Sequence[int], *after: int, expert: int | None = None
    ) -> None:
        for _, name, count in _tensors(self.names, slots, rows, expert):
            self.shapes[f"{name}.{suffix}"] = (count, *after)

    def _note_stack(self, slots: Sequence[str], suffix: str, rows: Sequence[int], count: int, *after: int) -> None:
        if _is_split(self.names, slots[0]):
            for expert in range(count):
                self._note(slots, suffix, rows, *after, expert=expert)
            return
        for _, name, num_rows in _tensors(self.names, slots, rows):
            self.shapes[f"{name}.{suffix}"] = (count, num_rows, *after)

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> jax.ShapeDtypeStruct:
        self._note(slots, "weight", rows, columns)
        return jax.ShapeDtypeStruct((sum(rows), columns), jnp.float32)

    def table(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self.matrix((slot,), (rows,), columns)

    def exact(self, slot: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        return self.matrix((slot,), (rows,), columns)

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> jax.ShapeDtypeStruct:
        self._note_stack(slots, "weight", rows, count, columns)
        return jax.ShapeDtypeStruct((count, sum(rows), columns), jnp.float32)

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.ShapeDtypeStruct:
        self._note_stack(slots, "bias", rows, count)
        return jax.ShapeDtypeStruct((count, sum(rows)), jnp.float32)

    def vector(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        self.shapes[file_name(self.names, slot)] = (size,)
        return jax.ShapeDtypeStruct((size,), jnp.float32)

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.ShapeDtypeStruct:
        self._note(slots, "bias", rows)
        return jax.ShapeDtypeStruct((sum(rows),), jnp.float32)

    def norm(self, slot: str, size: int) -> jax.ShapeDtypeStruct:
        self._note((slot,), "weight", (size,))
        return jax.ShapeDtypeStruct((size,), jnp.float32)


class CheckpointParameters:
    """Reads each tensor when the model asks for it and places it. Names and shapes have been checked."""

    def __init__(
        self,
        config: AnyConfig,
        options: RuntimeOptions,
        names: WeightNames,
        file: TensorFile,
        *,
        num_values: int,
        check_weights: bool,
        weights: str,
        quantization: str,
        progress: Progress | None,
        place: Callable[[np.ndarray], Any] = on_device,
    ) -> None:
        self.place = place
        # Codes may be a view of the file, which on_device must not take over.
        self.place_codes = jnp.asarray if place is on_device else place
        # The kernel for GPUs wants codes and scales apart. They are rearranged on the host.
        is_gpu_kernel = options.matmul in ("mosaic", "interpret") and options.dtype == "bfloat16"
        self.is_planar = is_gpu_kernel and place is on_device
        self.place_part = np.asarray if self.is_planar else self.place_codes
        self.config, self.names, self.file = config, names, file
        self.dtype = DTYPES[options.dtype]
        self.expanded = options.dtype
        self.check_weights, self.weights, self.quantization = check_weights, weights, quantization
        self.progress = progress
        self.total = num_values
        self.done = 0
        self._check_tied_head()

    def matrix(self, slots: Sequence[str], rows: Sequence[int], columns: int) -> WeightValue:
        tensors = _tensors(self.names, slots, rows)
        return self._weight(tensors, columns, self.quantization)

    def table(self, slot: str, rows: int, columns: int) -> WeightValue:
        # Rows are looked up as well: int4 is too coarse for that, and float8 keeps a tied head from being exact.
        method = "int8" if self.quantization in ("int8", "int4") else ""
        return self._weight(_tensors(self.names, (slot,), (rows,)), columns, method)

    def _weight(self, tensors: list[tuple[str, str, int]], columns: int, method: str) -> WeightValue:
        parts = [self._quantized_part(*tensor, columns, method) for tensor in tensors]
        if all(part is None for part in parts):
            return self._dense(tensors)
        stored = joined(
            [self._dense([at]) if part is None else part for at, part in zip(tensors, parts)], self.place_part
        )
        if self.weights == "both":
            stored = DoubleWeight(stored, self.place(self._expanded(stored)))
        return planar_parts(stored) if self.is_planar else stored

    def _expanded(self, stored: QuantizedWeight | JoinedWeight) -> np.ndarray:
        """The values of quantised parts, one below the other, rounded once to the compute dtype."""
        whole = aligned_empty(stored.shape, self.dtype)
        parts = stored.parts if isinstance(stored, JoinedWeight) else (stored,)
        start = 0
        for part in parts:
            is_stored = isinstance(part, QuantizedWeight)
            values = dequantize_numpy(np.asarray(part.codes), part.kind) if is_stored else part
            whole[start : start + part.shape[0]] = values
            start += part.shape[0]
        return whole

    def _dense(self, tensors: list[tuple[str, str, int]]) -> jax.Array:
        if len(tensors) == 1:
            return self.place(self._read(*tensors[0][:2], "weight", self.dtype))
        first = f"{tensors[0][1]}.weight"
        whole = aligned_empty((sum(count for *_, count in tensors), *self.file.shapes[first][1:]), self.dtype)
        self._read_rows(tensors, "weight", whole)
        return self.place(whole)

    def _quantized_part(self, slot: str, name: str, rows: int, columns: int, method: str) -> QuantizedWeight | None:
        """One tensor in the blocks that the file stores it in, or quantised now by `method` ("": not at all)."""
        tensor = f"{name}.weight"
        found = None if self.weights == "dense" else self.file.stored(tensor)
        if found is not None:
            kind, codes = found
            if self.check_weights:
                self._check(tensor, self.file.read(tensor, DTYPES["float32"]))
            # Rows are whole in their blocks, so that they can be reordered like rows of values.
            codes = self._ordered(slot, codes)
            self._count(rows * columns)
        else:
            made = quantize(self._read(slot, name, "weight", DTYPES["float32"]), method) if method else None
            if made is None:
                return None
            kind, codes = made
        return QuantizedWeight(self.place_part(codes), kind, (rows, columns), self.expanded)

    def exact(self, slot: str, rows: int, columns: int) -> jax.Array:
        return self.place(self._read(slot, file_name(self.names, slot), "weight", DTYPES["float32"]))

    def stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> WeightValue:
        if ".experts." in slots[0]:
            stored = self._stored_stack(slots, rows, columns, count) if self.weights == "stored" else None
            if stored is not None:
                return stored
            if self.quantization:
                return self._quantized_stack(slots, rows, columns, count)
        return self._read_stack(slots, "weight", rows, aligned_empty((count, sum(rows), columns), self.dtype))

    def _stored_stack(
        self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int
    ) -> QuantizedWeight | None:
        """Experts in the blocks that the file stores them in, one tensor for each; None unless all have one form."""
        if not _is_split(self.names, slots[0]):
            return None
        form, stack = "", np.zeros(0, np.uint8)
        for expert in range(count):
            tensors = [f"{name}.weight" for _, name, _ in _tensors(self.names, slots, rows, expert)]
            parts = [part for tensor in tensors if (part := self.file.stored(tensor)) is not None]
            if len(parts) < len(tensors) or any(kind != (form or parts[0][0]) for kind, _ in parts):
                return None
            if self.check_weights:
                for tensor in tensors:
                    self._check(tensor, self.file.read(tensor, DTYPES["float32"]))
            if not form:
                form = parts[0][0]
                stack = aligned_empty((count, sum(rows), parts[0][1].shape[1]), stack.dtype)
            stack[expert] = np.concatenate([codes for _, codes in parts])
        self._count(count * sum(rows) * columns)
        return QuantizedWeight(self.place_codes(stack), form, (sum(rows), columns), self.expanded)

    def _quantized_stack(self, slots: Sequence[str], rows: Sequence[int], columns: int, count: int) -> WeightValue:
        """Experts quantised one matrix after the other, where the file stores them so; else the stack as it is read."""
        shape = (sum(rows), columns)
        if not _is_split(self.names, slots[0]):
            whole = np.empty((count, *shape), DTYPES["float32"])
            self._fill_stack(slots, "weight", rows, whole)
            made = quantize(whole, self.quantization)
            if made is None:
                return self.place(whole.astype(self.dtype))
            return QuantizedWeight(self.place_codes(made[1]), made[0], shape, self.expanded)
        stack: np.ndarray | None = None
        matrix = np.empty(shape, DTYPES["float32"])
        for expert in range(count):
            self._read_rows(_tensors(self.names, slots, rows, expert), "weight", matrix)
            made = quantize(matrix, self.quantization)
            codes = matrix.astype(self.dtype) if made is None else made[1]
            if stack is None:
                stack = aligned_empty((count, *codes.shape), codes.dtype)
            stack[expert] = codes
        assert stack is not None
        return (
            self.place(stack)
            if made is None
            else QuantizedWeight(self.place_codes(stack), made[0], shape, self.expanded)
        )

    def stack_bias(self, slots: Sequence[str], rows: Sequence[int], count: int) -> jax.Array:
        return self._read_stack(slots, "bias", rows, np.empty((count, sum(rows)), DTYPES["float32"]))

    def vector(self, slot: str, size: int) -> jax.Array:
        return self.place(self._read_named(file_name(self.names, slot), DTYPES["float32"]))

    def bias(self, slots: Sequence[str], rows: Sequence[int]) -> jax.Array:
        parts = [
            self._read(slot, name, "bias", DTYPES["float32"]) for slot, name, _ in _tensors(self.names, slots, rows)
        ]
        return self.place(np.concatenate(parts))

    def norm(self, slot: str, size: int) -> jax.Array:
        weight = self._read(slot, file_name(self.names, slot), "weight", DTYPES["float32"])
        if self.names.norms_have_offset:
            weight = weight + np.float32(self.config.norm_offset)
        return self.place(weight)

    def _read_stack(self, slots: Sequence[str], suffix: str, rows: Sequence[int], whole: np.ndarray) -> jax.Array:
        self._fill_stack(slots, suffix, rows, whole)
        return self.place(whole)

    def _fill_stack(self, slots: Sequence[str], suffix: str, rows: Sequence[int], whole: np.ndarray) -> None:
        if _is_split(self.names, slots[0]):
            for expert, matrix in enumerate(whole):
                self._read_rows(_tensors(self.names, slots, rows, expert), suffix, matrix)
        else:
            # The stack is the leading axis of each tensor, rows are the second.
            self._read_rows(_tensors(self.names, slots, rows), suffix, whole.swapaxes(0, 1), is_stacked=True)

    def _read_rows(
        self, tensors: list[tuple[str, str, int]], suffix: str, whole: np.ndarray, *, is_stacked: bool = False
    ) -> None:
        """Tensors one below the other into `whole` [rows, ...]."""
        start = 0
        for slot, name, count in tensors:
            values = self._read(slot, name, suffix, whole.dtype)
            whole[start : start + count] = values.swapaxes(0, 1) if is_stacked else values
            start += count

    def _read(self, slot: str, name: str, suffix: str, dtype: np.dtype) -> np.ndarray:
        return self._ordered(slot, self._read_named(f"{name}.{suffix}", dtype))

    def _read_named(self, name: str, dtype: np.dtype) -> np.ndarray:
        values = self.file.read(name, dtype)
        if self.check_weights:
            self._check(name, values)
        self._count(values.size)
        return values

    def _ordered(self, slot: str, rows: np.ndarray) -> np.ndarray:
        is_rotated = slot.rsplit(".", 1)[-1] in ("q", "k")
        return _halves_from_pairs(rows, self.config.head_dim) if self.names.has_interleaved_qk and is_rotated else rows

    def _check(self, name: str, values: np.ndarray) -> None:
        if not np.isfinite(values).all():
            raise ValueError(f"{self.file.where(name)}: tensor {name!r} holds NaN or infinity")

    def _count(self, num_values: int) -> None:
        self.done += num_values
        if self.progress is not None:
            self.progress("load weights", self.done, self.total)

    def _check_tied_head(self) -> None:
        head, embedding = (f"{self.names.top.get(slot)}.weight" for slot in ("head", "embedding"))
        if not self.config.tie_word_embeddings or self.config.task == "embed" or head not in self.file.shapes:
            return
        if not np.array_equal(self.file.read(head, self.dtype), self.file.read(embedding, self.dtype)):
            raise ValueError(
                f"{self.file.where(head)}: tensor {head!r} differs from {embedding!r}, "
                "but the configuration says that they are tied"
            )


def _halves_from_pairs(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head ordered for a rotation of neighbouring pairs -> for one of halves."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
