"""Readers of weight files against other readers, and what they say of damaged files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import llama_gguf, quantised_gguf
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import load_config, load_model
from jaxserve.models.weights.gguf import READABLE, GGUFTensors
from jaxserve.models.weights.gguf_file import GGUFFile
from jaxserve.models.weights.safetensors import SafetensorsTensors
from paged_steps import PagedSteps
from safetensors.numpy import load_file, save_file
from test_tiny_models import MAX_ERROR, TINY, reference

from jaxserve.hub import ModelSource

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
OPTIONS = RuntimeOptions(page_size=8)


def load(path: Path, kind: str = "safetensors", **options: object) -> object:
    source = ModelSource("tiny", kind, path)
    return load_model(source, load_config(source), OPTIONS, **options)  # type: ignore[arg-type]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of its own to damage."""
    folder = tmp_path / "llama"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(TINY / "llama" / name, folder / name)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_quantised_type_equals_the_gguf_package(kind: Kind, tmp_path: Path) -> None:
    path = quantised_gguf(tmp_path / "file.gguf", [kind], (12, 512))
    expected = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(12, 512)
        for tensor in gguf.GGUFReader(path).tensors
    }
    tensors = GGUFTensors(GGUFFile(path))
    assert dict(tensors.shapes) == {kind.name: (12, 512)}
    found = tensors.read(kind.name, FLOAT32)
    assert np.isfinite(found).all() and found.any()
    np.testing.assert_array_equal(found, expected[kind.name])
    rounded = expected[kind.name].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(tensors.read(kind.name, BFLOAT16), rounded)


def test_tensors_of_the_real_file_equal_the_gguf_package(packaged: Callable[[str], ModelSource]) -> None:
    path = packaged("smollm2-135m").path
    tensors, reader = GGUFTensors(GGUFFile(path)), gguf.GGUFReader(path)
    assert list(tensors.shapes) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors[:12]:
        shape = tuple(int(n) for n in tensor.shape[::-1])
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        np.testing.assert_array_equal(tensors.read(tensor.name, FLOAT32), expected, err_msg=tensor.name)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            np.testing.assert_array_equal(tensors.file.metadata[key], field.contents(), err_msg=key)


def test_a_gguf_llama_gives_the_logits_of_its_safetensors(tmp_path: Path) -> None:
    """Rows of q and k are put back in order, and the divisors in the file stretch the rotation as llama3 does."""
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(0, 8, 2) / 8)
    smooth = np.clip((64 / wavelength - 1) / 3, 0, 1)
    divisors = 1 / ((1 - smooth) / 8 + smooth)
    path = llama_gguf(TINY / "llama", tmp_path / "model.gguf", divisors=divisors)
    steps = PagedSteps(load(path, "gguf"))  # type: ignore[arg-type]
    for prompt, expected, *_ in reference("llama")[-2:]:
        (logits,) = steps.clear().run([(steps.start(), prompt)])
        np.testing.assert_allclose(logits[-1], expected, atol=MAX_ERROR, rtol=0)


def test_shards_load_like_one_file(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    whole = SafetensorsTensors(llama)
    expected = {name: whole.read(name, FLOAT32) for name in whole.shapes}
    (llama / "model.safetensors").unlink()
    shard(llama, tensors)
    found = SafetensorsTensors(llama)
    assert set(found.shapes) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found.read(name, FLOAT32), values)
        np.testing.assert_array_equal(values, tensors[name].astype(np.float32))


def shard(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    names, index = sorted(tensors), {}
    for part in range(2):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, folder / file)
        index.update(dict.fromkeys(names[part::2], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.fixture
def shards(llama: Path) -> Path:
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    shard(llama, tensors)
    return llama


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: the shard is missing"):
        load(shards)


@pytest.mark.parametrize("text, message", [
    ("{", "not valid JSON"), ("[]", "allowed: an object"), ("{}", "no weight_map"),
    ('{"weight_map": {"a": "../../etc/passwd"}}', "allowed: a .safetensors file name"),
    ('{"weight_map": {"no.such": "model-00001-of-00002.safetensors"}}', "'no.such' is missing"),
])  # fmt: skip
def test_a_broken_index_is_named(shards: Path, text: str, message: str) -> None:
    (shards / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"(index\.json|00002\.safetensors): .*" + message):
        load(shards)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file_is_named(llama: Path, keep: int) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated"):
        load(llama)


def test_a_truncated_gguf_names_the_tensor(tmp_path: Path) -> None:
    path = llama_gguf(TINY / "llama", tmp_path / "model.gguf", divisors=np.ones(4))
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    with pytest.raises(ValueError, match=r"model\.gguf: tensor '.+' needs bytes .* truncated"):
        load(path, "gguf")
    for keep in (0, 3, 10, 30, 200, 1500):
        path.write_bytes(data[:keep])
        with pytest.raises(ValueError, match=r"model\.gguf: "):
            load(path, "gguf")


def test_headers_with_any_byte_changed_never_crash(tmp_path: Path) -> None:
    """Either it loads (a byte of a name's text or a number) or it is a ValueError that names the file."""
    path = llama_gguf(TINY / "llama", tmp_path / "model.gguf")
    data, random = bytearray(path.read_bytes()), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        at, value = int(random.integers(0, 2000)), int(random.integers(0, 256))
        changed = bytearray(data)
        changed[at] = value
        path.write_bytes(changed)
        try:
            load_config(ModelSource("tiny", "gguf", path))
        except ValueError as error:
            assert "model.gguf" in str(error)
            refused += 1
    assert refused > 20


def test_missing_surplus_and_misshapen_tensors_are_listed(llama: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(65, np.float32)

    rewrite(llama, change)
    with pytest.raises(ValueError) as caught:
        load(llama)
    message = str(caught.value)
    assert "1 tensors missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 tensors left over: model.layers.0.self_attn.extra.weight" in message
    assert "model.norm.weight is [65], allowed [64]" in message


def test_buffers_that_older_files_carry_are_no_surplus(llama: Path) -> None:
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewrite(llama, lambda tensors: tensors.update(inverse))
    load(llama)


def test_heads_and_the_tie_flag_are_reconciled(tmp_path: Path) -> None:
    """Tied with or without a stored head: the embedding; untied without one: refused by name; tied, but the stored
    head differs: refused."""
    folder = tmp_path / "qwen2"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(TINY / "qwen2" / name, folder / name)
    assert load(folder).head is None
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert load(folder).head is None
    configure(folder, tie_word_embeddings=False)
    prompt, expected, *_ = reference("qwen2")[-1]
    steps = PagedSteps(load(folder))
    np.testing.assert_allclose(steps.run([(steps.start(), prompt)])[0][-1], expected, atol=MAX_ERROR, rtol=0)
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load(folder)
    configure(folder, tie_word_embeddings=True)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs"):
        load(folder)


def test_pickled_weights_are_refused_and_never_opened(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        load(llama)


def test_code_named_in_a_checkpoint_never_runs(llama: Path) -> None:
    marker = llama / "marker"
    (llama / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    configure(llama, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    load(llama)
    assert not marker.exists()


def test_nan_weights_are_refused_on_request(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].__setitem__((3, 4), np.nan))
    load(llama)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight' holds NaN"):
        load(llama, check_weights=True)


def test_progress_ends_at_the_total(llama: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load(llama, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done) and calls[-1][1] == calls[-1][2] > 0
