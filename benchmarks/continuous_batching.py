"""Continuous against static batching on outputs of mixed length, on one engine.

    python benchmarks/continuous_batching.py [--requests 64] [--rows 16] [--rounds 3] [--json out.json]

Static: groups of `--rows` requests, each group waits for its longest. Continuous: as many under way, each finished
one replaced at once. Kernels, scheduler and prompts are the same; nothing is padded to the longest in either.
"""

from __future__ import annotations

import asyncio
import time

import alternating

from jaxserve.bench import load, report, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange, Workload
from jaxserve.config import EngineConfig


async def run_static(
    target: InProcessTarget, workload: Workload, rows: int
) -> tuple[list[load.RequestRecord], float]:
    turns = [conversation.turns[0] for conversation in workload.conversations]
    records: list[load.RequestRecord] = []
    start = time.perf_counter()
    for first in range(0, len(turns), rows):
        group = turns[first : first + rows]
        records += await asyncio.gather(*(target.complete(turn.new_ids, turn.max_tokens) for turn in group))
    return records, time.perf_counter() - start


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", default="32:128")
    parser.add_argument("--output-tokens", default="16:256")
    options = parser.parse_args()
    prompt, output = LengthRange.parse(options.prompt_tokens), LengthRange.parse(options.output_tokens)
    config = EngineConfig(
        model=options.model,
        dtype=options.dtype,
        max_num_rows=options.rows,
        max_model_len=prompt.high + output.high,
    )
    with InProcessTarget(config) as target:

        def measure(name: str, number: int) -> alternating.Figures:
            workload = workloads.random_lengths(options.requests, prompt, output, vocab_size=30000, seed=number)
            target.flush_cache()
            steps = target.engine.stats().num_steps
            if name == "static":
                records, seconds = asyncio.run(run_static(target, workload, options.rows))
            else:
                records, seconds = asyncio.run(load.run_closed_loop(target, workload, options.rows))
            figures = report.summarize(records, seconds)
            return {
                "seconds": seconds,
                "steps": target.engine.stats().num_steps - steps,
                "output tok/s": figures["output_tok_s"],
                "ttft mean s": figures["ttft_s"]["mean"],
                "e2e mean s": figures["e2e_s"]["mean"],
            }

        warm = workloads.random_lengths(options.rows, prompt, LengthRange(4, 4), vocab_size=30000, seed=99)
        asyncio.run(load.run_closed_loop(target, warm, options.rows))
        rounds = alternating.run_rounds(["continuous", "static"], options.rounds, measure)
    ratio = alternating.median_ratio(rounds, "continuous", "static", "output tok/s")
    alternating.show(
        f"{options.requests} requests, prompts {prompt}, outputs {output}, {options.rows} rows", rounds,
        notes=[f"throughput continuous : static = {ratio:.2f}"], json_file=options.json,
        model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
