"""Command-line options made from dataclasses, so that a field is described once. No jax."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxserve.config import ATTENTION_BACKENDS, DTYPES, EXPERT_DISPATCHES, MATMUL_BACKENDS, POLICIES, EngineConfig

# Field of EngineConfig -> help. `model` is an argument of the commands, not an option.
ENGINE_HELP = {
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
    "jump_forward": "Compute tokens that a grammar forces in one chunk instead of one by one.",
    "overlap": "Start a step before the last one's tokens are read.",
    "cascade": "Decoding requests that share cached pages read them together.",
    "deterministic": "Bitwise the same tokens and log-probabilities whatever else runs.",
    "attention_backend": f"One of {', '.join(ATTENTION_BACKENDS)}.",
    "matmul_backend": f"One of {', '.join(MATMUL_BACKENDS)}.",
    "seed": "Seed of requests that bring none.",
    "max_waiting": "Requests in the queue before new ones are refused; 0: no limit.",
    "warmup": "Compile and run every program before the first request.",
    "compile_cache_dir": "Folder of compiled programs. Default: in the cache folder.",
    "expert_dispatch": f"How tokens reach experts on other devices: {', '.join(EXPERT_DISPATCHES)}.",
    "mesh": "Devices along each axis: data=4,tensor=2 (axes: data, expert, tensor).",
    "dp": "Data parallel groups: axis data of the mesh.",
    "tp": "Devices that share heads, feed-forward width and vocabulary: axis tensor.",
    "ep": "Devices that share the experts: axis expert. Default: all of --dp.",
}

Command = Callable[..., Any]


def with_engine_options(command: Command) -> Command:
    """Give a command every field of EngineConfig but `model` as an option. It receives `engine`: a dict of those
    that differ from their default, for EngineConfig(model=..., **engine)."""
    parameters = [_engine_parameter(field) for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    defaults = {parameter.name: parameter.default for parameter in parameters}

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != defaults[name]}

    return _with_parameters(command, "engine", parameters, changed)


def refuse_engine_options(engine: dict[str, Any]) -> None:
    """Raise ValueError if options for an engine were given although --url names one that runs already."""
    if engine:
        flag = next(iter(engine)).replace("_", "-")
        raise ValueError(f"--{flag}: the engine behind --url has its own options")


def with_options_of(name: str, options: type) -> Callable[[Command], Command]:
    """Give a command every field of the dataclass `options` as an option; it receives an instance as `name`. The
    fields are Annotated with typer.Option and have defaults."""
    types = typing.get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
        for f in dataclasses.fields(options)
    ]
    return lambda command: _with_parameters(command, name, parameters, lambda values: options(**values))


def _engine_parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind = typing.get_type_hints(EngineConfig)[field.name]
    flag = field.name.replace("_", "-")
    names = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    option = typer.Option(
        names,
        help=ENGINE_HELP.get(field.name),
        rich_help_panel="Engine",
        show_default=field.default is not None,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
    )


def _with_parameters(
    command: Command,
    name: str,
    parameters: list[inspect.Parameter],
    collect: Callable[[dict[str, Any]], Any],
) -> Command:
    """Replace the argument `name` of a command by `parameters`; it is called with collect(their values)."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != name]

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        collected = {parameter.name: values.pop(parameter.name) for parameter in parameters}
        return command(**{name: collect(collected)}, **values)

    del wrapped.__wrapped__  # type: ignore[attr-defined]  # inspect would look through to the bare command
    wrapped.__signature__ = inspect.Signature(kept + parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in kept + parameters}
    return wrapped
