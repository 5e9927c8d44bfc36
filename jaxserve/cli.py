"""The `jaxserve` command. Starts without jax: each command imports what it runs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import jaxserve
from jaxserve import cli_plan
from jaxserve.bench.command import bench_app
from jaxserve.cli_fleet import RoutingOptions, deploy_ray, run_router_command, serve_replicas
from jaxserve.cli_options import refuse_engine_options, with_engine_options, with_options_of, with_server_options
from jaxserve.config import DEFAULT_MODEL, EngineConfig
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.settings import ServerSettings

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

app = typer.Typer(
    name="jaxserve",
    help="Serve language models compiled by JAX/XLA.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(bench_app, name="bench")
cli_plan.register(app, with_options_of)

ModelArgument = Annotated[
    str, typer.Argument(help="A name (see: jaxserve pull --list), a Hugging Face id, a folder or a GGUF file.")
]
UrlOption = Annotated[
    str | None, typer.Option(help="Talk to this OpenAI-compatible server instead of loading a model here.")
]
ApiKeyOption = Annotated[str | None, typer.Option(help="Key for --url.", envvar="JAXSERVE_API_KEY")]


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere in a command).")
    ] = False,
) -> None:
    """Serve language models compiled by JAX/XLA."""


@app.command()
@with_engine_options
@with_server_options(ServerSettings)
def serve(
    engine: dict[str, Any],
    server: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
    replicas: Annotated[int, typer.Option(help="Engines to run, behind a router.", min=1)] = 1,
    route: Annotated[str, typer.Option(help="With --replicas, which engine gets a request (see: router).")] = (
        "cache_aware"
    ),
) -> None:
    """Serve MODEL over HTTP: OpenAI's API below /v1, a chat page at /."""
    config = EngineConfig(model=model, **engine)
    if config.host_id:
        from jaxserve.host_process import supervise

        raise typer.Exit(supervise(config))
    if replicas > 1:
        raise typer.Exit(serve_replicas(config, server, count=replicas, policy=route))
    from jaxserve.server.app import run_server

    raise typer.Exit(run_server(config, ServerSettings(**server)))


@app.command("run-batch")
@with_engine_options
def run_batch(
    engine: dict[str, Any],
    file: Annotated[Path, typer.Argument(help="Requests, one JSON object a line, as OpenAI's batch API takes them.")],
    model: Annotated[str, typer.Option(help="Model that answers.")] = DEFAULT_MODEL,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: standard output.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the requests. Default: MODEL.")] = None,
) -> None:
    """Answer a file of requests and leave: no port is opened, answers come in the order of the file."""
    from jaxserve.server.batch_file import run_file

    config = EngineConfig(model=model, **engine)
    raise typer.Exit(run_file(config, ServerSettings(served_model_name=served_model_name), file, output))


@app.command()
@with_options_of("routing", RoutingOptions)
def router(
    routing: RoutingOptions,
    workers: Annotated[
        list[str] | None, typer.Option("--workers", help="Address of a worker (http://HOST:PORT); several times.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = DEFAULT_PORT,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send; passed on to workers.")
    ] = None,
    worker_key: Annotated[
        str | None,
        typer.Option(
            help="Key for the router's own questions to workers: their admin key.", envvar="JAXSERVE_WORKER_KEY"
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may be for (see: serve).")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose web pages may use the API, or *; repeatable.")
    ] = None,
) -> None:
    """Serve many servers as one: requests go where their prefix is cached, unless load is out of balance."""
    status = run_router_command(
        routing, workers=workers or [], host=host, port=port, api_keys=api_key or [], worker_key=worker_key,
        allowed_hosts=allowed_host or [], cors_origins=cors_origin or [],
    )  # fmt: skip
    raise typer.Exit(status)


deploy_app = typer.Typer(help="Run on a cluster.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")


@deploy_app.callback()
def _deploy() -> None:
    """Run on a cluster."""


