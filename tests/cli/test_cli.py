"""The command as a user runs it: its output and its exit status."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

import jaxserve as package
from jaxserve import cli
from jaxserve.cli_options import ENGINE_HELP
from jaxserve.config import EngineConfig

COMMANDS = [
    "serve",
    "chat",
    "run",
    "pull",
    "convert",
    "version",
    "bench latency",
    "bench throughput",
    "bench serve",
    "bench prefix",
]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def jaxserve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process: a new one for each case would cost more than all cases together."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["jaxserve", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capfd.readouterr()
        return Done(int(str(code)), out, err)

    return run


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
def test_mistakes_cost_one_line(jaxserve: Callable[..., Done], arguments: list[str], said: str) -> None:
    done = jaxserve(*arguments)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("jaxserve: ")
    assert said in line
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["--debug", "serve", "--dtype", "f8"], ["serve", "--dtype", "f8", "--debug"]])
def test_debug_lets_the_error_through_wherever_it_stands(jaxserve: Callable[..., Done], arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="dtype: got 'f8'"):
        jaxserve(*arguments)


def test_debug_after_two_dashes_is_an_argument(jaxserve: Callable[..., Done]) -> None:
    done = jaxserve("run", "--dtype", "f8", "model", "--", "--debug")
    assert done.returncode == 1
    assert "dtype: got 'f8'" in done.stderr


@pytest.mark.parametrize("arguments", [["nonsense"], ["serve", "--no-such-option"], ["serve", "--port", "x"], ["run"]])
def test_usage_errors(jaxserve: Callable[..., Done], arguments: list[str]) -> None:
    done = jaxserve(*arguments)
    assert done.returncode == 2
    assert "Usage" in done.stderr


def test_version_as_a_process() -> None:
    command = [sys.executable, "-m", "jaxserve.cli", "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert f"jaxserve {package.__version__}" in done.stdout


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("n: got 0;\n allowed: 1"), "n: got 0; allowed: 1"),
        (
            FileNotFoundError(2, "No such file or directory", "x.gguf"),
            "[Errno 2] No such file or directory: 'x.gguf'",
        ),
        (KeyError("layers"), "KeyError: 'layers' (--debug shows where)"),
        (RuntimeError(), "RuntimeError (--debug shows where)"),
    ],
)
def test_errors_are_one_line(error: Exception, said: str) -> None:
    assert cli.describe_error(error) == said
