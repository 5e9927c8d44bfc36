"""Sampling defaults of a model's files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from engine_fakes import make_engine

from jaxserve import LLM
from jaxserve.generation_defaults import generation_defaults
from jaxserve.llm import DEFAULT_PARAMS


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.7, "min_p": None}, {"temperature": 0.7}),
    ],
)  # fmt: skip
def test_fields_of_the_file(content: dict, expected: dict, tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert generation_defaults(tmp_path) == expected


@pytest.mark.parametrize("content", ['{"temperature": -1}', '{"top_p": "much"}', "{"])
def test_bad_values_name_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"generation_config\.json: "):
        generation_defaults(tmp_path)


def test_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert generation_defaults(tmp_path / "model.gguf") == {"temperature": 0.5, "top_k": 40}


def test_llm_takes_them_where_a_call_says_nothing() -> None:
    engine = make_engine()
    engine.model = type(engine.model)(
        **{f: getattr(engine.model, f) for f in engine.model.__struct_fields__} | {"defaults": {"top_k": 7}}
    )
    with LLM.from_engine(engine) as llm:
        assert llm.default_params.top_k == 7
        assert llm.default_params.temperature == DEFAULT_PARAMS.temperature
