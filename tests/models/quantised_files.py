"""Writers of published quantised checkpoints, each matrix with its values in float64 by the format's description."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

# Settings and, for one matrix [out, in]: (suffix -> array, values [out, in] in float64).
Packer = Callable[[np.ndarray, np.random.Generator], tuple[dict[str, np.ndarray], np.ndarray]]


def pack_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32: codes [n, m] put 32 / bits of a row into one word, in `order` from the lowest bits on."""
    per_word = 32 // bits
    grouped = codes.reshape(codes.shape[0], -1, per_word).astype(np.uint64)
    words = sum(
        grouped[:, :, at] << np.uint64(bits * place) for place, at in enumerate(order or tuple(range(per_word)))
    )
    return words.astype(np.uint32).view(np.int32)


def integer_codes(values: np.ndarray, bits: int, group: int, random: np.random.Generator, *, symmetric: bool):
    """(codes [in, out], zeros [groups, out], scales float16 [groups, out]) near the values [out, in]."""
    inputs = values.T.astype(np.float64)
    groups = inputs.reshape(-1, group, inputs.shape[1])
    top = 2**bits - 1
    low, high = groups.min(axis=1), groups.max(axis=1)
    if symmetric:
        zeros = np.full(low.shape, 2 ** (bits - 1))
        scales = (np.abs(groups).max(axis=1) / (2 ** (bits - 1) - 0.5)).astype(np.float16)
    else:
        scales = ((high - low) / top).astype(np.float16)
        # 1 at least: the first version of GPTQ's format stores one less.
        zeros = np.rint(-low / scales.astype(np.float64)).clip(1, top).astype(np.int64)
    wide = np.repeat(scales.astype(np.float64), group, axis=0)
    codes = np.rint(inputs / wide + np.repeat(zeros, group, axis=0)).clip(0, top).astype(np.int64)
    return codes, zeros, scales


def awq(group: int = 32) -> tuple[dict, Packer]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(values: np.ndarray, random: np.random.Generator):
        codes, zeros, scales = integer_codes(values, 4, group, random, symmetric=False)
        expected = (codes - np.repeat(zeros, group, 0)) * np.repeat(scales.astype(np.float64), group, 0)
        parts = {"qweight": pack_words(codes, 4, order), "qzeros": pack_words(zeros, 4, order), "scales": scales}
        return parts, expected.T

    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, pack


def gptq(
    group: int = 32, *, bits: int = 4, symmetric: bool = False, act_order: bool = False, version: str = "gptq"
) -> tuple[dict, Packer]:
    def pack(values: np.ndarray, random: np.random.Generator):
        num_inputs = values.shape[1]
        order = random.permutation(num_inputs) if act_order else np.arange(num_inputs)
        codes, zeros, scales = integer_codes(values[:, order], bits, group, random, symmetric=symmetric)
        group_of = np.empty(num_inputs, np.int32)
        group_of[order] = np.arange(num_inputs) // group
        codes = codes[np.argsort(order)]
        expected = (codes - zeros[group_of]) * scales.astype(np.float64)[group_of]
        stored_zeros = zeros - 1 if version == "gptq" else zeros
        parts = {
            "qweight": np.ascontiguousarray(pack_words(np.ascontiguousarray(codes.T), bits).T),
            "qzeros": pack_words(stored_zeros, bits), "scales": scales, "g_idx": group_of,
        }  # fmt: skip
        return parts, expected.T

    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": version,
    }  # fmt: skip
    return settings, pack


def fp8(block: tuple[int, int] | None = (32, 32), *, per_output: bool = False) -> tuple[dict, Packer]:
    def pack(values: np.ndarray, random: np.random.Generator):
        if block is None:
            axis = 1 if per_output else None
            scale = (np.abs(values).max(axis=axis, keepdims=per_output) / 448).astype(np.float32)
            wide = np.broadcast_to(scale, values.shape)
            name, stored = "weight_scale", np.asarray(scale)
        else:
            tiles = tuple(-(-size // width) for size, width in zip(values.shape, block))
            padded = np.zeros([count * width for count, width in zip(tiles, block)])
            padded[: values.shape[0], : values.shape[1]] = np.abs(values)
            most = padded.reshape(tiles[0], block[0], tiles[1], block[1]).max(axis=(1, 3))
            stored = (most / 448).astype(np.float32)
            wide = np.repeat(np.repeat(stored, block[0], 0), block[1], 1)[: values.shape[0], : values.shape[1]]
            name = "weight_scale_inv"
        codes = (values / wide).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        return {"weight": codes, name: stored}, codes.astype(np.float64) * wide.astype(np.float64)

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block is not None:
        settings["weight_block_size"] = list(block)
    return settings, pack


FORMS: dict[str, tuple[dict, Packer]] = {
    "awq": awq(),
    "gptq": gptq(),
    "gptq_symmetric": gptq(symmetric=True),
    "gptq_act_order": gptq(act_order=True),
    "gptq_v2": gptq(version="gptq_v2"),
    "gptq_8_bits": gptq(bits=8, symmetric=True),
    "gptq_8_bits_asymmetric": gptq(bits=8),
    "fp8_block": fp8(),
    "fp8_block_cut": fp8((48, 64)),
    "fp8_tensor": fp8(None),
    "fp8_output": fp8(None, per_output=True),
}


def write_quantised(form: str, source: Path, folder: Path) -> dict[str, np.ndarray]:
    """A copy of a checkpoint with the matrices of its layers quantised; their values [out, in] by name."""
    settings, pack = FORMS[form]
    random = np.random.default_rng(1)
    folder.mkdir(parents=True)
    content = json.loads((source / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(content))
    for extra in ("generation_config.json",):
        if (source / extra).exists():
            shutil.copy(source / extra, folder / extra)
    tensors, values = {}, {}
    for name, array in load_file(source / "model.safetensors").items():
        if array.ndim == 2 and ".layers." in name:
            parts, values[name] = pack(array.astype(np.float32), random)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = array
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return values
