"""The comparison of peers: the common loop, the protocol between processes, the figures and the table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import compare_peers
from benchmarks.peers import protocol

FAKE_PEER = """
import sys
sys.path.insert(0, {folder!r})
import protocol
channel = protocol.take_stdout()
print("a library that prints")  # must not reach the protocol

def run(requests, concurrency, use_prefix_cache):
    if concurrency == 13:
        raise ValueError("unlucky")
    cached = 7 if use_prefix_cache else 0
    return [dict(ttft=0.5, e2e=0.5 + 0.1 * (r["max_tokens"] - 1), num_output=r["max_tokens"], num_cached=cached)
            for r in requests]

protocol.serve(channel, {{"version": "fake"}}, run)
"""


class LoggingEngine:
    """One token per step and request; keeps how many requests were under way."""

    def __init__(self, lost: int = 0) -> None:
        self.live: dict[str, int] = {}
        self.order: list[list[int]] = []
        self.most_live, self.lost = 0, lost

    def add(self, key: str, ids: list[int], max_tokens: int) -> None:
        self.live[key] = max_tokens
        self.order.append(ids)
        self.most_live = max(self.most_live, len(self.live))

    def step(self) -> list[protocol.Progress]:
        progress = []
        for key in list(self.live):
            self.live[key] -= 1
            is_finished = not self.live[key]
            count = 0 if is_finished and self.lost else 1
            progress.append(protocol.Progress(key, count, is_finished, 3))
            if is_finished:
                del self.live[key]
        return progress


def requests(*lengths: int) -> list[dict]:
    return [{"ids": [i, i + 1], "max_tokens": length} for i, length in enumerate(lengths)]


@pytest.mark.parametrize("concurrency", [1, 2, 4, 9])
def test_drive_keeps_the_concurrency(concurrency: int) -> None:
    engine = LoggingEngine()
    asked = requests(3, 1, 5, 2, 2, 4)
    records = protocol.drive(engine, asked, concurrency)
    assert engine.most_live == min(concurrency, 6)
    assert engine.order == [request["ids"] for request in asked]
    assert sorted(record["num_output"] for record in records) == [1, 2, 2, 3, 4, 5]
    assert all(record["num_cached"] == 3 and 0 < record["ttft"] <= record["e2e"] for record in records)


def test_drive_counts_tokens() -> None:
    with pytest.raises(RuntimeError, match="5 output tokens, 6 asked for"):
        protocol.drive(LoggingEngine(lost=1), requests(6), 1)


def test_drive_of_nothing() -> None:
    assert protocol.drive(LoggingEngine(), [], 4) == []


def test_a_peer_is_a_process(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(FAKE_PEER.format(folder=os.path.dirname(protocol.__file__)))
    peer = compare_peers.Peer("fake", [sys.executable, str(script)], {})
    try:
        assert peer.ready == {"version": "fake"}
        measure = compare_peers.MEASURES["shared_prefix_c16"]
        asked = requests(4, 2, 3)
        answer = peer.run(asked, measure)
        assert [record["num_output"] for record in answer["records"]] == [4, 2, 3]
        assert {"own", "others", "steal"} == answer["cpu"].keys()
        figures = compare_peers.read_figures(answer, asked)
        assert figures["cached_tokens"] == 21
        assert figures["total_tok_s"] == pytest.approx(15 / answer["seconds"])
        assert figures["ttft_s"] == pytest.approx(0.5)
        assert figures["decode_tok_s"] == pytest.approx(10.0)
        with pytest.raises(RuntimeError, match="fake: ValueError: unlucky"):
            peer.run(asked, measure._replace(concurrency=13))
        assert peer.run(asked, measure)["records"]  # it survives its own errors
    finally:
        peer.close()


def test_a_peer_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken: ended with status 3"):
        compare_peers.Peer("broken", [sys.executable, "-c", "raise SystemExit(3)"], {})


def test_fresh_requests_share_what_they_shared_and_nothing_else() -> None:
    original = [{"ids": list(range(100)) + [200 + i, 300 + i], "max_tokens": 5} for i in range(3)]
    rounds = [compare_peers.fresh_requests(original, number, 100) for number in range(3)]
    for made in rounds:
        assert {tuple(request["ids"][:100]) for request in made} == {tuple(made[0]["ids"][:100])}
        assert [request["ids"][100:] for request in made] == [request["ids"][100:] for request in original]
        assert [request["max_tokens"] for request in made] == [5] * 3
    assert len({made[0]["ids"][0] for made in rounds} | {0}) == 4  # not even the first token is that of another round
    alone = compare_peers.fresh_requests(original, 0, 0)
    assert [sorted(request["ids"]) for request in alone] == [sorted(request["ids"]) for request in original]
    assert all(a["ids"] != b["ids"] for a, b in zip(alone, original))


def test_no_prompt_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures that share their prompts in the workload, and rounds, would find each other's in a prefix cache."""

    asked: list[tuple[int, ...]] = []

    class Recorder:
        name = "a"

        def run(self, requests: list[dict], measure: compare_peers.Measure) -> dict:
            asked.extend(tuple(request["ids"][:4]) for request in requests)
            return {}

    monkeypatch.setattr(compare_peers, "read_figures", lambda answer, requests: defaultdict(float))
    requests = [{"ids": list(range(40 * i, 40 * i + 40)), "max_tokens": 1} for i in range(3)]
    arguments = argparse.Namespace(measures="mixed_c16,mixed_c32", rounds=2, limit=None)
    compare_peers.measure_all([Recorder()], {"warmup": [], "mixed_64": requests}, arguments)
    assert len(asked) == len(set(asked)) == 12


