"""Every piece of Python in docs/programs.md runs, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lang_fakes import make_llm

import jaxserve
from jaxserve import lang

TEXT = (Path(__file__).parent.parent.parent / "docs" / "programs.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)


def run_snippets(snippets, llm, monkeypatch) -> dict:
    monkeypatch.setattr(jaxserve, "LLM", lambda: llm, raising=False)
    names: dict = {}
    try:
        for snippet in snippets:
            exec(compile(snippet, "docs/programs.md", "exec"), names)
    finally:
        lang.set_default_backend(None)
    assert names["state"].error() is None
    return names


def test_every_snippet_runs_on_the_simulated_model(monkeypatch, capsys):
    """All but the one whose values have a form, which the simulated model does not know."""
    assert len(SNIPPETS) >= 9
    with make_llm() as llm:
        run_snippets([snippet for snippet in SNIPPETS if "json_schema" not in snippet], llm, monkeypatch)
    printed = capsys.readouterr().out
    assert "sums(question)" in printed and "text() needs what was generated" in printed


@pytest.mark.slow
def test_every_snippet_runs_on_the_real_model(real_llm, monkeypatch, capsys):
    run_snippets(SNIPPETS, real_llm, monkeypatch)
    assert "The capital of France is Paris" in capsys.readouterr().out
