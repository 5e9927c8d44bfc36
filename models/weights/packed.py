"""Published quantised safetensors: fp8 (DeepSeek, Qwen), AWQ, GPTQ. No jax.

Each shows a quantised matrix under the name `<module>.weight` and in its logical shape [out, in], whatever arrays it
is made of. Formats, as their packers write them:

fp8    weight float8_e4m3fn [out, in]; weight_scale_inv [out / b0, in / b1] (weight_block_size, last blocks cut), or
       weight_scale of one value, or [out, 1]: value = code * scale
AWQ    qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8], scales [in / g, out]: eight codes of 4 bits in a
       word, those of outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on: value = (code - zero) * scale
GPTQ   qweight int32 [in * bits / 32, out], low inputs in the low bits; qzeros int32 [in / g, out * bits / 32], low
       outputs in the low bits and one too small in the first version of the format; scales [in / g, out];
       g_idx [in], the group of each input (desc_act): value = (code - zero) * scale
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from jaxserve.models.quantization import as_bytes, fp8_blocks, zero_point_blocks
from jaxserve.models.weights.safetensors import SafetensorsTensors

_BLOCK = 32
_F32 = np.dtype(np.float32)
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class _Packing(Protocol):
    """One matrix in the file. parts: suffix -> name of the arrays it is made of."""

    shape: tuple[int, int]
    parts: Mapping[str, str]

    def values(self, file: SafetensorsTensors) -> np.ndarray:
        """float32 [out, in]."""
        ...

    def blocks(self, file: SafetensorsTensors) -> tuple[str, np.ndarray] | None:
        """(form, codes) for products that take them as they are; None where no form holds the values exactly."""
        ...


class PackedTensors:
    """TensorFile of a folder whose config.json names `method` ("fp8", "awq", "gptq") and its settings. Raises
    ValueError naming the file and the tensor for parts that are missing or do not fit each other."""

    def __init__(self, file: SafetensorsTensors, method: str, settings: Mapping[str, Any]) -> None:
        self.path = file.path
        self._file = file
        make = {"fp8": _fp8_matrix, "awq": _awq_matrix, "gptq": _gptq_matrix}[method]
        suffix = "weight" if method == "fp8" else "qweight"
        self._packed: dict[str, _Packing] = {}
        used: set[str] = set()
        for name in file.shapes:
            module, _, last = name.rpartition(".")
            if last == suffix and (method != "fp8" or file.stored_dtype(name) == "F8_E4M3"):
                packing = make(file, module, settings)
                self._packed[f"{module}.weight"] = packing
                used.update(packing.parts.values())
        self._shapes = {name: shape for name, shape in file.shapes.items() if name not in used}
        self._shapes |= {name: packing.shape for name, packing in self._packed.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> str:
        packing = self._packed.get(name)
        return self._file.where(name if packing is None else next(iter(packing.parts.values())))

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        packing = self._packed.get(name)
        return self._file.read(name, dtype) if packing is None else packing.values(self._file).astype(dtype, copy=False)

    def stored(self, name: str) -> tuple[str, np.ndarray] | None:
        packing = self._packed.get(name)
        return None if packing is None else packing.blocks(self._file)


@dataclasses.dataclass(frozen=True)
class _Fp8Matrix:
    """block: outputs and inputs that share a scale; None: one scale for each output (or for all)."""

    shape: tuple[int, int]
    parts: Mapping[str, str]
    block: tuple[int, int] | None

    def _row_scales(self, file: SafetensorsTensors) -> np.ndarray:
        """float32 [out, in / block], one column where a row has one scale."""
        scales = file.read(self.parts["scale"], _F32)
        if self.block is None:
            return np.broadcast_to(scales.reshape(-1, 1), (self.shape[0], 1))
        return np.repeat(scales, self.block[0], axis=0)[: self.shape[0]]

    def values(self, file: SafetensorsTensors) -> np.ndarray:
        codes = file.raw(self.parts["weight"]).view(_FP8).astype(np.float32)
        scales = self._row_scales(file)
        if self.block is not None:
            scales = np.repeat(scales, self.block[1], axis=1)[:, : self.shape[1]]
        return codes * scales

    def blocks(self, file: SafetensorsTensors) -> tuple[str, np.ndarray] | None:
        codes, scales = file.raw(self.parts["weight"]).view(np.uint8), self._row_scales(file)
        if self.block is None:
            return "fp8", np.concatenate([codes, as_bytes(scales[:, 0])], axis=1)
        if self.block[1] % _BLOCK or self.shape[1] % _BLOCK:
            return None
        per_block = np.repeat(scales, self.block[1] // _BLOCK, axis=1)[:, : self.shape[1] // _BLOCK]
        return "fp8_32", fp8_blocks(codes, per_block)


def _fp8_matrix(file: SafetensorsTensors, module: str, settings: Mapping[str, Any]) -> _Fp8Matrix:
    name = f"{module}.weight"
    shape = file.shapes[name]
    # What activations were scaled by belongs to kernels that quantise those as well.
    extra = {key: f"{module}.{key}" for key in ("input_scale", "activation_scale") if f"{module}.{key}" in file.shapes}
    for suffix in ("weight_scale_inv", "weight_scale"):
        scale = f"{module}.{suffix}"
        if scale in file.shapes:
            break
    else:
        raise ValueError(f"{file.where(name)}: tensor {name!r} is float8, but there is no {module}.weight_scale_inv")
    found, block = file.shapes[scale], settings.get("weight_block_size")
    if len(found) == 2 and isinstance(block, list) and found != (shape[0], 1):
        expected = tuple(-(-size // width) for size, width in zip(shape, block, strict=True))
        if found != expected:
            raise ValueError(f"{file.where(scale)}: {scale} is {list(found)}, allowed {list(expected)}")
        return _Fp8Matrix(shape, {"weight": name, "scale": scale, **extra}, (int(block[0]), int(block[1])))
    if found not in ((), (1,), (shape[0],), (shape[0], 1)):
        raise ValueError(f"{file.where(scale)}: {scale} is {list(found)}, allowed [], [1] or [{shape[0]}, 1]")
    return _Fp8Matrix(shape, {"weight": name, "scale": scale, **extra}, None)


@dataclasses.dataclass(frozen=True)
class _IntMatrix:
    """AWQ and GPTQ. is_awq: codes are packed along the outputs in AWQ's order; zero_shift: added to stored zeros."""

    shape: tuple[int, int]
    parts: Mapping[str, str]
    bits: int
    is_awq: bool
    zero_shift: int

    def _codes(self, file: SafetensorsTensors) -> np.ndarray:
        """uint8 [in, out]."""
        words = file.raw(self.parts["qweight"]).view(np.uint32)
        if self.is_awq:
            return _unpack_awq(words)
        num_inputs, num_outputs = self.shape[1], self.shape[0]
        per_word = 32 // self.bits
        shifts = (np.arange(per_word, dtype=np.uint32) * self.bits)[None, :, None]
        codes = words[:, None, :] >> shifts & (2**self.bits - 1)
        return codes.astype(np.uint8).reshape(num_inputs, num_outputs)

    def _zeros(self, file: SafetensorsTensors) -> np.ndarray:
        """int16 [groups, out]."""
        words = file.raw(self.parts["qzeros"]).view(np.uint32)
        if self.is_awq:
            return _unpack_awq(words).astype(np.int16)
        shifts = np.arange(32 // self.bits, dtype=np.uint32) * self.bits
        zeros = (words[:, :, None] >> shifts & (2**self.bits - 1)).reshape(words.shape[0], -1)
        return zeros.astype(np.int16) + self.zero_shift

    def _groups(self, file: SafetensorsTensors) -> np.ndarray:
        """[in]: which row of zeros and scales an input has."""
        num_inputs, num_groups = self.shape[1], file.shapes[self.parts["scales"]][0]
        if "g_idx" in self.parts:
            groups = file.raw(self.parts["g_idx"]).view(np.int32)
            if groups.min() < 0 or groups.max() >= num_groups:
                name = self.parts["g_idx"]
                raise ValueError(
                    f"{file.where(name)}: {name} names group {groups.max()}, allowed 0 to {num_groups - 1}"
                )
            return groups
        return np.arange(num_inputs) // -(-num_inputs // num_groups)

    def values(self, file: SafetensorsTensors) -> np.ndarray:
        groups, scales = self._groups(file), file.read(self.parts["scales"], _F32)
        centred = self._codes(file).astype(np.int16) - self._zeros(file)[groups]
        return np.ascontiguousarray((centred.astype(np.float32) * scales[groups]).T)

    def blocks(self, file: SafetensorsTensors) -> tuple[str, np.ndarray] | None:
        groups = self._groups(file)
        if self.shape[1] % _BLOCK or (groups.reshape(-1, _BLOCK) != groups[::_BLOCK, None]).any():
            return None  # inputs of one group lie apart (desc_act)
        scales = file.read(self.parts["scales"], _F32)
        if (scales.astype(np.float16).astype(np.float32) != scales).any():
            return None
        at = groups[::_BLOCK]
        codes, zeros = np.ascontiguousarray(self._codes(file).T), self._zeros(file)[at].T
        scales = np.ascontiguousarray(scales[at].T)
        if self.bits == 4:
            return "q4_z", zero_point_blocks(codes, np.ascontiguousarray(zeros).astype(np.uint8), scales)
        if (zeros != 128).any():
            return None
        signed = (codes.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
        blocks = signed.reshape(self.shape[0], -1, _BLOCK)
        joined = np.concatenate([as_bytes(scales.astype(np.float16)), blocks], axis=-1)
        return "q8_0", joined.reshape(self.shape[0], -1)


def _unpack_awq(words: np.ndarray) -> np.ndarray:
    """uint32 [n, m] -> uint8 [n, 8 m]."""
    codes = np.empty((*words.shape, 8), np.uint8)
    for place, output in enumerate(_AWQ_ORDER):
        codes[..., output] = words >> np.uint32(4 * place) & 15
    return codes.reshape(words.shape[0], -1)


def _int_matrix(
    file: SafetensorsTensors, module: str, *, bits: int, is_awq: bool, zero_shift: int, wanted: tuple[str, ...]
) -> _IntMatrix:
    parts = {suffix: f"{module}.{suffix}" for suffix in wanted}
    missing = [name for name in parts.values() if name not in file.shapes]
    qweight = parts["qweight"]
    if missing:
        raise ValueError(f"{file.where(qweight)}: tensor {qweight!r} is there, but {', '.join(missing)} is not")
    if not is_awq and f"{module}.g_idx" in file.shapes:
        parts["g_idx"] = f"{module}.g_idx"
    per_word = 32 // bits
    rows, columns = file.shapes[qweight]
    num_inputs, num_outputs = (rows, columns * per_word) if is_awq else (rows * per_word, columns)
    num_groups = file.shapes[parts["scales"]][0]
    expected = {
        "qzeros": (num_groups, num_outputs // per_word), "scales": (num_groups, num_outputs), "g_idx": (num_inputs,),
    }  # fmt: skip
    for suffix, name in parts.items():
        if suffix in expected and file.shapes[name] != expected[suffix]:
            raise ValueError(
                f"{file.where(name)}: {name} is {list(file.shapes[name])}, allowed {list(expected[suffix])}"
            )
    if num_inputs % num_groups and "g_idx" not in parts:
        name = parts["scales"]
        raise ValueError(f"{file.where(name)}: {name} has {num_groups} groups for {num_inputs} inputs")
    return _IntMatrix((num_outputs, num_inputs), parts, bits, is_awq, zero_shift)


def _awq_matrix(file: SafetensorsTensors, module: str, settings: Mapping[str, Any]) -> _IntMatrix:
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"{file.path}: awq: got bits {bits}, version {version}; allowed: 4, gemm")
    parts = ("qweight", "qzeros", "scales")
    return _int_matrix(file, module, bits=4, is_awq=True, zero_shift=0, wanted=parts)


def _gptq_matrix(file: SafetensorsTensors, module: str, settings: Mapping[str, Any]) -> _IntMatrix:
    bits, version = settings.get("bits", 4), settings.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"{file.path}: gptq: got bits {bits}, checkpoint_format {version}; allowed: 4 or 8, gptq, gptq_v2"
        )
    parts = ("qweight", "qzeros", "scales")
    shift = 1 if version == "gptq" else 0
    return _int_matrix(file, module, bits=bits, is_awq=False, zero_shift=shift, wanted=parts)
