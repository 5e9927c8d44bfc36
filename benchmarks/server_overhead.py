"""The HTTP server beside the engine alone: the same requests, as many under way, in turn.

    python benchmarks/server_overhead.py [--requests 64] [--streams 16] [--rounds 3] [--json out.json]

Starts `jaxserve serve` in a process of its own and an engine in this one; the one that is not measured waits idle.
Over HTTP every token is an event of a stream, and the load generator runs on the same cores as the server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import alternating

from jaxserve.bench import load, report, workloads
from jaxserve.bench.http import HttpError, HttpTarget
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange
from jaxserve.config import EngineConfig

START_TIMEOUT_S = 600.0


def start_server(port: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jaxserve.cli", "serve", *arguments, "--port", str(port)]
    return subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)


def stop_server(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_ready(target: HttpTarget, server: subprocess.Popen[bytes]) -> None:
    """Until a token comes back. Raises RuntimeError if the server ends, or takes START_TIMEOUT_S."""

    async def ask() -> bool:
        try:
            await target.connect()
            return (await target.complete([1000, 1001], 1)).error is None
        except HttpError:
            return False

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        if asyncio.run(ask()):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:g} s")


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", default="32:512")
    parser.add_argument("--output-tokens", default="16:128")
    parser.add_argument("--port", type=int, default=8103)
    options = parser.parse_args()
    prompt, output = LengthRange.parse(options.prompt_tokens), LengthRange.parse(options.output_tokens)
    fields = {
        "dtype": options.dtype,
        "max_num_rows": options.streams,
        "max_model_len": prompt.high + output.high,
    }
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    server = start_server(options.port, [options.model, *flags])
    try:
        over_http = HttpTarget(f"http://127.0.0.1:{options.port}")
        wait_until_ready(over_http, server)
        with InProcessTarget(EngineConfig(model=options.model, **fields)) as in_process:
            targets: dict[str, load.Target] = {"over HTTP": over_http, "in process": in_process}

            def measure(name: str, number: int) -> alternating.Figures:
                # Other ids in each round: nothing is found in a cache.
                workload = workloads.random_lengths(options.requests, prompt, output, vocab_size=30000, seed=number)
                records, seconds = asyncio.run(load.run_closed_loop(targets[name], workload, options.streams))
                figures = report.summarize(records, seconds)
                if figures["num_failed"]:
                    raise RuntimeError(f"{figures['num_failed']} requests failed: {figures['first_error']}")
                return {
                    "output tok/s": figures["output_tok_s"],
                    "total tok/s": figures["total_tok_s"],
                    "ttft mean s": figures["ttft_s"]["mean"],
                    "ttft p99 s": figures["ttft_s"]["p99"],
                    "between tokens p99 s": figures["itl_s"]["p99"],
                }

            for name in targets:
                measure(name, 99)
            rounds = alternating.run_rounds(list(targets), options.rounds, measure)
    finally:
        stop_server(server)
    ratio = alternating.median_ratio(rounds, "over HTTP", "in process", "output tok/s")
    alternating.show(
        f"{options.requests} requests, {options.streams} streams, prompts {prompt}, outputs {output}", rounds,
        notes=[f"throughput over HTTP : in process = {ratio:.3f}"], json_file=options.json,
        model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