@deploy_app.command()
def ray(config: Annotated[Path, typer.Argument(help="YAML: models, replicas, autoscaling (docs/router.md).")]) -> None:
    """Serve models on Ray Serve: engines as replicas, our routing policy, one OpenAI ingress. Extra: jaxserve[ray]."""
    deploy_ray(config)


@app.command()
def tune(
    folder: Annotated[Path, typer.Argument(help="Where the file goes; name it in JAXSERVE_TUNED to use it.")],
) -> None:
    """Time block sizes of the GPU kernels on the card at hand and write them to FOLDER."""
    from jaxserve.pallas_kernels.tuning import tune as search

    print(search(folder))


@app.command()
@with_engine_options
def chat(
    engine: dict[str, Any],
    model: ModelArgument = DEFAULT_MODEL,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 0.95,
) -> None:
    """Chat in the terminal. With --url, MODEL is not loaded; the server's own is used."""
    from jaxserve import terminal_chat

    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    if url is None:
        opened = terminal_chat.local_backend(EngineConfig(model=model, **engine), params)
    else:
        refuse_engine_options(engine)
        options = {"temperature": temperature, "top_p": top_p}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        opened = terminal_chat.http_backend(url, api_key=api_key, options=options)
    with opened as backend:
        terminal_chat.run_chat(backend, system=system)


@app.command()
@with_engine_options
def run(
    engine: dict[str, Any],
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Longest continuation in tokens.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 1.0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
) -> None:
    """Answer one prompt and leave; the text is written as it is made."""
    from jaxserve import terminal_chat

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    config = EngineConfig(model=model, **engine)
    for piece in terminal_chat.answer_once(config, text, params, is_raw=raw):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
def pull(
    name: Annotated[str | None, typer.Argument(help="A known name or a Hugging Face id.")] = None,
    list_known: Annotated[bool, typer.Option("--list", help="List the names that need no account.")] = False,
) -> None:
    """Fetch a model into the cache and print where it lies."""
    from jaxserve import hub

    if list_known or name is None:
        for known in hub.known_models():
            typer.echo(known)
        return
    typer.echo(_location(hub.resolve_model(name)))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="What `serve` takes: a name, an id, a folder, a file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")],
    dtype: Annotated[str, typer.Option(help="Type of the weights: bfloat16, float32.")] = "bfloat16",
    check_weights: Annotated[bool, typer.Option(help="Refuse checkpoints that hold NaN or infinity.")] = False,
) -> None:
    """Write a checkpoint in the serving layout: Orbax arrays, with configuration, tokenizer and templates."""
    from jaxserve import hub
    from jaxserve.models.convert import convert as convert_checkpoint
    from jaxserve.progress import LoadingProgress

    with LoadingProgress(is_shown=True) as bar:
        convert_checkpoint(
            hub.resolve_model(source), target, dtype=dtype, check_weights=check_weights, progress=bar
        )  # fmt: skip
    typer.echo(target)


def _location(resolved: Any) -> Path:
    return Path(getattr(resolved, "path", resolved))


@app.command()
def version() -> None:
    """Print the versions of jaxserve, Python and JAX."""
    from jaxserve.bench.report import describe_machine

    machine = describe_machine()
    typer.echo(f"jaxserve {jaxserve.__version__}")
    typer.echo(f"python {machine['python']}")
    for name in ("jax", "jaxlib"):
        typer.echo(f"{name} {machine['versions'][name] or 'not installed'}")


def main() -> None:
    """Entry point: a mistake costs one line on standard error and exit status 1, never a traceback."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    is_debug = "--debug" in arguments[:end]
    arguments = [a for i, a in enumerate(arguments) if not (a == "--debug" and i < end)]
    try:
        app(args=arguments, prog_name="jaxserve")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if is_debug:
            raise
        print(f"jaxserve: {describe_error(error)}", file=sys.stderr)
        sys.exit(1)


def describe_error(error: Exception) -> str:
    """One line. Errors about what the user gave say so themselves; of others the type is named as well."""
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        return f"{text}. Is the installation complete?"
    if isinstance(error, ValueError | OSError | RuntimeError) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"


if __name__ == "__main__":
    main()
