"""A server as a peer: starts it, waits until it answers, loads it over HTTP, ends it.

    python run_http.py --url http://127.0.0.1:8100 -- jaxserve serve MODEL --port 8100

Runs in jaxserve's environment whichever server it is; the load generator is `jaxserve.bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time

import protocol

channel = protocol.take_stdout()

from jaxserve.bench import load  # noqa: E402  (standard output must be ours before libraries write to it)
from jaxserve.bench.http import HttpError, HttpTarget  # noqa: E402
from jaxserve.bench.workloads import Conversation, Turn, Workload  # noqa: E402

START_TIMEOUT_S = 900.0


async def wait_until_ready(target: HttpTarget, server: subprocess.Popen[bytes]) -> None:
    """Until one token comes back. Raises RuntimeError if the server ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            await target.connect()
            record = await target.complete(list(range(1000, 1008)), 2)
            if record.error is None:
                return
        except HttpError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {START_TIMEOUT_S:g} s")


async def run(target: HttpTarget, requests: list[dict], concurrency: int) -> list[dict[str, float]]:
    conversations = tuple(Conversation((Turn(tuple(r["ids"]), r["max_tokens"]),)) for r in requests)
    workload = Workload("peer", {}, conversations)
    records, _ = await load.run_closed_loop(target, workload, concurrency)
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    expected, seen = sum(r["max_tokens"] for r in requests), sum(record.num_output_tokens for record in records)
    if seen != expected:
        raise RuntimeError(f"{seen} output tokens, {expected} asked for")
    return [
        {
            "ttft": record.ttft,
            "e2e": record.e2e,
            "num_output": record.num_output_tokens,
            "num_cached": record.num_cached_tokens,
            "longest_gap": max(record.gaps, default=0.0),
        }
        for record in records
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("command", nargs="+", help="the server, after --")
    arguments = parser.parse_args()
    # Its own process group: a server's worker processes end with it.
    server = subprocess.Popen(arguments.command, stdout=sys.stderr, start_new_session=True)
    try:
        target = HttpTarget(arguments.url)
        asyncio.run(wait_until_ready(target, server))
        ready = {"version": f"{os.path.basename(arguments.command[0])} over HTTP", "model": target.model}
        protocol.serve(channel, ready, lambda requests, c, _: asyncio.run(run(target, requests, c)))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
