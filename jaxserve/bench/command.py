"""`jaxserve bench`: a workload from options, a target from --url or an engine in this process. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.bench import load, report, workloads
from jaxserve.bench.http import HttpTarget
from jaxserve.bench.workloads import LengthRange, Workload
from jaxserve.cli_options import refuse_engine_options, with_engine_options, with_options_of
from jaxserve.config import DEFAULT_MODEL, EngineConfig

WORKLOADS = ("random", "shared-prefix", "multi-turn")
WARMUP_PROMPT_TOKENS, WARMUP_OUTPUT_TOKENS = 64, 4

bench_app = typer.Typer(
    help="Measure an engine in this process, or any OpenAI-compatible server.", no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help="Model to load here; not with --url.")]
NumRequests = Annotated[int, typer.Option(help="Requests (multi-turn: conversations).", min=1)]
Concurrency = Annotated[int, typer.Option(help="Requests under way at once.", min=1)]
PromptTokens = Annotated[str, typer.Option(help="Prompt length: N, LOW:HIGH or LOW:HIGH:log.")]
OutputTokens = Annotated[str, typer.Option(help="Answer length: N, LOW:HIGH or LOW:HIGH:log.")]
PrefixTokens = Annotated[int, typer.Option(help="Shared tokens before each request's own.", min=1)]
VocabSize = Annotated[int, typer.Option(help="Prompt ids are drawn below this.", min=2)]
WorkloadSeed = Annotated[int, typer.Option(help="Seed of lengths, ids and arrivals.", min=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What is measured, and where the figures go."""

    url: Annotated[str | None, typer.Option(help="Server to measure: http://HOST:PORT.")] = None
    api_key: Annotated[str | None, typer.Option(help="Key for --url.", envvar="JAXSERVE_API_KEY")] = None
    served_model: Annotated[str | None, typer.Option(help="Model name at --url. Default: its first.")] = None
    extensions: Annotated[
        bool, typer.Option(help="Send ignore_eos and return_token_ids, which OpenAI's own API refuses.")
    ] = True
    warmup_requests: Annotated[int, typer.Option(help="Requests before the clock starts.", min=0)] = 4
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A workload by name."""

    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "random"
    num_requests: NumRequests = 64
    prompt_tokens: PromptTokens = "32:512"
    output_tokens: OutputTokens = "16:128"
    prefix_tokens: PrefixTokens = 1024
    num_turns: Annotated[int, typer.Option(help="Turns of a multi-turn chat.", min=1)] = 4
    vocab_size: VocabSize = 30000
    workload_seed: WorkloadSeed = 0

    def make(self) -> Workload:
        """Raises ValueError for an unknown name or bad lengths."""
        prompt, output = LengthRange.parse(self.prompt_tokens), LengthRange.parse(self.output_tokens)
        drawn = {"vocab_size": self.vocab_size, "seed": self.workload_seed}
        if self.workload == "random":
            return workloads.random_lengths(self.num_requests, prompt, output, **drawn)
        if self.workload == "shared-prefix":
            return workloads.shared_prefix(self.num_requests, self.prefix_tokens, prompt, output, **drawn)
        if self.workload == "multi-turn":
            return workloads.multi_turn(self.num_requests, self.num_turns, prompt, output, **drawn)
        raise ValueError(f"workload: got {self.workload!r}; allowed: {', '.join(WORKLOADS)}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One workload to measure: a closed loop of `concurrency` clients, or an open loop at `request_rate`."""

    label: str
    workload: Workload
    vocab_size: int
    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {"concurrency": self.concurrency, "request_rate": self.request_rate}


@bench_app.command()
@with_engine_options
@with_options_of("target", TargetOptions)
def latency(
    engine: dict[str, Any],
    target: TargetOptions,
    model: Model = DEFAULT_MODEL,
    num_requests: NumRequests = 8,
    prompt_tokens: PromptTokens = "128",
    output_tokens: OutputTokens = "128",
    vocab_size: VocabSize = 30000,
    workload_seed: WorkloadSeed = 0,
) -> None:
    """One request at a time: time to first token and tokens per second of a single stream."""
    prompt, output = LengthRange.parse(prompt_tokens), LengthRange.parse(output_tokens)
    workload = workloads.random_lengths(num_requests, prompt, output, vocab_size=vocab_size, seed=workload_seed)
    _measure("latency", target, model, engine, [_Run("one stream", workload, vocab_size, concurrency=1)])


@bench_app.command()
@with_engine_options
@with_options_of("target", TargetOptions)
@with_options_of("asked", WorkloadOptions)
def throughput(
    engine: dict[str, Any],
    target: TargetOptions,
    asked: WorkloadOptions,
    model: Model = DEFAULT_MODEL,
    concurrency: Concurrency = 16,
) -> None:
    """A fixed number of clients, each asking again as soon as it is answered."""
    run = _Run(f"{asked.workload}, {concurrency} at once", asked.make(), asked.vocab_size, concurrency=concurrency)
    _measure("throughput", target, model, engine, [run])


