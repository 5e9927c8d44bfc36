"""Figures from records made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench import report, workloads
from jaxserve.bench.load import RequestRecord
from jaxserve.bench.workloads import LengthRange


def record(start: float, times: list[float], counts: list[int], **fields: int | str) -> RequestRecord:
    made = RequestRecord(num_prompt_tokens=10, start=start, times=times, counts=counts, end=times[-1] if times else 0)
    made.num_output_tokens = sum(counts)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_figures() -> None:
    records = [
        record(0.0, [1.0, 2.0, 4.0], [1, 1, 2], num_cached_tokens=8),
        record(1.0, [1.5, 2.5], [2, 1]),
        record(0.0, [], [], error="status 500: broken"),
    ]
    figures = report.summarize(records, 4.0)
    assert (figures["num_requests"], figures["num_failed"]) == (3, 1)
    assert figures["first_error"] == "status 500: broken"
    assert (figures["num_prompt_tokens"], figures["num_cached_tokens"], figures["num_output_tokens"]) == (20, 8, 7)
    assert figures["output_tok_s"] == pytest.approx(7 / 4)
    assert figures["total_tok_s"] == pytest.approx(27 / 4)
    assert figures["ttft_s"] == pytest.approx({"mean": 0.75, "p50": 0.75, "p99": 0.995})
    assert figures["itl_s"]["mean"] == pytest.approx((1 + 2 + 1) / 3)
    # First request: 3 s for the 3 tokens after the first piece; second: 1 s for 1 token.
    assert figures["tpot_s"]["mean"] == pytest.approx((1.0 + 1.0) / 2)
    assert figures["decode_tok_s"] == pytest.approx(1.0)
    assert figures["e2e_s"]["mean"] == pytest.approx((4.0 + 1.5) / 2)


def test_one_piece_has_no_rate() -> None:
    figures = report.summarize([record(0.0, [1.0], [5])], 1.0)
    assert figures["decode_tok_s"] is None
    assert figures["itl_s"] is None
    assert figures["num_output_tokens"] == 5


def test_nothing_succeeded() -> None:
    figures = report.summarize([record(0.0, [], [], error="no")], 1.0)
    assert figures["ttft_s"] is None
    assert figures["output_tok_s"] == 0.0


def test_document_names_machine_and_survives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = workloads.random_lengths(1, LengthRange(10, 10), LengthRange(3, 3), vocab_size=5000)
    figures = report.summarize([record(0.0, [1.0, 2.0], [1, 2])], 2.0)
    result = report.Result("one", workload, {"concurrency": 1}, figures)
    document = report.report("latency", "m", "in process", [result])
    report.write_json(tmp_path / "new" / "out.json", document)
    loaded = json.loads((tmp_path / "new" / "out.json").read_text())
    assert loaded == document
    assert loaded["results"][0]["workload"]["name"] == "random"
    assert {"date", "processor", "cores", "python", "versions"} <= loaded["machine"].keys()
    report.print_report(document)
    shown = capsys.readouterr().out
    assert "output tok/s" in shown
    assert "1.5" in shown  # 3 tokens in 2 s
