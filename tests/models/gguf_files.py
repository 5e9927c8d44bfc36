"""Writes GGUF files for tests with the `gguf` package's own writer."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from jaxserve.models.family import GGUF_LAYER, GGUF_TOP, HF_LAYER, HF_TOP
from safetensors.numpy import load_file


def llama_gguf(
    folder: Path,
    target: Path,
    *,
    divisors: np.ndarray | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    **metadata: object,
) -> Path:
    """A tiny safetensors Llama as llama.cpp's converter would write it: float32, q and k ordered for a rotation of
    neighbouring pairs. kinds: part of a name -> how such tensors are stored. metadata: more keys, without the
    architecture."""
    writer = gguf.GGUFWriter(target, "llama")
    wanted = {
        "block_count": 2, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 8, "attention.head_count_kv": 2, "rope.dimension_count": 8,
    }  # fmt: skip
    for key, value in (wanted | metadata).items():
        writer.add_uint32(f"llama.{key}", int(value))  # type: ignore[call-overload]
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    head_dim = int((wanted | metadata)["rope.dimension_count"])  # type: ignore[call-overload]
    names = {f"{hf}.weight": f"{GGUF_TOP[slot]}.weight" for slot, hf in HF_TOP.items()}
    for index in range(2):
        for slot, hf in HF_LAYER.items():
            names[f"{hf.format(i=index)}.weight"] = f"{GGUF_LAYER[slot].format(i=index)}.weight"
    for name, values in load_file(folder / "model.safetensors").items():
        values = values.astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, head_dim // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = next((kind for part, kind in (kinds or {}).items() if part in names[name]), None)
        if kind is None:
            writer.add_tensor(names[name], values)
        else:
            writer.add_tensor(names[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    return _write(writer, target)


def quantised_gguf(target: Path, kinds: list[GGMLQuantizationType], shape: tuple[int, int]) -> Path:
    """One tensor of random bytes-as-blocks per kind, named after it."""
    writer = gguf.GGUFWriter(target, "llama")
    random = np.random.default_rng(3)
    for kind in kinds:
        values = random.standard_normal(shape).astype(np.float32)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            stored = values.astype(np.float16 if kind == GGMLQuantizationType.F16 else np.float32)
            writer.add_tensor(kind.name, stored)
            continue
        if kind == GGMLQuantizationType.BF16:
            stored = values.astype(ml_dtypes.bfloat16).view(np.uint8)
        else:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            # Any bytes are a valid block but for float16 scales that would be infinite or NaN: keep those bytes small.
            stored = random.integers(0, 60, (shape[0], shape[1] // block * size), dtype=np.uint8)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
    return _write(writer, target)


def _write(writer: gguf.GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