@bench_app.command()
@with_options_of("target", TargetOptions)
@with_options_of("asked", WorkloadOptions)
def serve(
    target: TargetOptions,
    asked: WorkloadOptions,
    request_rate: Annotated[float, typer.Option(help="Requests per second (Poisson); inf: all at once.")] = 2.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests under way.", min=1)] = None,
) -> None:
    """Requests arrive at a rate at --url, whether or not earlier ones are done: what users of a server feel."""
    if target.url is None:
        raise ValueError("--url: missing; this mode measures a server (start one with: jaxserve serve)")
    load.check_rate(request_rate)
    run = _Run(
        f"{asked.workload}, {request_rate:g}/s",
        asked.make(),
        asked.vocab_size,
        concurrency=max_concurrency,
        request_rate=request_rate,
        seed=asked.workload_seed,
    )
    _measure("serve", target, "", {}, [run])


@bench_app.command()
@with_engine_options
@with_options_of("target", TargetOptions)
def prefix(
    engine: dict[str, Any],
    target: TargetOptions,
    model: Model = DEFAULT_MODEL,
    num_requests: NumRequests = 64,
    concurrency: Concurrency = 16,
    prefix_tokens: PrefixTokens = 1024,
    num_groups: Annotated[int, typer.Option(help="Different prefixes.", min=1)] = 1,
    prompt_tokens: PromptTokens = "64",
    output_tokens: OutputTokens = "32",
    vocab_size: VocabSize = 30000,
    workload_seed: WorkloadSeed = 0,
) -> None:
    """The same lengths twice: with every prefix different, and with a common prefix."""
    own, output = LengthRange.parse(prompt_tokens), LengthRange.parse(output_tokens)
    runs = []
    for is_shared in (False, True):
        workload = workloads.shared_prefix(
            num_requests,
            prefix_tokens,
            own,
            output,
            vocab_size=vocab_size,
            seed=workload_seed,
            num_groups=num_groups,
            is_shared=is_shared,
        )
        runs.append(_Run(workload.name, workload, vocab_size, concurrency=concurrency))
    _measure("prefix", target, model, engine, runs)


def _measure(mode: str, options: TargetOptions, model: str, engine: dict[str, Any], runs: list[_Run]) -> None:
    """Open the target, warm it, run, report. Raises RuntimeError if any request failed, after the report."""
    if options.url is None:
        config = EngineConfig(model=model, **engine)
        results = asyncio.run(_measure_in_process(config, options, runs))
        document = report.report(mode, model, "in process", results)
    else:
        refuse_engine_options(engine)
        target = HttpTarget(
            options.url,
            model=options.served_model,
            api_key=options.api_key,
            use_extensions=options.extensions,
        )
        results = asyncio.run(_measure_url(target, options, runs))
        document = report.report(mode, target.model, target.url, results)
    if options.json_file is not None:
        report.write_json(options.json_file, document)
    report.print_report(document)
    failed = [result.figures for result in results if result.figures["num_failed"]]
    if failed:
        raise RuntimeError(f"{sum(f['num_failed'] for f in failed)} requests failed: {failed[0]['first_error']}")


async def _measure_url(target: HttpTarget, options: TargetOptions, runs: list[_Run]) -> list[report.Result]:
    await target.connect()
    return [await _run(target, options, run) for run in runs]


async def _measure_in_process(config: EngineConfig, options: TargetOptions, runs: list[_Run]) -> list[report.Result]:
    # Imports jax: only when a model is loaded here.
    from jaxserve.bench.in_process import InProcessTarget

    with InProcessTarget(config) as target:
        return [await _run(target, options, run) for run in runs]


async def _run(target: load.Target, options: TargetOptions, run: _Run) -> report.Result:
    for i in range(options.warmup_requests):
        # A seed that no workload has, so that nothing measured is already cached.
        ids = workloads.TokenSource((1 << 31, i), run.vocab_size).ids(WARMUP_PROMPT_TOKENS)
        record = await target.complete(ids, WARMUP_OUTPUT_TOKENS)
        if record.error is not None:
            raise RuntimeError(f"a warm-up request failed: {record.error}")
    if run.request_rate is None:
        records, seconds = await load.run_closed_loop(target, run.workload, run.concurrency)
    else:
        records, seconds = await load.run_open_loop(
            target, run.workload, run.request_rate, seed=run.seed, max_concurrency=run.concurrency
        )
    return report.Result(run.label, run.workload, run.settings, report.summarize(records, seconds))
