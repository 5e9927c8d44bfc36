"""Converted checkpoints: the same arrays, configuration and tokenizer, whatever the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from gguf_files import llama_gguf
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.convert import convert
from jaxserve.models.loading import load_config, load_model
from paged_steps import PagedSteps
from test_tiny_models import MAX_ERROR, TINY, checkpoint, reference

from jaxserve.hub import ModelSource, resolve_model
from jaxserve.tokenizer import load_tokenizer

EMBEDDING = TINY.parent / "tiny_embedding"
# Separate and joined projections, norms with offset and per head, experts one by one and as stacks, latent attention.
NAMES = ("llama", "gemma3", "phi3", "qwen3_moe", "gpt_oss_mxfp4", "deepseek_v3", "llama_bias_tied")


def leaves(source: ModelSource, **options: object) -> list[np.ndarray]:
    wanted = RuntimeOptions(**({"page_size": 8, "max_model_len": 64} | options))
    model = load_model(source, load_config(source), wanted)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(model)[1])]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_and_configuration_are_identical(name: str, tmp_path: Path) -> None:
    """The same bits on the device, so the same logits."""
    source = ModelSource(name, "safetensors", checkpoint(TINY / name))
    convert(source, tmp_path / name, dtype="float32")
    converted = resolve_model(str(tmp_path / name))
    assert converted == ModelSource(name, "orbax", tmp_path / name)
    assert load_config(converted) == load_config(source)
    for dtype in ("float32", "bfloat16"):
        before, after = leaves(source, dtype=dtype), leaves(converted, dtype=dtype)
        assert len(before) == len(after) > 0
        for one, other in zip(before, after, strict=True):
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def test_logits_of_a_converted_checkpoint(tmp_path: Path) -> None:
    convert(ModelSource("llama", "safetensors", TINY / "llama"), tmp_path / "llama", dtype="float32")
    source = resolve_model(str(tmp_path / "llama"))
    steps = PagedSteps(load_model(source, load_config(source), RuntimeOptions(page_size=8)))
    prompt, expected, *_ = reference("llama")[-1]
    (logits,) = steps.run([(steps.start(), prompt)])
    np.testing.assert_allclose(logits[-1], expected, atol=MAX_ERROR, rtol=0)


def test_a_gguf_file_keeps_its_values(tmp_path: Path) -> None:
    path = llama_gguf(TINY / "llama", tmp_path / "model.gguf", kinds={"ffn_up": Kind.Q8_0})
    source = ModelSource("model", "gguf", path)
    convert(source, tmp_path / "converted", dtype="float32")
    converted = resolve_model(str(tmp_path / "converted"))
    assert load_config(converted) == load_config(source)
    for one, other in zip(leaves(source), leaves(converted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["bert", "qwen3_embedding"])
def test_models_for_embeddings(name: str, tmp_path: Path) -> None:
    source = ModelSource(name, "safetensors", EMBEDDING / name)
    convert(source, tmp_path / name, dtype="float32")
    converted = resolve_model(str(tmp_path / name))
    assert load_config(converted) == load_config(source) and load_config(converted).task == "embed"
    for one, other in zip(leaves(source), leaves(converted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["smollm2-135m", "all-minilm-l6-v2"])
def test_the_tokenizer_travels_along(name: str, packaged: Callable[[str], ModelSource], tmp_path: Path) -> None:
    from jaxserve.models.convert import _copy_text

    source = packaged(name)
    _copy_text(source, tmp_path)
    before, after = load_tokenizer(source.path), load_tokenizer(tmp_path)
    text = "A sentence, with <|im_start|> inside; ünïcode 日本."
    assert before.encode(text) == after.encode(text)
    assert (before.eos_token_ids, before.vocab_size) == (after.eos_token_ids, after.vocab_size)
    if before.has_chat_template:
        messages = [{"role": "user", "content": "Hi"}]
        assert before.apply_chat_template(messages) == after.apply_chat_template(messages)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 5e6


def test_templates_and_defaults_travel_along(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(TINY / "llama", folder)
    (folder / "chat_template.jinja").write_text("x")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("y")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (folder / "evil.py").write_text("raise SystemExit")
    convert(ModelSource("llama", "safetensors", folder), tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.j*")}
    assert {"chat_template.jinja", "additional_chat_templates/tool_use.jinja", "generation_config.json"} <= found
    assert load_config(resolve_model(str(tmp_path / "out"))).eos_token_ids == (2, 7)
    assert not list((tmp_path / "out").rglob("*.py")) and not list((tmp_path / "out").rglob("*.safetensors"))


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(TINY / "llama", folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    source = ModelSource("llama", "safetensors", folder)
    with pytest.raises(ValueError, match="truncated"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        convert(source, tmp_path / "out")


def test_damaged_conversions_are_refused_by_name(tmp_path: Path) -> None:
    convert(ModelSource("llama", "safetensors", TINY / "llama"), tmp_path / "good")

    def damaged(change: Callable[[Path], None]) -> ModelSource:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        change(folder)
        return ModelSource("bad", "orbax", folder)

    def describe(folder: Path, **changes: object) -> None:
        path = folder / "jaxserve_model.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def config(folder: Path, **changes: object) -> None:
        content = json.loads((folder / "jaxserve_model.json").read_text())["config"]
        describe(folder, config=content | changes)

    with pytest.raises(ValueError, match=r"jaxserve_model\.json: version: got 9; allowed: 1"):
        load_config(damaged(lambda folder: describe(folder, version=9)))
    with pytest.raises(ValueError, match=r"jaxserve_model\.json: .*num_heads"):
        load_config(damaged(lambda folder: config(folder, num_heads="many")))
    with pytest.raises(ValueError, match=r"bad/arrays: Orbax cannot read it"):
        leaves(damaged(lambda folder: (folder / "arrays" / "_METADATA").unlink()))
    with pytest.raises(ValueError, match=r"bad/arrays: .*tensors of the wrong shape: .*layers\.0\.gate\.weight is"):
        leaves(damaged(lambda folder: config(folder, intermediate_size=80)))
    largest = max((tmp_path / "good").rglob("d/*"), key=lambda path: path.stat().st_size)
    place = largest.relative_to(tmp_path / "good")
    with pytest.raises(ValueError, match=r"bad/arrays: tensor "):
        leaves(damaged(lambda folder: (folder / place).write_bytes(largest.read_bytes()[:100])))
