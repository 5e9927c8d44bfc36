"""llama.cpp's own benchmark, one stream. It samples nothing and makes no text: what it says is an upper bound.

Each test is a process that loads the model anew: only the times of prompts and tokens mean anything, not the seconds
of a run.

python run_llama_bench.py --program llama-bench --model model.gguf
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
from typing import Any

import protocol

channel = protocol.take_stdout()


class LlamaBench:
    def __init__(self, program: str, model: str) -> None:
        self._command = [program, "--model", model, "--output", "json"]
        self._command += ["--threads", os.environ.get("BENCH_THREADS", str(os.cpu_count() or 1))]

    def time(self, *test: str) -> list[float]:
        """Seconds of every repetition."""
        output = subprocess.run([*self._command, *test], check=True, stdout=subprocess.PIPE, text=True).stdout
        (found,) = json.loads(output)
        return [nanoseconds * 1e-9 for nanoseconds in found["samples_ns"]]

    def run(self, requests: list[dict[str, Any]], concurrency: int, use_prefix_cache: bool) -> list[dict[str, float]]:
        """Equal requests are repetitions of one test. Raises ValueError for several at a time."""
        if concurrency != 1:
            raise ValueError(f"concurrency: got {concurrency}; allowed: 1, llama-bench has one stream")
        records = []
        sizes = collections.Counter((len(request["ids"]), request["max_tokens"]) for request in requests)
        for (num_prompt, num_output), count in sizes.items():
            repeated = ["--repetitions", str(count)]
            firsts = self.time("--n-prompt", str(num_prompt), "--n-gen", "0", *repeated)
            rests = self.time("--n-prompt", "0", "--n-gen", str(num_output), "--n-depth", str(num_prompt), *repeated)
            for first, rest in zip(firsts, rests, strict=True):
                # The first of the tokens comes with the prompt's end.
                end = first + rest * (num_output - 1) / num_output
                records.append({"ttft": first, "e2e": end, "num_output": num_output, "num_cached": 0})
        return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    bench = LlamaBench(arguments.program, arguments.model)
    protocol.serve(channel, {"version": "llama-bench"}, bench.run)


if __name__ == "__main__":
    main()
