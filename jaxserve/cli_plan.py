"""`jaxserve plan`: what a fleet would do, before there is one. No jax, but for --calibrate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.routing.policy import POLICY_NAMES
from jaxserve.simulator import workloads
from jaxserve.simulator.devices import DEVICES, Device, device_named
from jaxserve.simulator.model_shape import PRESETS, load_shape
from jaxserve.simulator.planner import Outcome, Promise, cheapest, evaluate, grid, pareto
from jaxserve.simulator.plot import pareto_svg
from jaxserve.simulator.step_cost import MeasuredCost, Parallel
from jaxserve.simulator.workloads import Conversation, Lengths

WORKLOADS = ("shared-prefix", "unique", "multi-turn", "agentic", "trace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanWorkload:
    """A workload by name; which options matter depends on it."""

    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "shared-prefix"
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines (timestamp, input_length, output_length, hash_ids).")
    ] = None
    num_requests: Annotated[int, typer.Option(help="Requests, conversations or agents.", min=1)] = 2000
    rate: Annotated[float, typer.Option(help="Arrivals per second; inf: all at once.")] = 20.0
    num_prefixes: Annotated[int, typer.Option(help="Different prefixes, or kinds of agents.", min=1)] = 64
    zipf: Annotated[float, typer.Option(help="0: prefixes equally often; s: the k-th as 1 / k^s.")] = 0.0
    prefix_tokens: Annotated[str, typer.Option(help="Length of a prefix: N or LOW:HIGH.")] = "2048"
    prompt_tokens: Annotated[str, typer.Option(help="A request's own tokens: N or LOW:HIGH.")] = "128"
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer: N or LOW:HIGH.")] = "256"
    num_turns: Annotated[str, typer.Option(help="Turns of a conversation: N or LOW:HIGH.")] = "1:8"
    pause_s: Annotated[float, typer.Option(help="Mean pause between turns.", min=0.0)] = 10.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.", min=0)] = 0

    def make(self) -> Iterable[Conversation]:
        """Raises ValueError for an unknown name or bad lengths."""
        own, output = Lengths.parse(self.prompt_tokens), Lengths.parse(self.output_tokens)
        prefix = Lengths.parse(self.prefix_tokens)
        common: dict[str, Any] = {"rate": self.rate, "seed": self.seed}
        match self.workload:
            case "shared-prefix":
                return workloads.shared_prefix(
                    self.num_requests, self.num_prefixes, prefix, own, output, zipf=self.zipf, **common
                )
            case "unique":
                return workloads.unique(self.num_requests, own, output, **common)
            case "multi-turn":
                turns = Lengths.parse(self.num_turns)
                return workloads.multi_turn(
                    self.num_requests, turns, own, output, system_tokens=prefix.high, pause_s=self.pause_s, **common
                )
            case "agentic":
                return workloads.agentic(
                    self.num_requests, self.num_prefixes, tools_tokens=prefix, observation=own, call=output, **common
                )
            case "trace" if self.trace is not None:
                return workloads.trace(self.trace)
            case "trace":
                raise ValueError("--trace: missing; it names the file of --workload trace")
        raise ValueError(f"workload: got {self.workload!r}; allowed: {', '.join(WORKLOADS)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """Which configurations are tried: all combinations."""

    device: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(DEVICES)}, or JSON files.")] = "h100"
    devices: Annotated[str, typer.Option(help="Devices of one engine, comma-separated.")] = "1"
    attention_ranks: Annotated[str, typer.Option(help="DP attention ranks of one engine, comma-separated.")] = "1"
    replicas: Annotated[str, typer.Option(help="Engines behind the router, comma-separated.")] = "1"
    rows: Annotated[str, typer.Option(help="Requests that an engine runs at once, comma-separated.")] = "256"
    route: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(POLICY_NAMES)}.")] = "cache_aware"
    num_pages: Annotated[int | None, typer.Option(help="Pages of an engine. Default: what memory holds.")] = None
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 64
    step_tokens: Annotated[int, typer.Option(help="Tokens of one step at most.")] = 8192
    weight_bytes: Annotated[float, typer.Option(help="Bytes per weight: 2 bfloat16, 1 fp8 or int8, 0.5 int4.")] = 2.0
    max_in_flight: Annotated[int, typer.Option(help="Clients of a closed loop; 0: all that arrive.")] = 0


def register(app: typer.Typer, with_options_of: Any) -> None:
    """Add the command to the console script."""

    @app.command()
    @with_options_of("space", PlanSpace)
    @with_options_of("asked", PlanWorkload)
    def plan(
        space: PlanSpace,
        asked: PlanWorkload,
        model: Annotated[
            str, typer.Argument(help=f"{', '.join(PRESETS)}, a config.json or a folder with one.")
        ] = "llama-3.1-8b",
        ttft_p99: Annotated[float, typer.Option(help="Promised time to first token, seconds.")] = float("inf"),
        itl_p99: Annotated[float, typer.Option(help="Promised time between tokens, seconds.")] = float("inf"),
        cost_file: Annotated[Path | None, typer.Option(help="Step costs measured by --calibrate.")] = None,
        calibrate: Annotated[
            Path | None, typer.Option(help="Measure MODEL's steps on this machine, write them here, and stop.")
        ] = None,
        json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
        svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the pareto plot to this file.")] = None,
    ) -> None:
        """Simulate a fleet, and find the cheapest configuration that keeps a promise."""
        if calibrate is not None:
            from jaxserve.bench.calibrate import calibrate_to_file

            calibrate_to_file(model, calibrate)
            return
        promise = Promise(ttft_p99=ttft_p99, itl_p99=itl_p99)
        run_plan(model, space, asked, promise, cost_file=cost_file, json_file=json_file, svg_file=svg_file)


def run_plan(
    model: str,
    space: PlanSpace,
    asked: PlanWorkload,
    promise: Promise,
    *,
    cost_file: Path | None,
    json_file: Path | None,
    svg_file: Path | None,
) -> None:
    """Simulate all combinations and report. Raises ValueError for bad options, RuntimeError if none can run."""
    asked.make()  # bad options are an error of the command, not of each candidate
    measured = load_cost(cost_file) if cost_file is not None else None
    layouts = [
        Parallel(devices=count, attention_ranks=ranks)
        for count in _integers("devices", space.devices)
        for ranks in _integers("attention_ranks", space.attention_ranks)
        if count % ranks == 0
    ]
    step_tokens = min(space.step_tokens, measured.buckets[-1]) if measured else space.step_tokens
    candidates = grid(
        load_shape(model, weight_bytes=space.weight_bytes),
        devices=[_device(name) for name in space.device.split(",")],
        layouts=layouts,
        replicas=_integers("replicas", space.replicas),
        rows=_integers("rows", space.rows),
        routes=space.route.split(","),
        num_pages=space.num_pages,
        page_size=space.page_size,
        max_step_tokens=step_tokens,
        max_in_flight=space.max_in_flight,
        measured=measured,
    )
    outcomes = []
    for candidate in candidates:
        outcome = evaluate(candidate, asked.make)
        outcomes.append(outcome)
        typer.echo(describe(outcome))
    if all(outcome.result is None for outcome in outcomes):
        raise RuntimeError(outcomes[0].error if outcomes else "no configuration to try")
    front = [outcome.candidate.label for outcome in pareto(outcomes)]
    best = cheapest(outcomes, promise)
    if len(outcomes) > 1:
        typer.echo("pareto (tok/s per user ascending): " + "; ".join(front))
    if promise != Promise():
        text = f"{best.candidate.label}, {best.candidate.price_per_hour:g} per hour" if best else "none of them"
        typer.echo(f"cheapest that keeps the promise: {text}")
    if json_file is not None:
        document = {
            "model": model,
            "workload": {k: str(v) for k, v in dataclasses.asdict(asked).items()},
            "pareto": front,
            "cheapest": best.candidate.label if best else None,
            "candidates": [
                {"label": o.candidate.label, "error": o.error, **(o.result.figures() if o.result else {})}
                for o in outcomes
            ],
        }
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if svg_file is not None:
        svg_file.write_text(pareto_svg(outcomes, f"{model}, {asked.workload}"))


def describe(outcome: Outcome) -> str:
    """One line for people."""
    if outcome.result is None:
        return f"{outcome.candidate.label}: {outcome.error}"
    f = outcome.result.figures()
    refused = f", {f['refused']} refused" if f["refused"] else ""
    parts = (
        f"{f['total_tok_per_s']:,.0f} total tok/s",
        f"{f['output_tok_per_s']:,.0f} output tok/s ({outcome.rate_per_device:,.0f} per device, "
        f"{outcome.rate_per_user:.1f} per user)",
        f"hits {f['hit_rate']:.1%}",
        f"TTFT mean {f['ttft_mean']:.3f} p99 {f['ttft_p99']:.3f} s",
        f"ITL p50 {1e3 * f['itl_p50']:.1f} p99 {1e3 * f['itl_p99']:.1f} ms",
        f"KV use {f['kv_use']:.0%}",
        f"busiest {f['imbalance']:.2f} x mean",
        f"{outcome.price_per_million:.2f} per million",
    )
    return f"{outcome.candidate.label}: {', '.join(parts)}{refused}"


def load_cost(path: Path) -> MeasuredCost:
    """Raises ValueError if the file is not one that --calibrate wrote."""
    try:
        fields = json.loads(path.read_text())
        return MeasuredCost(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}: not a file of --calibrate: {error}") from error


def _device(name: str) -> Device:
    if name.endswith(".json"):
        try:
            return Device(**json.loads(Path(name).read_text()))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
    return device_named(name)


def _integers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ValueError(f"{name}: got {text!r}; allowed: numbers above 0, comma-separated")
    return values
