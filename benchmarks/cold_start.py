"""From starting the command to its first token: with no compiled programs, and with those of an earlier run.

    python benchmarks/cold_start.py [--rounds 3] [--json out.json]

`run` is `jaxserve run MODEL PROMPT`, timed until the first character of the answer; `serve` is `jaxserve serve`,
timed until the first token of a streamed completion reaches a client that keeps trying. The model has been fetched
before. Cold means an empty cache folder (JAXSERVE_CACHE); warm means the folder that the cold start of the round
left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import alternating
from server_overhead import start_server, stop_server, wait_until_ready

from jaxserve import hub
from jaxserve.bench.http import HttpTarget

PROMPT = "The capital of France is"


def time_run(model: str, dtype: str, cache: str) -> float:
    """Seconds from starting the process to the first character on its standard output."""
    command = [sys.executable, "-m", "jaxserve.cli", "run", model, PROMPT, "--max-tokens", "2", "--raw"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--dtype", dtype], stdout=subprocess.PIPE, env=os.environ | {"JAXSERVE_CACHE": cache}
    )
    try:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    if process.returncode != 0 or not first.strip(b"\n"):
        raise RuntimeError(f"jaxserve run ended with status {process.returncode} and said {first!r}")
    return seconds


def time_serve(model: str, dtype: str, cache: str, port: int) -> float:
    """Seconds from starting the server to the first token that a client gets."""
    os.environ["JAXSERVE_CACHE"] = cache
    start = time.perf_counter()
    server = start_server(port, [model, "--dtype", dtype])
    try:
        wait_until_ready(HttpTarget(f"http://127.0.0.1:{port}"), server)
        return time.perf_counter() - start
    finally:
        stop_server(server)


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--port", type=int, default=8104)
    options = parser.parse_args()
    # By path, because the cache folder that holds the model is not the one that the measured processes see.
    model = str(model_path(options.model))
    rounds: alternating.Rounds = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as for_run, tempfile.TemporaryDirectory() as for_serve:
            for variant in rounds:
                rounds[variant].append(
                    {
                        "run: first token, s": time_run(model, options.dtype, for_run),
                        "serve: first token, s": time_serve(model, options.dtype, for_serve, options.port),
                    }
                )
    alternating.show(
        "from the start of the command", rounds, json_file=options.json,
        model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip


def model_path(name: str) -> Path:
    resolved = hub.resolve_model(name)
    return Path(getattr(resolved, "path", resolved))


if __name__ == "__main__":
    main()
