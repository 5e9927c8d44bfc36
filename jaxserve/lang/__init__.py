"""Programs over a language model: generation, selection, branches and roles as words of Python.

    from jaxserve import LLM, lang

    @lang.function
    def capital(s, country):
        s += "The capital of " + country + " is" + lang.gen("city", max_tokens=4, stop=[".", ","])

    print(capital.run("France", backend=LLM())["city"])

Names and meanings are those of SGLang's frontend language: its programs run after changing the import. docs/programs.md
is the way in.
"""

from __future__ import annotations

import importlib
from typing import Any

from jaxserve.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from jaxserve.lang.backends import as_backend, set_default_backend
from jaxserve.lang.choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from jaxserve.lang.state import ProgramState, ProgramStateGroup

__all__ = [
    "ChoicesDecision", "ChoicesSamplingMethod", "CompiledProgram", "OpenAI", "ProgramState", "ProgramStateGroup",
    "Runtime", "RuntimeEndpoint", "TraceError", "assistant", "assistant_begin", "assistant_end", "call", "flush_cache",
    "function", "gen", "gen_int", "gen_string", "greedy_token_selection", "image", "select", "separate_reasoning",
    "set_default_backend", "system", "system_begin", "system_end", "token_length_normalized",
    "unconditional_likelihood_normalized", "user", "user_begin", "user_end", "video",
]  # fmt: skip

_LAZY = {
    "CompiledProgram": "jaxserve.lang.compiler",
    "OpenAI": "jaxserve.lang.backends.openai",
    "RuntimeEndpoint": "jaxserve.lang.backends.endpoint",
    "TraceError": "jaxserve.lang.tracer",
    "call": "jaxserve.lang.tracer",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxserve.lang' has no attribute {name!r}")


def Runtime(model_path: str | None = None, **options: Any) -> Any:
    """An LLM in this process, under the name that SGLang's programs use. shutdown() is close()."""
    from jaxserve.llm import LLM

    llm = LLM(model_path, **options)
    llm.shutdown = llm.close
    return llm


def flush_cache(backend: Any = None) -> bool:
    """Forget the backend's cached prefixes; whether it can."""
    return as_backend(backend).flush_cache()
