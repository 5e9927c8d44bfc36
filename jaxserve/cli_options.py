"""Command-line options made from dataclasses, so that a field is described once. No jax."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxserve.config import (
    ATTENTION_BACKENDS,
    DTYPES,
    EXPERT_DISPATCHES,
    MATMUL_BACKENDS,
    PAGE_DTYPES,
    POLICIES,
    QUANTIZATIONS,
    WEIGHTS,
    EngineConfig,
)

# Field of EngineConfig -> help. `model` is an argument of the commands, not an option.
ENGINE_HELP = {
    "dtype": f"Type of the weights: {', '.join(DTYPES)}.",
    "quantization": f"Quantise weights while they are read: {', '.join(QUANTIZATIONS)}.",
    "weights": f"Weights that a file stores in blocks: {', '.join(WEIGHTS)}. stored: multiplied as they are; dense: "
    "expanded when loaded.",
    "generation_config": "Take sampling defaults from the model's generation_config.json.",
    "check_weights": "Refuse checkpoints that hold NaN or infinity.",
    "page_dtype": f"Type of the cached K/V: {', '.join(PAGE_DTYPES)}.",
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
    "matmul_backend": f"One of {', '.join(MATMUL_BACKENDS)}; cpu_int8 rounds inputs to 8 bits.",
    "seed": "Seed of requests that bring none.",
    "max_waiting": "Requests in the queue before new ones are refused; 0: no limit.",
    "kv_events": "Tell routers which prefixes are cached.",
    "warmup": "Compile and run every program before the first request.",
    "compile_cache_dir": "Folder of compiled programs. Default: in the cache folder.",
    "expert_replicas": "File: which experts are on which devices, hot ones on several (docs/sharding.md).",
    "expert_load": "File that gets how many tokens chose each expert, when the engine is closed.",
    "expert_dispatch": f"How tokens reach experts on other devices: {', '.join(EXPERT_DISPATCHES)}.",
    "num_hosts": "Processes on different machines that are one engine.",
    "host_id": "Number of this one; host 0 serves HTTP.",
    "coordinator": "HOST:PORT of host 0; the next port is used as well.",
    "compare_hosts": "For debugging: check that all hosts compute the same steps.",
    "mesh": "Devices along each axis: data=4,tensor=2 (axes: data, expert, tensor).",
    "dp": "Data parallel groups: axis data of the mesh.",
    "tp": "Devices that share heads, feed-forward width and vocabulary: axis tensor.",
    "ep": "Devices that share the experts: axis expert. Default: all of --dp.",
}

# Field of ServerSettings -> (flag, environment variable or None, help).
SERVER_OPTIONS: dict[str, tuple[str, str | None, str]] = {
    "host": ("--host", None, "Address to listen on."),
    "port": ("--port", None, "Port to listen on; 0: a free one."),
    "served_model_name": ("--served-model-name", None, "Name in the API. Default: MODEL."),
    "tool_call_parser": ("--tool-call-parser", None, "How the model writes tool calls. auto: as its template says."),
    "reasoning_parser": ("--reasoning-parser", None, "How the model reasons: auto, none, qwen3, deepseek_r1, gpt_oss."),
    "api_keys": ("--api-key", "JAXSERVE_API_KEYS", "A key that clients must send, or sha256: and the digest of one; "
                 "may be given several times."),
    "admin_api_key": ("--admin-api-key", "JAXSERVE_ADMIN_API_KEY", "Key of control routes. Default: closed if there "
                      "are other keys, else open."),
    "max_requests_per_minute": ("--max-requests-per-minute", None, "Of one key, or one address without keys; 0: any."),
    "max_requests_at_once": ("--max-requests-at-once", None, "Of one key, or one address without keys; 0: any."),
    "max_in_flight": ("--max-in-flight", None, "Prompts queued or running; more are answered with 503."),
    "max_body_bytes": ("--max-body-bytes", None, "Longest request body."),
    "max_n": ("--max-n", None, "Continuations of one prompt at most."),
    "max_sequences": ("--max-sequences", None, "Prompts x n of one HTTP request at most."),
    "request_timeout_s": ("--request-timeout", None, "Seconds after which a request is given up. Default: never."),
    "max_connections": ("--max-connections", None, "Open connections; more are answered with 503."),
    "header_timeout_s": ("--header-timeout", None, "Seconds in which a request's headers must have come."),
    "body_timeout_s": ("--body-timeout", None, "Seconds in which a body must have come."),
    "write_timeout_s": ("--write-timeout", None, "Seconds in which a client must read its answer."),
    "max_stored_responses": ("--max-stored-responses", None, "Responses kept for later requests."),
    "max_stored_response_bytes": ("--max-stored-response-bytes", None, "Bytes of all of them."),
    "allowed_hosts": ("--allowed-host", None, "Host name that requests may be for, *.NAME or *; may be given several "
                      "times. Default: any; on a loopback address without keys loopback names only."),
    "cors_origins": ("--cors-origin", None, "Origin whose web pages may use the API, or *; repeatable."),
    "ssl_certfile": ("--ssl-certfile", None, "PEM file: serve HTTPS."),
    "ssl_keyfile": ("--ssl-keyfile", None, "PEM file with the key of --ssl-certfile."),
    "log_format": ("--log-format", None, "text, or json: one JSON object a line."),
    "access_log": ("--access-log/--no-access-log", None, "One line in the log for each HTTP request."),
    "otlp_endpoint": ("--otlp-endpoint", None, "OpenTelemetry collector (OTLP over HTTP) for traces."),
    "chat_page": ("--chat-page/--no-chat-page", None, "Serve the chat page at /."),
    "drain_s": ("--drain", None, "Seconds that requests get to finish after SIGTERM."),
    "heartbeat_timeout_s": ("--heartbeat-timeout", None, "Seconds of silence after which an engine is replaced."),
    "max_restarts": ("--max-restarts", None, "An engine lost more often within --restart-window ends the server."),
    "restart_window_s": ("--restart-window", None, "Seconds in which --max-restarts counts."),
    "restart_delay_s": ("--restart-delay", None, "Seconds before the first restart."),
}  # fmt: skip

Command = Callable[..., Any]


def with_engine_options(command: Command) -> Command:
    """Give a command every field of EngineConfig but `model` as an option. It receives `engine`: a dict of those
    that differ from their default, for EngineConfig(model=..., **engine)."""
    parameters = [_engine_parameter(field) for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    defaults = {parameter.name: parameter.default for parameter in parameters}

    def changed(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != defaults[name]}

    return _with_parameters(command, "engine", parameters, changed)


def with_server_options(settings: type) -> Callable[[Command], Command]:
    """Give a command the fields of ServerSettings as options. It receives `server`: a dict for ServerSettings(...).

    settings: that class; it is the caller's to import, as the server stands above this module.
    """
    types = typing.get_type_hints(settings)
    parameters = []
    for field in dataclasses.fields(settings):
        if field.name not in SERVER_OPTIONS:
            continue
        flag, variable, text = SERVER_OPTIONS[field.name]
        is_list = types[field.name] == tuple[str, ...]
        kind = list[str] | None if is_list else types[field.name]
        default = None if is_list else field.default
        option = typer.Option(
            flag, help=text, rich_help_panel="Server", envvar=variable, show_default=default is not None
        )
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )
        )

    def collect(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }

    return lambda command: _with_parameters(command, "server", parameters, collect)


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
