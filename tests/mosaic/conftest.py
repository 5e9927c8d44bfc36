"""Tests of the Mosaic GPU kernels, run in JAX's GPU interpreter on a CPU. They need JAX 0.12 (Python 3.12): where the
main environment is older, `make test` runs this folder in an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

OLD = jax.__version_info__ < (0, 12)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Their imports would fail; the reason is in the report header below.
    return True if OLD and collection_path.name.startswith("test_") else None


def pytest_report_header(config: pytest.Config) -> str:
    return f"tests/mosaic: not collected, they need JAX 0.12 and this is {jax.__version__}" if OLD else ""


if not OLD:
    from jaxserve.pallas_kernels.mosaic.interpreter import compile_once

    compile_once()
