"""The programs of examples/programs: interpreted, compiled and by OpenAI's protocol the same values; every prompt token
computed once. On the simulated model by default, on the real one by hand (-m slow)."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lang_fakes import make_llm

from benchmarks.prefill_meter import PrefillMeter
from jaxserve import lang

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "programs"))


@dataclasses.dataclass(frozen=True)
class Example:
    """graph: whether it can be compiled to its end. is_chat: by messages. has_select, has_grammar: what a server or
    the simulated model must know."""

    module: str
    program: str
    arguments: Callable[[Any], dict[str, Any]]
    graph: bool = True
    is_chat: bool = False
    has_select: bool = False
    has_grammar: bool = False


EXAMPLES = [
    Example(
        "essay_judge", "judge_essay", lambda m: {"essay": m.ESSAY, "max_tokens": 16}, is_chat=True, has_select=True
    ),
    Example(
        "tree_of_thought", "tree_of_thought", lambda m: {"question": m.QUESTION, "max_tokens": 16},
        is_chat=True, has_select=True,
    ),
    Example("self_consistency", "answer_often", lambda m: {"question": m.QUESTION, "max_tokens": 16}),
    Example("react", "react", lambda m: {"question": m.QUESTION, "max_tokens": 16}, graph=False, has_select=True),
    Example("few_shot", "classify", lambda m: {"review": m.REVIEWS[0]}, has_select=True),
    Example("character", "fields", lambda m: {"name": "Draco Malfoy"}, has_select=True, has_grammar=True),
    Example("character", "record", lambda m: {"name": "Draco Malfoy"}, is_chat=True, has_grammar=True),
    Example("chat", "conversation", lambda m: {"max_tokens": 12}, is_chat=True),
    Example("extraction", "extract", lambda m: {"document": m.DOCUMENT, "max_tokens": 8}),
]  # fmt: skip
EACH = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.program)


def load(example: Example) -> tuple[Any, dict[str, Any]]:
    module = importlib.import_module(example.module)
    return getattr(module, example.program), example.arguments(module)


def run(program: Any, arguments: dict[str, Any], backend: Any, **options: Any) -> Any:
    state = program.run(**arguments, backend=backend, **options)
    assert state.error() is None, state.error()
    state.run.wait_finished()
    return state


def values(state: Any) -> tuple[str, str]:
    return state.text(), json.dumps(state.ret_value, default=repr)


def check(example: Example, llm: Any, **options: Any) -> None:
    """Interpreted and compiled, each from an empty cache."""
    program, arguments = load(example)
    compiled = program.compile()
    assert compiled.is_whole == example.graph
    with PrefillMeter(llm) as meter:
        interpreted = values(run(program, arguments, llm, **options))
    assert meter.computed <= 1.05 * meter.ideal, (meter.computed, meter.ideal)
    with PrefillMeter(llm) as meter:
        assert values(run(compiled, arguments, llm, **options)) == interpreted
    assert meter.computed <= 1.05 * meter.ideal, (meter.computed, meter.ideal)


@pytest.fixture(scope="module")
def simulated():
    with make_llm(num_pages=8000, page_size=16, max_num_rows=32, max_model_len=8192) as llm:
        yield llm


@EACH
def test_on_the_simulated_model(example, simulated):
    if example.has_grammar:
        pytest.skip("the simulated model knows no grammars")
    check(example, simulated, seed=1)


@pytest.mark.slow
@EACH
def test_on_the_real_model(example, real_llm):
    check(example, real_llm, temperature=0)


@pytest.fixture(scope="module")
def server(real_llm):
    """The same model, precision and shapes behind HTTP."""
    from live import server_process, wait_for

    config = {"model": real_llm.config.model, "dtype": "float32", "max_model_len": 1024, "max_num_rows": 12}
    with server_process({}, **config, max_step_tokens=64, warmup=False) as (_, live):
        wait_for(lambda: live.http.get("/ready").status_code == 200, 300)
        model = live.http.get("/v1/models").json()["data"][0]["id"]
        yield live.url, model


@pytest.mark.slow
@EACH
def test_by_http_on_the_real_model(example, real_llm, server):
    """By tokens, and by OpenAI's protocol where that has words for what the program does."""
    url, model = server
    program, arguments = load(example)
    expected = values(run(program, arguments, real_llm, temperature=0))
    assert values(run(program, arguments, lang.RuntimeEndpoint(url), temperature=0)) == expected
    if example.program == "fields" or (example.is_chat and example.has_select):
        return
    backend = lang.OpenAI(model, is_chat_model=example.is_chat, base_url=f"{url}/v1")
    state = run(program, arguments, backend, temperature=0)
    assert json.dumps(state.ret_value, default=repr) == expected[1]
    if not example.is_chat:
        assert state.text() == expected[0]


sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
