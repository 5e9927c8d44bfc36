"""Replicas as processes: the real command over the server tests' toy engine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from jaxserve.server.router.replicas import count_gpus, plan_replicas, replica_environment
from jaxserve.server.settings import ServerSettings

from jaxserve.config import EngineConfig

SERVER_TESTS = Path(__file__).parents[1] / "server"
sys.path.insert(0, str(SERVER_TESTS))
from live import engine_command  # noqa: E402
from toy_model import write_toy_tokenizer  # noqa: E402

RUN = """
import dataclasses, json, sys
from jaxserve.config import EngineConfig
from jaxserve.server.router.app import run_router
from jaxserve.server.router.replicas import plan_replicas
from jaxserve.server.settings import ServerSettings
given, count = json.loads(sys.argv[1]), int(sys.argv[2])
settings = ServerSettings(port=0, **{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
router, plan = plan_replicas(EngineConfig(model="toy"), settings, count=count, policy="round_robin")
sys.exit(run_router(dataclasses.replace(router, probe_interval_s=0.1), plan))
"""


def start(count: int, **settings: Any) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(settings), str(count)], stderr=subprocess.PIPE, text=True
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
    process, url = start(
        2,
        engine_command=command,
        api_keys=["client-secret"],
        admin_api_key="a",
        cors_origins=["https://x.org"],
        max_n=3,
    )
    try:
        with httpx.Client(base_url=url, timeout=30, headers={"Authorization": "Bearer client-secret"}) as http:

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
            assert not any(b"client-secret" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)
            refused = http.post("/v1/completions", json={"prompt": "The boats", "n": 4, "temperature": 1})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
            preflight = {"Origin": "https://x.org", "Access-Control-Request-Method": "POST", "Authorization": ""}
            allowed = http.options("/v1/completions", headers=preflight)
            assert allowed.headers["access-control-allow-origin"] == "https://x.org"
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


def test_a_servers_options_hold_with_replicas_too(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("-")
    given = ServerSettings(
        host="0.0.0.0", port=81, served_model_name="m", api_keys=("k",), admin_api_key="a", max_n=3, max_in_flight=7,
        max_body_bytes=5000, max_connections=9, request_timeout_s=4.0, chat_page=False, log_format="json",
        allowed_hosts=("h",), cors_origins=("https://x.org",), ssl_certfile=str(pem), ssl_keyfile=str(pem),
        otlp_endpoint="http://o", drain_s=2.0, tool_call_parser="hermes", max_stored_responses=2,
    )  # fmt: skip
    changed = {f.name for f in dataclasses.fields(given) if getattr(given, f.name) != getattr(ServerSettings(), f.name)}
    router, plan = plan_replicas(EngineConfig(model="toy"), given, count=2, policy="load")
    fields, key = json.loads(plan.fields())["settings"], router.worker_key
    assert (fields.pop("host"), fields.pop("port"), fields.pop("admin_api_key")) == ("127.0.0.1", 0, key)
    assert key not in (None, "a", "k") and router.admin_key == "a"
    # Each option that was given holds in the replicas or in the router, and none is lost.
    for name in changed - {"admin_api_key"}:
        wanted = getattr(given, name)
        in_replica = name in fields and fields[name] in (wanted, list(wanted) if isinstance(wanted, tuple) else None)
        assert in_replica or getattr(router, name) == wanted, name
    for name in ("ssl_certfile", "cors_origins", "allowed_hosts"):
        assert not fields[name] and getattr(router, name) == getattr(given, name)
    for name in ("max_requests_per_minute", "max_requests_at_once"):
        with pytest.raises(ValueError, match=name):
            plan_replicas(EngineConfig(model="toy"), ServerSettings(**{name: 5}), count=2, policy="load")


def test_a_replica_that_cannot_start_ends_everything_with_its_message(tmp_path: Path) -> None:
    process, _ = start(2, engine_command=engine_command(write_toy_tokenizer(tmp_path), fail="no such model"))
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
