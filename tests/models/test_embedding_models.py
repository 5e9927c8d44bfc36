"""Models for embeddings against transformers: tiny ones of every family, and MiniLM with its real weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import is_encoder, load_config, load_model
from paged_steps import PagedSteps
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.hub import ModelSource
from jaxserve.outputs import RequestRefused
from jaxserve.runner.encoder import EncoderRunner, EncoderWork, length_ladder
from jaxserve.tokenizer import load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
TINY = FIXTURES / "tiny_embedding"
OPTIONS = RuntimeOptions(page_size=8, attention="xla")


def source_of(folder: Path) -> ModelSource:
    return ModelSource(folder.name, "safetensors", folder)


def reference(name: str, pooling: str) -> tuple[list[np.ndarray], np.ndarray]:
    """(token ids of each text, vectors [texts, hidden])."""
    with np.load(TINY / name / "reference.npz") as data:
        return np.split(data["tokens"], np.cumsum(data["lengths"])[:-1]), data[pooling]


def runner_of(folder: Path, **options: object) -> EncoderRunner:
    source = source_of(folder)
    config = EngineConfig(dtype="float32", compile_cache_dir="", warmup=False, **options)
    return EncoderRunner.from_model(config, load_model(source, load_config(source), OPTIONS), OPTIONS)


@pytest.mark.parametrize("name", ["bert", "xlm_roberta"])
def test_encoders_equal_transformers_alone_and_in_batches(name: str) -> None:
    runner = runner_of(TINY / name)
    assert runner.lengths == (16, 32, 40)
    for pooling in ("mean", "cls", "last"):
        texts, expected = reference(name, pooling)
        work = [EncoderWork(text, pooling) for text in texts]
        alone = np.concatenate([runner.run([text]) for text in work])
        np.testing.assert_allclose(alone, expected, atol=2e-5)
        short = [k for k, text in enumerate(texts) if len(text) <= 16]
        np.testing.assert_allclose(runner.run([work[k] for k in short]), expected[short], atol=2e-5)
    mixed = [EncoderWork(texts[3], pooling) for pooling in ("cls", "mean", "last", "mean")]
    found = runner.run(mixed)
    for row, text in zip(found, mixed, strict=True):
        np.testing.assert_allclose(row, reference(name, text.pooling)[1][3], atol=2e-5)


def test_batches_that_do_not_fit_are_refused() -> None:
    runner = runner_of(TINY / "bert")
    text = EncoderWork(np.ones(3, np.int32), "mean")
    with pytest.raises(ValueError, match=r"got 2 texts; allowed: \(16, 4, 1\)"):
        runner.run([text] * 2)
    with pytest.raises(ValueError, match="one length bucket"):
        runner.run([text] * 3 + [EncoderWork(np.ones(20, np.int32), "mean")])
    with pytest.raises(ValueError, match="got 41; allowed: at most 40"):
        runner.run([EncoderWork(np.ones(41, np.int32), "mean")])
    assert length_ladder(512) == (16, 32, 64, 128, 256, 512) and length_ladder(10) == (10,)


def test_a_file_saved_with_a_head_and_old_names(tmp_path: Path) -> None:
    shutil.copytree(TINY / "bert", tmp_path / "bert")
    tensors = load_file(TINY / "bert" / "model.safetensors")
    renamed = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    save_file(renamed | {"cls.predictions.bias": np.zeros(4, np.float32)}, tmp_path / "bert" / "model.safetensors")
    texts, expected = reference("bert", "mean")
    found = runner_of(tmp_path / "bert").run([EncoderWork(texts[4], "mean")])
    np.testing.assert_allclose(found[0], expected[4], atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: got 'relative_key'"),
        ({"is_decoder": True}, "is_decoder: got True"),
        ({"hidden_act": "tanh"}, "hidden_act: got 'tanh'"),
        ({"num_attention_heads": 5}, "num_heads: got 5; allowed: a divisor of 32"),
    ],
)
def test_encoders_of_other_kinds_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    content = json.loads((TINY / "bert" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=r"config\.json: .*" + message):
        load_config(source_of(tmp_path))


@pytest.mark.parametrize("chunk", [40, 7])
def test_a_decoder_for_embeddings_equals_transformers(chunk: int) -> None:
    """Published without a head and without the prefix of its names, with files of sentence-transformers beside it."""
    source = source_of(TINY / "qwen3_embedding")
    config = load_config(source)
    assert (config.task, config.pooling) == ("embed", "last") and not is_encoder(source)
    steps = PagedSteps(load_model(source, config, OPTIONS), states=True)
    texts, last = reference("qwen3_embedding", "last")
    _, mean = reference("qwen3_embedding", "mean")
    for text, by_last, by_mean in zip(texts, last, mean, strict=True):
        sequence = steps.clear().start()
        parts = [steps.run([(sequence, text[i : i + chunk].tolist())])[0] for i in range(0, len(text), chunk)]
        states = np.concatenate(parts)
        np.testing.assert_allclose(states[-1], by_last, atol=5e-5)
        np.testing.assert_allclose(states.mean(axis=0), by_mean, atol=5e-5)


def test_a_class_without_a_head_is_for_embeddings(tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    shutil.copytree(TINY / "qwen3_embedding", folder, ignore=shutil.ignore_patterns("modules.json"))
    content = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        load_model(source_of(folder), load_config(source_of(folder)), OPTIONS)
    (folder / "config.json").write_text(json.dumps(content | {"architectures": ["Qwen3Model"]}))
    config = load_config(source_of(folder))
    assert (config.task, config.pooling) == ("embed", "last")
    assert load_model(source_of(folder), config, OPTIONS).head is None
    (folder / "config.json").write_text(json.dumps(content | {"use_bidirectional_attention": True}))
    with pytest.raises(ValueError, match="bidirectional attention in a decoder"):
        load_config(source_of(folder))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", '[{"type": "sentence_transformers.models.Dense", "path": "3"}]', "module '.*Dense'"),
        ("modules.json", "{}", "allowed: a list of objects"),
        ("modules.json", "[]", "no module of type Pooling"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling: got pooling_mode_max_tokens"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}', "allowed in a decoder: last, mean"),
    ],
)
def test_pipelines_that_are_not_computed_here_are_refused(
    file: str, content: str, message: str, tmp_path: Path
) -> None:
    shutil.copytree(TINY / "qwen3_embedding", tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_config(source_of(tmp_path / "model"))


def test_minilm_equals_transformers(packaged: Callable[[str], ModelSource]) -> None:
    """Text in, vector out: word pieces, mean pooling, length one."""
    source = packaged("all-minilm-l6-v2")
    rows = json.loads((FIXTURES / "minilm_l6_v2.json").read_text())["rows"]
    tokenizer = load_tokenizer(source.path)
    for row in rows:
        assert tokenizer.encode(row["text"])[:256] == row["ids"] or len(row["ids"]) == 256
    expected = np.array([row["embedding"] for row in rows])
    with LLM("all-minilm-l6-v2", progress=False, warmup=False) as llm:
        assert (llm.model.task, llm.model.pooling, llm.model.max_model_len) == ("embed", "mean", 256)
        found = llm.embed([row["ids"] for row in rows])
        cosine = (found * expected).sum(axis=1)
        print(f"MiniLM: largest cosine distance {1 - cosine.min():.1e}, error {np.abs(found - expected).max():.1e}")
        assert cosine.min() >= 1 - 1e-6
        np.testing.assert_allclose(found, expected, atol=2e-6)
        np.testing.assert_allclose(llm.embed(rows[0]["text"]), found[:1], atol=1e-6)
        with pytest.raises(RequestRefused, match="embeddings only"):
            llm.generate("Hello")
        with pytest.raises(RequestRefused, match="1 to 256 tokens"):
            llm.embed("mitochondria " * 300)
