"""One compiled tiny model for all tests of the engine over a device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runner"))

from tiny_runner_model import build_runner

from jaxserve.runner.runner import ModelRunner


@pytest.fixture(scope="session")
def runner() -> Iterator[ModelRunner]:
    runner = build_runner()
    yield runner
    runner.close()
