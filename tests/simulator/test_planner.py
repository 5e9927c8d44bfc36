"""The planner: the right configuration wins, and the command says so."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.cli import app
from jaxserve.simulator import workloads
from jaxserve.simulator.devices import DEVICES
from jaxserve.simulator.model_shape import load_shape
from jaxserve.simulator.planner import Candidate, Promise, cheapest, evaluate, grid, pareto
from jaxserve.simulator.plot import pareto_svg
from jaxserve.simulator.step_cost import Parallel
from jaxserve.simulator.workloads import Lengths


def chat_load(rate: float = 4.0, count: int = 40):
    return workloads.unique(count, Lengths(low=500, high=900), Lengths(low=40, high=80), rate=rate)


def outcomes_of(**space):
    base = {"devices": [DEVICES["h100"]], "layouts": [Parallel()], "replicas": [1], "rows": [64], "routes": ["load"]}
    return [evaluate(c, chat_load) for c in grid(load_shape("llama-3.1-8b"), **{**base, **space})]


def test_the_cheapest_that_keeps_the_promise_is_found():
    outcomes = outcomes_of(devices=[DEVICES["l4"], DEVICES["h100"], DEVICES["b200"]], layouts=[Parallel(devices=2)])
    by_name = {outcome.candidate.device.name: outcome for outcome in outcomes}
    itl = {name: outcome.result.gap.mean for name, outcome in by_name.items()}
    assert itl["b200"] < itl["h100"] < itl["l4"]
    assert cheapest(outcomes, Promise()) is by_name["l4"]
    between = (itl["h100"] + itl["l4"]) / 2
    assert cheapest(outcomes, Promise(itl_mean=between)) is by_name["h100"]
    assert cheapest(outcomes, Promise(itl_mean=itl["b200"] / 2)) is None


def test_a_front_holds_exactly_those_that_nobody_beats():
    outcomes = outcomes_of(layouts=[Parallel(devices=n) for n in (1, 2, 4)], rows=[2, 64])
    front = pareto(outcomes)
    for outcome in outcomes:
        is_beaten = any(
            other.rate_per_user >= outcome.rate_per_user
            and other.rate_per_device >= outcome.rate_per_device
            and (other.rate_per_user, other.rate_per_device) != (outcome.rate_per_user, outcome.rate_per_device)
            for other in outcomes
        )
        assert (outcome in front) == (not is_beaten)
    users = [outcome.rate_per_user for outcome in front]
    assert users == sorted(users) and len(users) >= 2  # more devices: faster for one, dearer for all


def test_a_model_that_does_not_fit_is_reported_not_raised():
    outcome = evaluate(Candidate(shape=load_shape("llama-3.1-70b"), device=DEVICES["h100"]), chat_load)
    assert outcome.result is None and "more devices" in outcome.error
    assert cheapest([outcome], Promise()) is None


def test_the_plot_is_an_image_with_every_candidate():
    outcomes = outcomes_of(rows=[4, 16, 64])
    root = ElementTree.fromstring(pareto_svg(outcomes, "a < b"))
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 3


def test_the_command_writes_what_it_says(tmp_path: Path):
    arguments = [
        "plan",
        "llama-3.1-8b",
        "--replicas",
        "1,4",
        "--route",
        "round_robin,cache_aware",
        "--num-requests",
        "60",
    ]
    arguments += ["--num-prefixes", "12", "--rate", "20", "--output-tokens", "16", "--itl-p99", "10"]
    arguments += ["--json", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "plan.svg")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.count("total tok/s") == 3  # one replica needs no second policy
    assert "cheapest that keeps the promise: 1 x tp1 h100" in done.output
    document = json.loads((tmp_path / "plan.json").read_text())
    assert [c["requests"] for c in document["candidates"]] == [60] * 3
    ElementTree.fromstring((tmp_path / "plan.svg").read_text())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workload", "nothing"], "shared-prefix"),
        (["--workload", "trace"], "--trace"),
        (["--device", "z80"], "h100"),
        (["--devices", "0"], "above 0"),
        (["--prefix-tokens", "9:1"], "LOW <= HIGH"),
    ],
)
def test_mistakes_are_named(options: list[str], said: str):
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code != 0 and said in str(done.exception)