def test_table_has_ratios_of_rounds() -> None:
    def rounds(figure: str, *values: float) -> list[dict[str, float]]:
        return [{figure: value, "others_cpu": 0.01 * value} for value in values]

    results = {
        "mixed_c16": {"a": rounds("output_tok_s", 10, 30, 20), "b": rounds("output_tok_s", 5, 10, 20)},
        "ttft_512": {"a": rounds("ttft_s", 1, 2, 4), "b": rounds("ttft_s", 2, 3, 4)},
    }
    lines = compare_peers.markdown(results, ["a", "b"]).splitlines()
    assert lines[0] == "| measure | a | b | a : b | others' CPU, largest |"
    # Ratios round by round: 2, 3, 1; the time to first token counts the other way round: 2, 1.5, 1.
    assert lines[2] == "| mixed_c16, output_tok_s | 20 | 10 | 2.00 | 30% |"
    assert lines[3] == "| ttft_512, ttft_s | 2 | 3 | 1.50 | 4% |"


def test_missing_options_are_named() -> None:
    options = argparse.Namespace(threads=1, option=[], gguf="m.gguf", hf=None, vllm_python=None)
    with pytest.raises(SystemExit, match="peer vllm needs --vllm-python"):
        compare_peers.peer_command("vllm", options)
    with pytest.raises(SystemExit, match="unknown peer 'sglang'"):
        compare_peers.peer_command("sglang", options)
    command, _ = compare_peers.peer_command("jaxserve", options)
    assert command[-2:] == ["--model", "m.gguf"]


def test_options_reach_the_server_as_flags() -> None:
    options = argparse.Namespace(threads=1, option=["max_num_rows=8", "overlap=False", "warmup=True"], gguf="m.gguf")
    command, _ = compare_peers.peer_command("jaxserve-http", options)
    assert command[-4:] == ["--max-num-rows", "8", "--no-overlap", "--warmup"]


def test_protocol_lines_are_json(tmp_path: Path) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as channel:
        protocol._send(channel, {"ready": {"text": "two\nlines"}})
    with os.fdopen(read) as lines:
        assert [json.loads(line) for line in lines] == [{"ready": {"text": "two\nlines"}}]
