"""GGUF files of every family describe the model, and hold the arrays, of the safetensors that they were made from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import gguf_families
import jax
import numpy as np
import pytest
from flax import nnx
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import load_config, load_model
from jaxserve.models.rope import cos_sin_scale
from tiny_weights import FIXTURES, checkpoint

from jaxserve.hub import ModelSource

# A GGUF file has no place for these, or spells them in its own way.
UNTOLD = ("architecture", "num_draft_layers")


def read(kind: str, path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    source = ModelSource(path.name, kind, path)
    config = load_config(source)
    state = nnx.to_flat_state(nnx.state(load_model(source, config, RuntimeOptions())))
    return config, {jax.tree_util.keystr(key): np.asarray(value.get_value()) for key, value in state}


def original(name: str, folder: Path) -> Path:
    """The safetensors checkpoint with what a GGUF file can say."""
    shutil.copytree(checkpoint(FIXTURES / name), folder)
    config = json.loads((folder / "config.json").read_text())
    if name.startswith("deepseek"):
        config["rope_scaling"]["mscale"] = config["rope_scaling"]["mscale_all_dim"]
    if name == "gpt_oss":
        config["swiglu_limit"] = 7.0  # the same in all published models
    if name == "smollm3":
        config["no_rope_layers"] = [1, 1, 1]  # every fourth layer goes without in all published models
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# The tiny Gemmas scale scores in a way that a GGUF file cannot say; a real one is compared in test_real_models.py.
@pytest.mark.parametrize("name", [name for name in gguf_families.ARCHITECTURES if not name.startswith("gemma")])
def test_both_formats_are_the_same_model(name: str, tmp_path: Path) -> None:
    folder = original(name, tmp_path / name)
    expected, arrays = read("safetensors", folder)
    config, found = read("gguf", gguf_families.write(folder, tmp_path / f"{name}.gguf"))
    # float32 metadata
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert config.attention_scale == pytest.approx(expected.attention_scale, rel=1e-6)
    for ours, theirs in zip(config.layers, expected.layers, strict=True):
        assert _rounded(ours) == _rounded(theirs)
    same = {key: getattr(expected, key) for key in (*UNTOLD, "rms_norm_eps", "attention_scale", "layers", "moe")}
    assert dataclasses.replace(config, **same) == expected
    assert _rounded(config.moe) == _rounded(expected.moe)
    assert found.keys() == arrays.keys()
    for key, values in arrays.items():
        assert found[key].tobytes() == values.tobytes(), key


def test_older_files_hold_one_up_projection(tmp_path: Path) -> None:
    folder = original("deepseek_v3", tmp_path / "deepseek_v3")
    new = read("gguf", gguf_families.write(folder, tmp_path / "deepseek_v3.gguf"))
    (tmp_path / "old").mkdir()
    old = read("gguf", gguf_families.write(folder, tmp_path / "old" / "deepseek_v3.gguf", splits_kv_b=False))
    assert old[0] == new[0]
    assert all(old[1][key].tobytes() == values.tobytes() for key, values in new[1].items())


def _rounded(value: object) -> object:
    """Numbers to six digits, for those that a file holds in float32."""
    if isinstance(value, RopeConfig):
        value = dataclasses.replace(value, attention_factor=cos_sin_scale(value))
    if dataclasses.is_dataclass(value):
        return {field.name: _rounded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(_rounded(part) for part in value)
    return float(f"{value:.6g}") if isinstance(value, float) else value
