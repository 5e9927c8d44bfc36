"""Replicas as processes: the real command over the server tests' toy engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from jaxserve.server.router.replicas import count_gpus, replica_environment

SERVER_TESTS = Path(__file__).parents[1] / "server"
sys.path.insert(0, str(SERVER_TESTS))
from live import engine_command  # noqa: E402
from toy_model import write_toy_tokenizer  # noqa: E402

RUN = """
import json, sys
from jaxserve.config import EngineConfig
from jaxserve.server.router.app import run_router
from jaxserve.server.router.replicas import ReplicaPlan
from jaxserve.server.router.settings import RouterSettings
from jaxserve.server.settings import ServerSettings
command, count = json.loads(sys.argv[1]), int(sys.argv[2])
plan = ReplicaPlan(EngineConfig(model="toy"), ServerSettings(engine_command=tuple(command)), count)
sys.exit(run_router(RouterSettings(port=0, policy="round_robin", probe_interval_s=0.1, admin_key="a"), plan))
"""


def start(command: tuple[str, ...], count: int) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(command), str(count)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = next(line for line in process.stderr if "router on" in line)
    return process, line.split("router on ")[1].split(" ")[0]


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_replicas_serve_one_is_killed_and_comes_back_and_all_end_together(tmp_path: Path) -> None:
    command = engine_command(write_toy_tokenizer(tmp_path))
    process, url = start(command, 2)
    try:
        with httpx.Client(base_url=url, timeout=30) as http:

            def states() -> list[str]:
                try:
                    answer = http.get("/workers", headers={"Authorization": "Bearer a"})
                except httpx.ConnectError:
                    return []  # the address is taken, but nobody listens yet
                return [worker["state"] for worker in answer.json()["workers"]]

            def ask() -> httpx.Response:
                return http.post("/v1/completions", json={"prompt": "The boats", "max_tokens": 4})

            wait_for(lambda: states() == ["ready"] * 2)
            answers = [ask() for _ in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.headers["x-jaxserve-worker"] for answer in answers}) == 2
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 2
            os.kill(int(children[0]), signal.SIGKILL)
            assert {ask().status_code for _ in range(6)} == {200}
            wait_for(lambda: states() == ["ready"] * 2)
            assert {ask().status_code for _ in range(4)} == {200}
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    finally:
        process.kill()
        process.communicate()


def test_a_replica_that_cannot_start_ends_everything_with_its_message(tmp_path: Path) -> None:
    process, _ = start(engine_command(write_toy_tokenizer(tmp_path), fail="no such model"), 2)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "no such model" in said


@pytest.mark.parametrize(
    ("environment", "num_gpus", "expected"),
    [
        ({}, 0, [None, None]),
        ({}, 4, ["0,1", "2,3"]),
        ({"CUDA_VISIBLE_DEVICES": "5,7"}, 8, ["5", "7"]),
        ({"JAX_PLATFORMS": "cpu"}, 8, [None, None]),
    ],
)
def test_gpus_are_shared_out(environment: dict[str, str], num_gpus: int, expected: list[str | None]) -> None:
    found = [replica_environment(index, 2, environment, num_gpus).get("CUDA_VISIBLE_DEVICES") for index in range(2)]
    assert found == expected


def test_gpus_that_cannot_be_shared_out_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 for 4 GPUs"):
        replica_environment(0, 3, {}, 4)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
