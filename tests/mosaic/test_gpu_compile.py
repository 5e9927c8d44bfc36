"""Machine code of the GPU kernels, compiled for a described H200 without a card, where the CUDA plugin for JAX is
installed. All of them take minutes: `pytest -m slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_cases  # noqa: E402
import gpu_compile  # noqa: E402
import gpu_products  # noqa: E402

# The kernels of attention, of latent attention and of quantised weights.
QUICK = ("Llama-3-8B mixed", "DeepSeek-V3 decode", "product SmolLM2-135M down, int4, scale and offset per 32, 16 rows")


@pytest.mark.parametrize("name", QUICK)
def test_a_kernel_of_each_kind(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [case.name for case in gpu_cases.all_cases()]
    + [f"product {product.name}" for product in gpu_products.all_products()]
    + ["step Llama-3-8B", "step Qwen3-30B-A3B"],
)
def test_compiles_for_h200_without_spills(name):
    check(name)


def check(name: str) -> None:
    if reason := gpu_compile.missing():
        pytest.skip(f"compiling for a described GPU: {reason}")
    command = [sys.executable, str(BENCHMARKS / "gpu_compile.py"), "--target", "h200", "--case", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["problems"] == []


def test_problems_are_found():
    """The checks themselves, on a report that has everything wrong."""
    kernel = {
        "name": "paged_decode", "spill_bytes": 8, "shared_memory": 300000, "instructions": {"LDG": 3},
        "proxy_fences": 0, "register_budget": -128,
    }  # fmt: skip
    report = {"case": "step x", "kernels": [kernel], "aliased": 5, "pool": 10, "temporaries": 100}
    found = gpu_compile.problems(report, ("HGMMA", "UTMALDG"))
    assert len(found) == 8
    fine = kernel | {
        "spill_bytes": 0,
        "shared_memory": 9,
        "instructions": {"HGMMA": 1, "UTMALDG": 1},
        "proxy_fences": 2,
        "register_budget": 0,
    }
    assert gpu_compile.problems(report | {"kernels": [fine], "aliased": 10, "temporaries": 1}, ("HGMMA",)) == []
    assert gpu_compile.problems(report | {"kernels": [], "aliased": 10, "temporaries": 1}, ()) != []


def test_register_budget():
    """Two warpgroups take what the third gives away, and no more."""
    ptx = "setmaxnreg.dec.sync.aligned.u32 \t40;\nsetmaxnreg.inc.sync.aligned.u32 \t{};"
    assert gpu_compile.register_budget(ptx.format(232), 168, 12) == 0
    assert gpu_compile.register_budget(ptx.format(240), 168, 12) < 0
    assert gpu_compile.register_budget("", 71, 8) == 0
