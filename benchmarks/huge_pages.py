"""What huge pages below weights and K/V are worth on CPU: reading through memory, decode and prefill.

    python benchmarks/huge_pages.py [--model smollm2-135m] [--rounds 3]

Memory cannot go back to small pages, so every measurement is a new process, with and without in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.config import DEFAULT_MODEL
from jaxserve.runner import huge_pages, runner

_ARRAY_BYTES = 1 << 28


def read_rates(uses_huge_pages: bool) -> dict[str, float]:
    """GB/s of a sum over 256 MiB, again and again and after half a second without work."""
    array = jax.jit(lambda: jnp.ones(_ARRAY_BYTES // 4, jnp.float32))()
    if uses_huge_pages:
        huge_pages.move_to_huge_pages([array])
    total = jax.jit(jnp.sum)

    def rate(rest: float) -> float:
        time.sleep(rest)
        start = time.perf_counter()
        total(array).block_until_ready()
        return _ARRAY_BYTES / (time.perf_counter() - start) / 1e9

    rate(0.0)
    return {
        "read, GB/s": statistics.median(rate(0.0) for _ in range(9)),
        "read after rest, GB/s": statistics.median(rate(0.5) for _ in range(5)),
    }


def serve_rates(model: str, uses_huge_pages: bool) -> dict[str, float]:
    """Tokens per second of decodes at one row and at 16, and of prompts."""
    if not uses_huge_pages:
        runner.start_on_huge_pages = lambda weights, zeros: None
    llm = LLM(model, max_num_rows=16, max_model_len=1024, progress=False)
    rng = np.random.default_rng(0)

    def rate(num_rows: int, num_prompt: int, num_output: int, counted: int) -> float:
        prompts = rng.integers(100, 30000, (num_rows, num_prompt)).tolist()
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True))
        return num_rows * counted / (time.perf_counter() - start)

    rate(1, 24, 32, 32)
    rate(16, 24, 16, 16)
    found = {
        "decode, 1 row, tok/s": statistics.median(rate(1, 24, 128, 128) for _ in range(4)),
        "decode, 16 rows, tok/s": statistics.median(rate(16, 24, 64, 64) for _ in range(3)),
        "prompts, tok/s": statistics.median(rate(16, 400, 1, 400) for _ in range(3)),
    }
    llm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=("huge", "small"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        is_huge = options.child == "huge"
        print("\n" + json.dumps(read_rates(is_huge) | serve_rates(options.model, is_huge)))
        return
    setting = huge_pages.SETTING
    if not setting.exists() or "[madvise]" not in setting.read_text():
        sys.exit(f"{setting}: allowed: madvise, or both variants would have the same pages")
    rounds: dict[str, list[dict[str, float]]] = {"small": [], "huge": []}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            command = [sys.executable, os.path.abspath(__file__), "--model", options.model, "--child", name]
            output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
            found.append(json.loads(output.splitlines()[-1]))
    print("medians over rounds; the ratio is the median of those of single rounds")
    for figure in rounds["huge"][0]:
        small, huge = ([found[figure] for found in rounds[name]] for name in ("small", "huge"))
        ratio = statistics.median(b / a for a, b in zip(small, huge, strict=True))
        print(f"{figure:24s} small {statistics.median(small):7.1f}  huge {statistics.median(huge):7.1f}  {ratio:.2f} x")


if __name__ == "__main__":
    main()
