"""Configurations: rotation frequencies, spellings, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.loading import load_config
from jaxserve.models.rope import cos_sin_scale, inverse_frequencies

from jaxserve.hub import ModelSource

FIXTURES = Path(__file__).parents[1] / "fixtures"
LLAMA = json.loads((FIXTURES / "tiny" / "llama" / "config.json").read_text())


def read(folder: Path, **changes: object) -> ModelConfig:
    content = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(content))
    return load_config(ModelSource("tiny", "safetensors", folder))


@pytest.mark.parametrize("case", json.loads((FIXTURES / "rope.json").read_text())["cases"], ids=lambda case: "")
def test_rotation_frequencies_equal_transformers(case: dict) -> None:
    rope = HFConfig(case["config"] | {"hidden_size": 1}, Path("config.json")).rope()
    is_long = case["length"] > rope.original_max_position_embeddings
    np.testing.assert_allclose(inverse_frequencies(rope, is_long=is_long), case["inverse_frequencies"], rtol=3e-6)
    assert cos_sin_scale(rope) == pytest.approx(case["scale"], rel=1e-9)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_keys_of_the_rope_type(tmp_path: Path, key: str) -> None:
    config = read(tmp_path, rope_scaling={key: "linear", "factor": 2.0}, rope_theta=500.0)
    rope = config.layers[0].rope
    assert rope is not None and (rope.type, rope.factor, rope.theta) == ("linear", 2.0, 500.0)


@pytest.mark.parametrize("changes, message", [
    ({"architectures": ["MambaForCausalLM"]}, "architecture: got 'MambaForCausalLM'; allowed: LlamaForCausalLM"),
    ({"architectures": "absent"}, "architectures: got None"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope type: got 'spiral'; allowed: default, linear, llama3, yarn"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs factor"),
    ({"hidden_size": "absent"}, "the key 'hidden_size' is missing"),
    ({"hidden_size": "64"}, "hidden_size: got '64'; allowed: an integer"),
    ({"num_key_value_heads": 3}, "num_kv_heads: got 3; allowed: a divisor of 8"),
    ({"hidden_act": "relu6"}, "hidden_act: got 'relu6'"),
    ({"num_hidden_layers": 0}, "num_layers: got 0"),
    ({"eos_token_id": "x"}, "eos_token_id: got 'x'"),
    ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config: got 'aqlm'"),
])  # fmt: skip
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, **changes)
    assert message in str(caught.value) and "config.json" in str(caught.value)


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    source = ModelSource("tiny", "safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: the file is missing"):
        load_config(source)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_config(source)


def test_every_end_token_of_a_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    settings = {"eos_token": "<end>", "added_tokens_decoder": {"11": {"content": "<end>"}, "12": {"content": "<x>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read(tmp_path).eos_token_ids == (2, 7, 9, 11)


def test_the_packaged_models(packaged: Callable[[str], ModelSource]) -> None:
    small = load_config(packaged("smollm2-135m"))
    assert (small.num_layers, small.hidden_size, small.head_dim, small.max_position_embeddings) == (30, 576, 64, 8192)
    assert small.eos_token_ids == (0, 2) and small.tie_word_embeddings
    gemma = load_config(packaged("gemma3-270m"))
    windows = [layer.sliding_window for layer in gemma.layers]
    assert windows == ([512] * 5 + [0]) * 3
    assert [layer.rope.theta for layer in gemma.layers[4:6] if layer.rope] == [10000.0, 1000000.0]
    assert gemma.eos_token_ids == (1, 106)
