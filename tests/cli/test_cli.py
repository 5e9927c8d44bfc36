"""The command as a user runs it: a process, its output, its exit status."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from jaxserve.cli_options import ENGINE_HELP
from jaxserve.config import EngineConfig

COMMANDS = [
    "serve",
    "chat",
    "run",
    "pull",
    "version",
    "bench latency",
    "bench throughput",
    "bench serve",
    "bench prefix",
]


def jaxserve(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxserve.cli", *arguments],
        capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip


def test_help_of_every_command_without_jax() -> None:
    # One process for all: what is imported by --help of any command is what starts slowly.
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom jaxserve.cli import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    result = CliRunner().invoke(app, [*command.split(), '--help'])\n"
        "    assert result.exit_code == 0, (command, result.output)\n"
        "    print(result.output)\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'numba', 'fastapi'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-num-rows" in done.stdout


def test_every_engine_field_is_described() -> None:
    assert ENGINE_HELP.keys() == {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--dtype", "f8"], "dtype: got 'f8'; allowed: auto, float32, bfloat16"),
        (["serve", "--page-size", "3"], "page_size: got 3; allowed: a power of two"),
        (
            ["bench", "throughput", "--workload", "x"],
            "workload: got 'x'; allowed: random, shared-prefix, multi-turn",
        ),
        (["bench", "latency", "--prompt-tokens", "9:3"], "length range: got '9:3'"),
        (["bench", "latency", "--url", "ftp://x"], "url: got 'ftp://x'"),
        (
            ["bench", "latency", "--url", "localhost:1", "--page-size", "16"],
            "--page-size: the engine behind --url",
        ),
        (["bench", "serve", "--url", "localhost:1", "--request-rate", "0"], "request_rate: got 0.0"),
        (["bench", "serve"], "--url: missing"),
    ],
)
def test_mistakes_cost_one_line(arguments: list[str], said: str) -> None:
    done = jaxserve(*arguments)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("jaxserve: ")
    assert said in line
    assert done.stdout == ""


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["--debug", "serve", "--dtype", "f8"], ["serve", "--dtype", "f8", "--debug"]):
        done = jaxserve(*arguments)
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "dtype: got 'f8'" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["serve", "--no-such-option"], ["serve", "--port", "x"], ["run"]]
)
def test_usage_errors(arguments: list[str]) -> None:
    done = jaxserve(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Usage" in done.stderr


def test_version() -> None:
    import jaxserve as package

    done = jaxserve("version")
    assert done.returncode == 0
    assert f"jaxserve {package.__version__}" in done.stdout
