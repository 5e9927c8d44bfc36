"""Two processes on loopback are one engine: HTTP through the first, tokens of one process, and the loss of one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import httpx
import numpy as np
import pytest
from mesh_runner import TINY, reference
from tokenizers import Tokenizer, decoders, models

from jaxserve.runner.host_link import SILENT_S

SERVE = [
    "llama", "--dtype", "float32", "--max-num-rows", "2", "--max-step-tokens", "2", "--num-pages", "64",
    "--page-size", "8", "--attention-backend", "reference", "--matmul-backend", "xla", "--num-hosts", "2",
    "--compare-hosts",
]  # fmt: skip
DEADLINE_S = 10.0  # for the error after a host is gone


def model_folder(target: Path) -> Path:
    """The tiny Llama with a tokenizer that writes every id as a word of its own."""
    shutil.copytree(TINY / "llama", target)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(256)}, unk_token="<0>"))
    words.decoder = decoders.Fuse()
    words.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text("{}")
    return target


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now."""
    for first in range(18200, 19000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    one = stack.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


class Group:
    """Host 0 with its HTTP server, and host 1, each under its supervisor."""

    def __init__(self, model: Path, folder: Path, mesh: str) -> None:
        port = free_ports(3)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port + 2}", timeout=60)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        common = [sys.executable, "-m", "jaxserve.cli", "serve", str(model), *SERVE[1:], "--mesh", mesh]
        common += ["--coordinator", f"127.0.0.1:{port}", "--compile-cache-dir", str(folder / "xla")]
        self.logs = [folder / f"host{i}.log" for i in range(2)]
        (folder / "xla").mkdir(mode=0o700)
        own = (["--host", "127.0.0.1", "--port", str(port + 2)], ["--host-id", "1"])
        self.processes = [
            subprocess.Popen([*common, *options], stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment)
            for options, log in zip(own, self.logs)
        ]

    def log(self, host: int) -> str:
        return self.logs[host].read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/ready").status_code == 200:
                    return
            for host, process in enumerate(self.processes):
                assert process.poll() is None, f"host {host} ended:\n{self.log(host)[-3000:]}"
            assert time.monotonic() < deadline, f"not ready:\n{self.log(0)[-2000:]}\n---\n{self.log(1)[-2000:]}"
            time.sleep(0.2)

    def post(self, prompt: np.ndarray, count: int) -> httpx.Response:
        body = {"model": "model", "prompt": prompt.tolist(), "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json=body)

    def complete(self, prompt: np.ndarray, count: int) -> str:
        answer = self.post(prompt, count)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def engine_of(self, host: int) -> int:
        """Process id of what computes there."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.processes[host].pid)], capture_output=True, text=True
        ).stdout.split()
        assert len(found) == 1
        return int(found[0])

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("hosts")
    running = Group(model_folder(folder / "model"), folder, "data=2,tensor=2")
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


@pytest.mark.slow
def test_tokens_of_two_processes_are_those_of_one(group: Group) -> None:
    for prompt, tokens, _ in reference("llama"):
        assert group.complete(prompt, len(tokens)) == "".join(f"<{token}>" for token in tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "host, sent, deadline_s",
    [(1, signal.SIGKILL, DEADLINE_S), (0, signal.SIGKILL, DEADLINE_S), (1, signal.SIGSTOP, SILENT_S + DEADLINE_S)],
)
def test_a_lost_host_is_an_error_soon_and_a_restart_serves_again(
    group: Group, host: int, sent: signal.Signals, deadline_s: float
) -> None:
    """Its process is gone, or the machine hangs, while requests are under way."""
    prompt, tokens, _ = reference("llama")[0]
    lost, other = group.engine_of(host), 1 - host
    length = len(group.log(other))
    with futures.ThreadPoolExecutor(12) as pool:
        running = [pool.submit(group.post, prompt, 200) for _ in range(12)]  # four at a time
        time.sleep(0.5)
        os.kill(lost, sent)
        start = time.monotonic()
        while group.http.get("/ready").status_code == 200:
            assert time.monotonic() - start < deadline_s
            time.sleep(0.05)
        statuses = {answer.result(deadline_s).status_code for answer in running}
        assert 503 in statuses <= {200, 503}
        while f"host {host} (127.0.0.1) was lost" not in group.log(other)[length:]:
            assert time.monotonic() - start < deadline_s
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(lost, signal.SIGCONT)
    group.wait_ready()
    assert group.complete(prompt, len(tokens)) == "".join(f"<{token}>" for token in tokens)
