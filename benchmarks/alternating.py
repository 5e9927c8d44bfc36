"""Variants measured in turn in one run, so that what else the machine does meets all of them alike.

A figure of one variant says little on a shared machine; the ratio of two variants of the same round says more, and
the median of such ratios is what is reported.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.bench import report
from jaxserve.config import DEFAULT_MODEL

Figures = dict[str, float]
Rounds = dict[str, list[Figures]]  # variant -> one entry per round


def make_parser(description: str | None, *, rounds: int = 3) -> argparse.ArgumentParser:
    """--model, --rounds, --dtype and --json: every benchmark has them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path)
    return parser


def run_rounds(variants: Sequence[str], num_rounds: int, measure: Callable[[str, int], Figures]) -> Rounds:
    """measure(variant, round) for every variant in every round; the order turns round by one each time."""
    rounds: Rounds = {variant: [] for variant in variants}
    for number in range(num_rounds):
        shift = number % len(variants)
        for variant in [*variants[shift:], *variants[:shift]]:
            rounds[variant].append(measure(variant, number))
    return rounds


def median_ratio(rounds: Rounds, variant: str, base: str, figure: str) -> float:
    """Median over rounds of figure(variant) / figure(base)."""
    pairs = zip(rounds[variant], rounds[base])
    return statistics.median(mine[figure] / theirs[figure] for mine, theirs in pairs)


def show(
    title: str, measured: Rounds, *, notes: Sequence[str] = (), json_file: Path | None = None, **settings: Any
) -> None:
    """A table of medians (smallest … largest), notes below it, and all rounds as JSON."""
    machine = report.describe_machine()
    console = Console()
    described = ", ".join(f"{name} {value}" for name, value in settings.items())
    console.print(
        f"{machine['processor']}, {machine['cores']} cores · jax {machine['versions']['jax']} · "
        f"{machine['date']} · {described}", style="dim", highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table(title=f"{title} (median, smallest … largest)")
    table.add_column("")
    for variant in measured:
        table.add_column(variant, justify="right")
    for figure in next(iter(measured.values()))[0]:
        table.add_row(figure, *(_cell([run[figure] for run in runs]) for runs in measured.values()))
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    if json_file is not None:
        document = {
            "benchmark": title,
            "machine": machine,
            "settings": settings,
            "rounds": measured,
            "notes": notes,
        }
        report.write_json(json_file, document)


def _cell(values: list[float]) -> str:
    middle = f"{statistics.median(values):.4g}"
    return middle if len(set(values)) == 1 else f"{middle} ({min(values):.4g} … {max(values):.4g})"
