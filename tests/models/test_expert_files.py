"""Files of models with experts: what is missing is named, drafting layers are left alone, MXFP4 is read exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import load_config, load_model
from jaxserve.models.weights.mxfp4 import dequantize_mxfp4
from safetensors.numpy import load_file, save_file
from tiny_weights import FIXTURES, checkpoint

from jaxserve.hub import ModelSource


def copy(name: str, folder: Path) -> tuple[ModelSource, dict[str, np.ndarray]]:
    shutil.copytree(checkpoint(FIXTURES / name), folder, dirs_exist_ok=True)
    return ModelSource(name, "safetensors", folder), load_file(folder / "model.safetensors")


def load(source: ModelSource) -> None:
    load_model(source, load_config(source), RuntimeOptions())


@pytest.mark.parametrize("name, tensor", [
    ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj"),
    ("gpt_oss", "model.layers.0.self_attn.sinks"),
    ("gpt_oss", "model.layers.1.mlp.experts.down_proj"),
    ("gpt_oss_mxfp4", "model.layers.1.mlp.experts.gate_up_proj"),
    ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
])  # fmt: skip
def test_a_missing_tensor_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    source, tensors = copy(name, tmp_path)
    gone = next(key for key in tensors if (key.startswith(tensor) and not key.endswith("_bias")) or key == tensor)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load(source)
    assert "missing" in str(caught.value) and tensor in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_misshapen_up_projection_is_named(tmp_path: Path) -> None:
    source, tensors = copy("deepseek_v2", tmp_path)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"left over: model\.layers\.1\.self_attn\.kv_b_proj\.weight"):
        load(source)


def test_drafting_layers_are_left_alone_where_the_configuration_names_them(tmp_path: Path) -> None:
    source, tensors = copy("deepseek_v3", tmp_path)
    tensors["model.layers.2.eh_proj.weight"] = np.zeros((64, 128), ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for count in (1, 0):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
        if count:
            load(source)
        else:
            with pytest.raises(ValueError, match=r"left over: model\.layers\.2\.eh_proj\.weight"):
                load(source)


def test_every_code_and_scale_of_mxfp4() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-value for value in values]
    scales = np.arange(2, 253, dtype=np.uint8).reshape(-1, 1)
    codes = np.random.default_rng(0).integers(0, 16, (len(scales), 1, 32))
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    expected = np.array(
        [[values[code] * 2.0 ** (int(scale[0]) - 127) for code in row[0]] for row, scale in zip(codes, scales)]
    )
    for dtype in (np.float32, ml_dtypes.bfloat16):
        found = dequantize_mxfp4(blocks, scales, np.dtype(dtype))
        assert found.dtype == dtype and found.shape == (len(scales), 32)
        np.testing.assert_array_equal(found.astype(np.float64), expected)
    with pytest.raises(ValueError, match=r"mxfp4: got blocks \(251, 1, 16\) and scales \(251, 2\)"):
        dequantize_mxfp4(blocks, np.repeat(scales, 2, axis=1), np.dtype(np.float32))
