"""Command-line options made from EngineConfig, so that a field of the engine is described once. No jax."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxserve.config import ATTENTION_BACKENDS, DTYPES, MATMUL_BACKENDS, POLICIES, EngineConfig

# Field -> help. The order is that of --help. `model` is an argument of the commands, not an option.
_HELP = {
    "dtype": f"Type of the weights: {', '.join(DTYPES)}.",
    "page_dtype": f"Type of the cached K/V: {', '.join(DTYPES)}.",
    "max_model_len": "Longest prompt + output in tokens. Default: what the model allows, at most 8192.",
    "max_num_rows": "Requests that run at once.",
    "max_step_tokens": "Tokens computed in one step at most: also the largest prefill chunk.",
    "page_size": "Tokens per page, a power of two. Default: 16 on CPU, 64 on GPU.",
    "num_pages": "Pages of the cache. Default: from --kv-cache-bytes.",
    "kv_cache_bytes": "Bytes for the cache. Default: a share of free memory (--memory-fraction).",
    "memory_fraction": "Share of free memory for the cache, above 0 up to 0.95.",
    "policy": f"Order of the waiting queue: {', '.join(POLICIES)}.",
    "prefix_cache": "Share cached prefixes between requests.",
    "overlap": "Start a step before the last one's tokens are read.",
    "deterministic": "Bitwise the same tokens and log-probabilities whatever else runs.",
    "attention_backend": f"One of {', '.join(ATTENTION_BACKENDS)}.",
    "matmul_backend": f"One of {', '.join(MATMUL_BACKENDS)}.",
    "seed": "Seed of requests that bring none.",
    "max_waiting": "Requests in the queue before new ones are refused; 0: no limit.",
    "warmup": "Compile and run every program before serving.",
    "compile_cache_dir": "Folder of compiled programs. Default: in the cache folder.",
}


def _engine_parameters() -> list[inspect.Parameter]:
    types = typing.get_type_hints(EngineConfig)
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    parameters = []
    for name in sorted(
        fields.keys() - {"model"}, key=lambda n: list(_HELP).index(n) if n in _HELP else len(_HELP)
    ):
        flag = name.replace("_", "-")
        names = (f"--{flag}/--no-{flag}",) if types[name] is bool else (f"--{flag}",)
        option = typer.Option(
            *names, help=_HELP.get(name), rich_help_panel="Engine", show_default=fields[name].default is not None
        )
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=fields[name].default,
                annotation=Annotated[types[name], option],
            )  # fmt: skip
        )
    return parameters


def with_engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every field of EngineConfig as an option; it receives them as `engine`, a dict of those that
    differ from the default. The command itself decides on the model."""
    parameters = _engine_parameters()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "engine"]

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        engine = {name: values.pop(name) for name in defaults}
        return command(engine={k: v for k, v in engine.items() if v != defaults[k]}, **values)

    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapped.__signature__ = inspect.Signature(own + parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in own + parameters}
    del wrapped.__wrapped__  # type: ignore[attr-defined]  # inspect would look through to the bare command
    return wrapped
