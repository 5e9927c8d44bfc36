"""`jaxserve bench`: workloads from options, a target from --url or an engine in this process. No jax."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.bench import load, report, workloads
from jaxserve.bench.http import HttpTarget
from jaxserve.bench.workloads import LengthRange, Workload
from jaxserve.cli_options import with_engine_options
from jaxserve.config import DEFAULT_MODEL, EngineConfig

WORKLOADS = ("random", "shared-prefix", "multi-turn")

bench_app = typer.Typer(
    help="Measure an engine in this process, or any OpenAI-compatible server.", no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help="Model to load here; ignored with --url.")]
Url = Annotated[str | None, typer.Option(help="Server to measure: http://HOST:PORT.")]
ApiKey = Annotated[str | None, typer.Option(help="Key for --url.", envvar="OPENAI_API_KEY")]
ServedModel = Annotated[str | None, typer.Option(help="Model name to ask --url for. Default: its first.")]
Extensions = Annotated[
    bool,
    typer.Option(
        "--extensions/--no-extensions", help="Send ignore_eos and return_token_ids (vLLM, SGLang, jaxserve)."
    ),
]
VocabSize = Annotated[int, typer.Option(help="Prompt ids are drawn below this.", min=2)]
Seed = Annotated[int, typer.Option("--workload-seed", help="Seed of the workload.", min=0)]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Warmups = Annotated[int, typer.Option(help="Requests before the clock starts.", min=0)]
NumRequests = Annotated[int, typer.Option(help="Requests (conversations of multi-turn).", min=1)]
Concurrency = Annotated[int, typer.Option(help="Requests under way at once.", min=1)]
PromptTokens = Annotated[str, typer.Option(help="Prompt length: N or LOW:HIGH.")]
OutputTokens = Annotated[str, typer.Option(help="Answer length: N or LOW:HIGH.")]
PrefixTokens = Annotated[int, typer.Option(help="Shared tokens before each request's own.", min=1)]


@bench_app.command()
@with_engine_options
def latency(
    engine: dict[str, Any], model: Model = DEFAULT_MODEL, url: Url = None, api_key: ApiKey = None,
    served_model: ServedModel = None, extensions: Extensions = True, num_requests: NumRequests = 8,
    prompt_tokens: PromptTokens = "128", output_tokens: OutputTokens = "128", vocab_size: VocabSize = 30000,
    workload_seed: Seed = 0, warmup_requests: Warmups = 2, json_file: Json = None,
) -> None:  # fmt: skip
    """One request at a time: time to first token and tokens per second of a single stream."""
    prompt, output = LengthRange.parse(prompt_tokens), LengthRange.parse(output_tokens)
    workload = workloads.random_lengths(num_requests, prompt, output, vocab_size=vocab_size, seed=workload_seed)
    session = _Session(
        "latency", model, url, api_key, served_model, extensions, engine, warmup_requests, vocab_size
    )
    session.measure([("one stream", workload, {"concurrency": 1})], json_file)


@bench_app.command()
@with_engine_options
def throughput(
    engine: dict[str, Any], model: Model = DEFAULT_MODEL, url: Url = None, api_key: ApiKey = None,
    served_model: ServedModel = None, extensions: Extensions = True,
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "random",
    num_requests: NumRequests = 64, concurrency: Concurrency = 16, prompt_tokens: PromptTokens = "32:512",
    output_tokens: OutputTokens = "16:128", prefix_tokens: PrefixTokens = 1024,
    num_turns: Annotated[int, typer.Option(help="Turns of a multi-turn chat.", min=1)] = 4,
    vocab_size: VocabSize = 30000, workload_seed: Seed = 0, warmup_requests: Warmups = 4, json_file: Json = None,
) -> None:  # fmt: skip
    """A fixed number of clients, each asking again as soon as it is answered."""
    made = _make_workload(workload, num_requests, prompt_tokens, output_tokens, prefix_tokens, num_turns, vocab_size,
                          workload_seed)  # fmt: skip
    session = _Session(
        "throughput", model, url, api_key, served_model, extensions, engine, warmup_requests, vocab_size
    )
    session.measure([(made.name, made, {"concurrency": concurrency})], json_file)


@bench_app.command()
def serve(
    url: Annotated[str, typer.Option(help="Server to measure: http://HOST:PORT.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None, served_model: ServedModel = None, extensions: Extensions = True,
    request_rate: Annotated[float, typer.Option(help="Requests per second (Poisson); inf: all at once.")] = 2.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests under way.", min=1)] = None,
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "random",
    num_requests: NumRequests = 64, prompt_tokens: PromptTokens = "32:512", output_tokens: OutputTokens = "16:128",
    prefix_tokens: PrefixTokens = 1024,
    num_turns: Annotated[int, typer.Option(help="Turns of a multi-turn chat.", min=1)] = 4,
    vocab_size: VocabSize = 30000, workload_seed: Seed = 0, warmup_requests: Warmups = 4, json_file: Json = None,
) -> None:  # fmt: skip
    """Requests arrive at a rate, whether or not earlier ones are done: what users of a server feel."""
    made = _make_workload(workload, num_requests, prompt_tokens, output_tokens, prefix_tokens, num_turns, vocab_size,
                          workload_seed)  # fmt: skip
    load.arrival_times(1, request_rate, 0)  # refuses a bad rate before anything is sent
    session = _Session("serve", "", url, api_key, served_model, extensions, {}, warmup_requests, vocab_size)
    settings = {"request_rate": request_rate, "max_concurrency": max_concurrency}
    session.measure([(f"{request_rate:g} requests/s", made, settings)], json_file)


@bench_app.command()
@with_engine_options
def prefix(
    engine: dict[str, Any], model: Model = DEFAULT_MODEL, url: Url = None, api_key: ApiKey = None,
    served_model: ServedModel = None, extensions: Extensions = True, num_requests: NumRequests = 64,
    concurrency: Concurrency = 16, prefix_tokens: PrefixTokens = 1024, prompt_tokens: PromptTokens = "64",
    output_tokens: OutputTokens = "32",
    num_groups: Annotated[int, typer.Option(help="Different prefixes.", min=1)] = 1,
    vocab_size: VocabSize = 30000, workload_seed: Seed = 0, warmup_requests: Warmups = 4, json_file: Json = None,
) -> None:  # fmt: skip
    """The same lengths twice: with a common prefix, and with every prefix different."""
    own, output = LengthRange.parse(prompt_tokens), LengthRange.parse(output_tokens)
    runs = []
    for is_shared in (False, True):
        workload = workloads.shared_prefix(
            num_requests, prefix_tokens, own, output, vocab_size=vocab_size, seed=workload_seed,
            num_groups=num_groups, is_shared=is_shared,
        )  # fmt: skip
        runs.append((workload.name, workload, {"concurrency": concurrency}))
    session = _Session(
        "prefix", model, url, api_key, served_model, extensions, engine, warmup_requests, vocab_size
    )
    session.measure(runs, json_file)


def _make_workload(
    name: str, num_requests: int, prompt: str, output: str, prefix_tokens: int, num_turns: int, vocab_size: int,
    seed: int,
) -> Workload:  # fmt: skip
    asked, answered = LengthRange.parse(prompt), LengthRange.parse(output)
    if name == "random":
        return workloads.random_lengths(num_requests, asked, answered, vocab_size=vocab_size, seed=seed)
    if name == "shared-prefix":
        return workloads.shared_prefix(
            num_requests, prefix_tokens, asked, answered, vocab_size=vocab_size, seed=seed
        )  # fmt: skip
    if name == "multi-turn":
        return workloads.multi_turn(num_requests, num_turns, asked, answered, vocab_size=vocab_size, seed=seed)
    raise ValueError(f"workload: got {name!r}; allowed: {', '.join(WORKLOADS)}")


class _Session:
    """One target, opened, warmed and measured; then the report. Raises ValueError if nothing succeeded."""

    def __init__(
        self, mode: str, model: str, url: str | None, api_key: str | None, served_model: str | None,
        extensions: bool, engine: dict[str, Any], num_warmups: int, vocab_size: int,
    ) -> None:  # fmt: skip
        self._mode = mode
        self._num_warmups = num_warmups
        self._vocab_size = vocab_size
        self._config = None if url is not None else EngineConfig(model=model, **engine)
        self._http = None
        if url is not None:
            if engine:
                raise ValueError(
                    f"--{next(iter(engine)).replace('_', '-')}: the engine behind --url has its own options"
                )
            self._http = HttpTarget(url, model=served_model, api_key=api_key, use_extensions=extensions)

    def measure(self, runs: list[tuple[str, Workload, dict[str, Any]]], json_file: Path | None) -> None:
        """runs: (label, workload, settings); settings with request_rate run as an open loop."""
        results = asyncio.run(self._measure(runs))
        if self._http is not None:
            model, target = self._http.model, self._http.url
        else:
            model, target = self._config.model, "in process"
        document = report.report(self._mode, model, target, results)
        if json_file is not None:
            report.write_json(json_file, document)
        report.print_report(document)
        failed = sum(result.figures["num_failed"] for result in results)
        if failed:
            raise RuntimeError(f"{failed} requests failed; the first: {results[0].figures['first_error']}")

    async def _measure(self, runs: list[tuple[str, Workload, dict[str, Any]]]) -> list[report.Result]:
        if self._http is not None:
            await self._http.connect()
            return [await self._run(self._http, *run) for run in runs]
        # Imports jax: only when a model is loaded here.
        from jaxserve.bench.in_process import InProcessTarget

        with InProcessTarget(self._config) as target:
            return [await self._run(target, *run) for run in runs]

    async def _run(
        self, target: load.Target, label: str, workload: Workload, settings: dict[str, Any]
    ) -> report.Result:
        for i in range(self._num_warmups):
            # Other ids than any workload's, so that nothing measured is already cached.
            ids = workloads.TokenSource((1 << 31, i), self._vocab_size).ids(64)
            record = await target.complete(ids, 4)
            if record.error is not None:
                raise RuntimeError(f"the warm-up request failed: {record.error}")
        if "request_rate" in settings:
            records, seconds = await load.run_open_loop(
                target, workload, settings["request_rate"], max_concurrency=settings["max_concurrency"]
            )
        else:
            records, seconds = await load.run_closed_loop(target, workload, settings["concurrency"])
        return report.Result(label, workload, settings, report.summarize(records, seconds))
