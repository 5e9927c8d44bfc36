"""benchmarks/gpu_kernels.py without a card: its cases and products at tiny sizes, the kernels in the interpreter. All
that it prints is right then but for times and rates."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
from jaxserve.pallas_kernels.mosaic.interpreter import interpreter_params

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_cases
import gpu_kernels
import gpu_products

TINY = {
    "DECODE": gpu_cases.Work(2, 0, 0, 130), "PREFILL": gpu_cases.Work(0, 1, 9, 70),
    "MIXED": gpu_cases.Work(1, 1, 9, 70), "CASCADE": gpu_cases.Work(10, 0, 0, 140, shared=128),
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    for module in (gpu_cases, gpu_products):
        for name in ("paged_attention_mosaic", "mla_attention_mosaic", "quant_matmul_mosaic", "grouped_matmul_mosaic"):
            if hasattr(module, name):
                kernel = functools.partial(getattr(module, name), interpret=interpreter_params())
                monkeypatch.setattr(module, name, kernel)
    for name, work in TINY.items():
        monkeypatch.setattr(gpu_cases, name, work)
    monkeypatch.setattr(gpu_kernels, "seconds", functools.partial(gpu_kernels.seconds, repeats=1, batch=1))


def check(cases: list[gpu_cases.Case], products: list[gpu_products.Product], capsys: pytest.CaptureFixture) -> None:
    copy_rate, product_rate = gpu_kernels.ceilings(2**16, 64)
    results = gpu_kernels.measure_all(cases, products, copy_rate, product_rate)
    assert len(results) == len(cases) + len(products) > 0
    assert [result["case"] for result in results if not result["right"]] == []
    assert all(result["us"] > 0 and result["of_copy"] > 0 for result in results)
    assert capsys.readouterr().out.count(" ok, ") == len(results)


def test_some_of_them(tiny, capsys):
    cases = [case for case in gpu_cases.all_cases() if case.name == "SmolLM2-135M decode"]
    assert "JAX paged_attention (Triton)" in gpu_kernels.baselines(cases[0])
    check(cases, [gpu_products.quantized("tiny", "Q6_K", 3, (256, 256))], capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_of_them(tiny, capsys):
    cases = [case for case in gpu_cases.all_cases() if case.work in TINY.values()]
    products = [gpu_products.quantized("tiny", kind, 33, (256, 256)) for kind in gpu_products.KINDS]
    products.append(gpu_products.experts_product("tiny", 8, 2, (128, 128)))
    check(cases, products, capsys)
