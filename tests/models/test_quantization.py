"""Quantised checkpoints and quantisation at load against float64, and what the engine's products make of them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import load_config, load_model
from jaxserve.models.quantization import ONLINE, dequantize_numpy, quantize
from jaxserve.models.weights.gguf_blocks import KEPT, form_of, kept_blocks
from jaxserve.pallas_kernels.backend import mosaic_available
from jaxserve.pallas_kernels.matmul.quantized import (
    DoubleWeight,
    JoinedWeight,
    PlanarWeight,
    QuantizedWeight,
    row_bytes,
)
from paged_steps import PagedSteps
from quantised_files import FORMS, write_quantised
from safetensors.numpy import load_file, save_file
from test_tiny_models import TINY, checkpoint, reference

from jaxserve.hub import ModelSource

FLOAT32 = np.dtype(np.float32)
PROMPT = reference("llama")[-1][0]


def load(folder: Path, *, dtype: str = "float32", matmul: str = "xla", **options: object) -> Decoder:
    source = ModelSource(folder.name, "safetensors", folder)
    wanted = RuntimeOptions(page_size=8, dtype=dtype, matmul=matmul)
    return load_model(source, load_config(source), wanted, **options)  # type: ignore[arg-type]


def logits(model: Decoder, tokens: list[int] = PROMPT) -> np.ndarray:
    steps = PagedSteps(model)
    return steps.run([(steps.start(), tokens)])[0]


def with_values(values: dict[str, np.ndarray], source: Path, folder: Path) -> Path:
    """A plain checkpoint with these values in float32."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = {name: array.astype(np.float32) for name, array in load_file(source / "model.safetensors").items()}
    tensors |= {name: np.ascontiguousarray(array, np.float32) for name, array in values.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def arrays_of(model: Decoder) -> dict[str, object]:
    layer = model.layers[0]
    return {
        "qkv": layer.attention.qkv.weight.get_value(), "out": layer.attention.out.weight.get_value(),
        "down": layer.mlp.down.weight.get_value(), "table": model.embedding.table.get_value(),
    }  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_published_forms_have_the_values_of_their_description(form: str, tmp_path: Path) -> None:
    values = write_quantised(form, TINY / "llama", tmp_path / form)
    model = load(tmp_path / form)
    found = np.asarray(arrays_of(model)["down"])
    expected = values["model.layers.0.mlp.down_proj.weight"]
    # One rounding of a product of two short numbers: float32 holds it, or its nearest.
    np.testing.assert_allclose(found, expected, rtol=2**-24, atol=0)
    if form not in ("awq", "fp8_block"):
        return  # the way from values to logits is the same
    plain = with_values(values, TINY / "llama", tmp_path / "plain")
    np.testing.assert_allclose(logits(model), logits(load(plain)), atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_published_forms_stay_in_their_blocks(form: str, tmp_path: Path) -> None:
    """Whatever no form holds exactly is expanded: groups that lie apart, zeros of 8 bits, blocks cut inside 32."""
    values = write_quantised(form, TINY / "llama", tmp_path / form)
    model = load(tmp_path / form, weights="stored")
    kept = arrays_of(model)["down"]
    if form in ("gptq_act_order", "gptq_8_bits_asymmetric"):
        assert not isinstance(kept, QuantizedWeight)
    else:
        assert isinstance(kept, QuantizedWeight)
        found = dequantize_numpy(np.asarray(kept.codes), kept.kind)
        np.testing.assert_allclose(found, values["model.layers.0.mlp.down_proj.weight"], rtol=2**-24, atol=0)
    if form in ("awq", "fp8_output"):
        np.testing.assert_allclose(logits(model), logits(load(tmp_path / form)), atol=2e-5)


def test_few_rows_of_kept_blocks_are_exact_on_cpu(tmp_path: Path) -> None:
    """With an expanded copy beside the blocks, steps of few tokens take the blocks, in float32; others the copy."""
    write_quantised("awq", TINY / "llama", tmp_path / "awq")
    exact = load(tmp_path / "awq")
    both = load(tmp_path / "awq", dtype="bfloat16", matmul="cpu_ffi", weights="both")
    assert isinstance(arrays_of(both)["qkv"], DoubleWeight)
    assert arrays_of(both)["qkv"].dense.dtype == "bfloat16"
    assert 0 < np.abs(logits(both) - logits(exact)).max() < 0.15


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("awq", {"version": "gemv"}, "allowed: 4, gemm"),
        ("awq", {"bits": 3}, "awq: got bits 3"),
        ("gptq", {"bits": 3}, "gptq: got bits 3"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ("fp8_block", {"weight_block_size": [16, 16]}, "weight_scale_inv is .* allowed"),
        ("fp8_block", {"quant_method": "hqq"}, "got 'hqq'; allowed: fp8, awq, gptq, mxfp4"),
    ],
)
def test_variants_that_are_not_read_are_refused(form: str, change: dict, message: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    write_quantised(form, TINY / "llama", folder)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("form", "suffix", "message"),
    [
        ("awq", "qzeros", "is there, but .*qzeros is not"),
        ("gptq", "scales", "is there, but .*scales is not"),
        ("fp8_block", "weight_scale_inv", "is float8, but there is no"),
    ],
)
def test_parts_that_are_missing_are_named(form: str, suffix: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    write_quantised(form, TINY / "llama", folder)
    path, name = folder / "model.safetensors", f'model.layers.1.mlp.up_proj.{suffix}"'.encode()
    data = path.read_bytes()
    assert data.count(name) == 1
    path.write_bytes(data.replace(name, name[:-2] + b'?"'))  # called otherwise in the header
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.up_proj.*" + message):
        load(folder)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_gguf_blocks_equal_the_gguf_package(kind: Kind) -> None:
    """Random bytes: every code and every scale that is a finite number."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (48, 512 // block, size), dtype=np.uint8)
    halves = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,), Kind.Q4_1: (0, 2)}.get(kind, (0,))
    for at in halves:
        rows[..., at : at + 2] = random.uniform(-1, 1, rows.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    rows = rows.reshape(48, -1)
    form = form_of(kind)
    assert form is not None
    kept = kept_blocks(rows, kind)
    assert kept.shape == (48, row_bytes(form, 512))
    np.testing.assert_array_equal(dequantize_numpy(kept, form), gguf.dequantize(rows, kind))


@pytest.mark.parametrize("method", ONLINE)
def test_quantising_is_the_nearest_code(method: str) -> None:
    """Against every code of the form, in float64, for each value."""
    random = np.random.default_rng(3)
    values = (random.standard_normal((24, 64)) * random.uniform(0.01, 10, (24, 1))).astype(np.float32)
    values[3] = 0
    values[4, :32] = 0.25
    made = quantize(values, method)
    assert made is not None
    kind, codes = made
    assert codes.shape == (24, row_bytes(kind, 64)) and codes.dtype == np.uint8
    found = dequantize_numpy(codes, kind).astype(np.float64)
    if method == "int4":
        blocks = codes.reshape(24, 2, 20)
        d, m = (np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float64) for at in (0, 2))
        grid = d[..., None] * np.arange(16) + m[..., None]  # [24, 2, 1, 16]
        best = np.abs(grid - values.reshape(24, 2, 32, 1)).min(axis=-1).reshape(24, 64)
    else:
        scale = np.ascontiguousarray(codes[:, -4:]).view(np.float32).astype(np.float64)
        points = np.arange(-127, 128) if method == "int8" else _fp8_points()
        best = np.abs(points * scale[:, :, None] - values[:, :, None]).min(axis=-1)
    np.testing.assert_allclose(np.abs(found - values), best, atol=1e-6 * np.abs(values).max())
    assert not found[3].any()


def _fp8_points() -> np.ndarray:
    points = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return points[np.isfinite(points)]


@pytest.mark.parametrize("method", ONLINE)
def test_a_model_quantised_at_load(method: str) -> None:
    model = load(TINY / "llama", quantization=method, weights="stored")
    arrays = arrays_of(model)
    assert all(isinstance(arrays[name], QuantizedWeight) for name in ("qkv", "out", "down"))
    assert isinstance(arrays["table"], QuantizedWeight) == (method != "fp8")
    error = np.abs(logits(model)[-1] - reference("llama")[-1][1]).max()
    assert 1e-4 < error < {"int8": 0.5, "int4": 4.0, "fp8": 2.0}[method]
    small = load(TINY / "llama", quantization=method, weights="both", dtype="bfloat16", matmul="cpu_ffi")
    assert isinstance(arrays_of(small)["out"], DoubleWeight)
    assert np.abs(logits(small) - logits(model)).max() < 0.2


# Runs where JAX has the interpreter of GPU kernels; the reason says what is missing elsewhere.
@pytest.mark.skipif(not mosaic_available(interpret=True)[0], reason=mosaic_available(interpret=True)[1] or "-")
@pytest.mark.parametrize("weights", ["stored", "both"])
@pytest.mark.parametrize("method", ONLINE)
def test_the_gpu_kernel_in_a_model(method: str, weights: str) -> None:
    options = {"quantization": method, "weights": weights, "dtype": "bfloat16"}
    model = load(TINY / "llama", matmul="interpret", **options)
    arrays = arrays_of(model)
    stored = arrays["out"].stored if weights == "both" else arrays["out"]
    assert isinstance(stored, PlanarWeight) and isinstance(stored.codes, jax.Array)
    expected = logits(load(TINY / "llama", **options))
    assert np.abs(logits(model) - expected).max() < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("method", ONLINE)
def test_experts_are_quantised_as_well(method: str) -> None:
    model = load(checkpoint(TINY / "mixtral"), quantization=method, weights="stored")
    stack = model.layers[0].mlp.gate_up.get_value()
    assert isinstance(stack, QuantizedWeight) and stack.codes.ndim == 3
    exact = logits(load(checkpoint(TINY / "mixtral")))
    assert 1e-4 < np.abs(logits(model) - exact).mean() < {"int8": 0.3, "int4": 1.5, "fp8": 0.8}[method]


def test_parts_of_different_forms_are_one_weight(tmp_path: Path) -> None:
    """As Q4_K_M files do it: values of one kind beside queries and keys of another."""
    from gguf_files import llama_gguf

    path = llama_gguf(TINY / "llama", tmp_path / "model.gguf", kinds={"attn_v": Kind.Q8_0, "attn_q": Kind.Q4_0})
    source = ModelSource("tiny", "gguf", path)
    options = RuntimeOptions(page_size=8)
    dense, stored = (load_model(source, load_config(source), options, weights=kind) for kind in ("dense", "stored"))
    assert isinstance(arrays_of(stored)["qkv"], JoinedWeight)
    np.testing.assert_allclose(logits(stored), logits(dense), atol=2e-5)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="quantization: got 'int2'; allowed: none, int8, int4, fp8"):
        load(TINY / "llama", quantization="int2")
    with pytest.raises(ValueError, match="weights: got 'auto'; allowed: dense, stored, both"):
        load(TINY / "llama", weights="auto")
