"""Request records to figures, to JSON and to a table. No jax."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.load import RequestRecord
from jaxserve.bench.workloads import Workload

LATENCIES = (("ttft_s", "time to first token"), ("itl_s", "between tokens"), ("tpot_s", "per token, mean"),
             ("e2e_s", "whole request"))  # fmt: skip
_VERSIONED = ("jaxserve", "jax", "jaxlib", "numpy", "numba")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One measured run.

    figures   plain numbers and, for each latency, {"mean", "p50", "p99"} in seconds; None where nothing was timed
    """

    label: str
    workload: Workload
    settings: dict[str, Any]
    figures: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        workload = {"name": self.workload.name, **self.workload.parameters}
        return {"label": self.label, "workload": workload, "settings": self.settings, "figures": self.figures}


def summarize(records: Sequence[RequestRecord], seconds: float) -> dict[str, Any]:
    """Figures of one run: rates count finished requests only, over the whole time taken.

    itl is taken between pieces of the stream (a piece may hold several tokens); tpot per token of a request.
    """
    done = [record for record in records if record.error is None]
    num_prompt = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)
    tpots = [record.tpot for record in done if record.tpot is not None]
    figures: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": len(records) - len(done),
        "first_error": next((record.error for record in records if record.error is not None), None),
        "seconds": seconds,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": sum(record.num_cached_tokens for record in done),
        "num_output_tokens": num_output,
        "requests_per_s": len(done) / seconds if seconds > 0 else 0.0,
        "output_tok_s": num_output / seconds if seconds > 0 else 0.0,
        "total_tok_s": (num_prompt + num_output) / seconds if seconds > 0 else 0.0,
        "decode_tok_s": 1.0 / float(np.mean(tpots)) if tpots and np.mean(tpots) > 0 else None,
        "ttft_s": spread([record.ttft for record in done]),
        "itl_s": spread([gap for record in done for gap in record.gaps]),
        "tpot_s": spread(tpots),
        "e2e_s": spread([record.e2e for record in done]),
    }
    return figures


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile; None of nothing."""
    if not len(values):
        return None
    p50, p99 = np.percentile(np.asarray(values, np.float64), [50, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99)}


def describe_machine() -> dict[str, Any]:
    """What a figure depends on besides the code: processor, cores, memory, system, versions, date (UTC)."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONED},
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(mode: str, model: str | None, target: str, results: Iterable[Result]) -> dict[str, Any]:
    """The JSON document of a benchmark: machine and model first, then every run."""
    return {
        "benchmark": mode,
        "model": model,
        "target": target,
        "machine": describe_machine(),
        "results": [result.to_json() for result in results],
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def print_report(document: dict[str, Any]) -> None:
    """Rates in one table, latencies in another; one column per run."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    machine = document["machine"]
    console.print(
        f"{document['model']} · {document['target']} · {machine['processor']}, {machine['cores']} cores · "
        f"jaxserve {machine['versions']['jaxserve']}, jax {machine['versions']['jax']} · {machine['date']}",
        style="dim", highlight=False,
    )  # fmt: skip
    table = Table(title=f"jaxserve bench {document['benchmark']}")
    table.add_column("")
    for result in document["results"]:
        table.add_column(result["label"], justify="right")
    for name, cells in _rows(document["results"]):
        table.add_row(name, *cells)
    console.print(table)
    for result in document["results"]:
        if result["figures"]["num_failed"]:
            console.print(f"{result['label']}: first error: {result['figures']['first_error']}", style="red")


def _rows(results: list[dict[str, Any]]) -> Iterable[tuple[str, list[str]]]:
    figures = [result["figures"] for result in results]

    def row(key: str, form: str) -> list[str]:
        return ["–" if f[key] is None else format(f[key], form) for f in figures]

    yield "requests (failed)", [f"{f['num_requests']} ({f['num_failed']})" for f in figures]
    yield "seconds", row("seconds", ".2f")
    yield "prompt tokens", row("num_prompt_tokens", "d")
    yield "of them cached", row("num_cached_tokens", "d")
    yield "output tokens", row("num_output_tokens", "d")
    yield "requests/s", row("requests_per_s", ".2f")
    yield "output tok/s", row("output_tok_s", ".1f")
    yield "total tok/s", row("total_tok_s", ".1f")
    yield "decode tok/s, one stream", row("decode_tok_s", ".1f")
    for key, name in LATENCIES:
        cells = ["–" if f[key] is None else " / ".join(f"{f[key][s] * 1e3:.1f}" for s in ("mean", "p50", "p99"))
                 for f in figures]  # fmt: skip
        yield f"{name}, ms (mean / p50 / p99)", cells
