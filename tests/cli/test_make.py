"""The two commands: what they refuse, and that every dependency is pinned for every supported Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_one_exact_pin(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64",
                   "sys_platform": "linux", "extra": ""}  # fmt: skip
    pinned: dict[str, str] = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in pinned, f"{name} is pinned twice for Python {python}"
            assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), pin
            pinned[name] = str(pin.specifier).removeprefix("==")
    needed = [Requirement(text) for text in project()["dependencies"] + project()["optional-dependencies"]["test"]]
    for requirement in needed:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{name} has no pin for Python {python}"
            assert requirement.specifier.contains(pinned[name], prereleases=True), requirement


def test_jax_is_the_newest_for_its_python() -> None:
    by_python = {}
    for python in ("3.11", "3.12"):
        (pin,) = [p for p in pins() if p.name == "jax" and p.marker.evaluate({"python_version": python})]
        by_python[python] = str(pin.specifier)
    assert by_python["3.11"] == "==0.10.2"  # the last one for Python 3.11
    assert by_python["3.12"].startswith("==0.12")


def test_no_file_names_a_registry() -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", ".ci/run"):
        assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text()), name


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without the flags and variables of a `make test` that runs these tests.
    ours = ("PYTHON", "VENV", "MODEL", "HOST", "PORT", "ARGS", "MFLAGS")
    inherited = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@needs_make
def test_help_names_the_commands() -> None:
    done = make()
    assert done.returncode == 0
    assert "make serve" in done.stdout
    assert "make test" in done.stdout


@needs_make
@pytest.mark.parametrize("target", ["serve", "test"])
def test_an_old_python_is_named(tmp_path: Path, target: str) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo "Python 3.8.1";; *) exit 0;; esac\n')
    old.chmod(0o755)
    done = make(target, f"PYTHON={old}")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.8.1" in done.stderr


@needs_make
def test_a_missing_python_is_named() -> None:
    done = make("serve", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert "Looked for: no-such-python" in done.stderr


@needs_make
def test_each_python_has_its_environment() -> None:
    planned = make("-n", "serve", "PORT=1234", "MODEL=some/model", "ARGS=--dtype float32").stdout
    assert 'jaxserve serve "some/model" --host "127.0.0.1" --port "1234" --dtype float32' in planned
    assert ".venv/bin/jaxserve" in planned
    version = subprocess.run(
        ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True,
        check=True,
    ).stdout.strip()  # fmt: skip
    if version >= "3.11":
        assert f".venv-{version}/bin/python -m pytest" in make("-n", "test", "PYTHON=python3").stdout


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().strip().endswith("exec make test")


def test_every_folder_of_code_is_a_package_that_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = sorted(((folder, name) for name, folder in listed["package-dir"].items()), reverse=True)
    found = set()
    for folder, name in places:
        for path in (ROOT / folder).rglob("*.py"):
            found.add(".".join([name, *path.parent.relative_to(ROOT / folder).parts]))
    assert found == set(listed["packages"])
