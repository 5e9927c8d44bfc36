"""Continuous against static batching on outputs of mixed length, on one engine.

    python benchmarks/continuous_batching.py [--requests 256] [--rows 16] [--output-tokens 16:256:log] [--rounds 3]

    continuous        `--rows` requests under way, each finished one replaced at once
    static            groups of `--rows`; every row is computed until the longest of its group has ended, as in
                      padded batches, and only the tokens asked for count
    static, leaving   groups of `--rows`; a finished row costs nothing, but the next group waits for the longest

Kernels, scheduler and prompts are the same in all three. The last rows end one by one with nothing to take their
place: thin steps that weigh less the more requests there are. Output lengths are uniform in the
logarithm, as the lengths of answers tend to be; `--output-tokens 16:256` makes them uniform, which favours static
batching.
"""

from __future__ import annotations

import asyncio
import time

import alternating

from jaxserve.bench import load, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange, Workload
from jaxserve.config import EngineConfig

VARIANTS = ("continuous", "static", "static, leaving")


async def run_static(target: InProcessTarget, workload: Workload, rows: int, *, is_padded: bool) -> float:
    """Seconds for all groups; is_padded: all of a group are computed to the length of its longest."""
    turns = [conversation.turns[0] for conversation in workload.conversations]
    start = time.perf_counter()
    for first in range(0, len(turns), rows):
        group = turns[first : first + rows]
        longest = max(turn.max_tokens for turn in group)
        lengths = [longest if is_padded else turn.max_tokens for turn in group]
        records = await asyncio.gather(*(target.complete(t.new_ids, n) for t, n in zip(group, lengths)))
        check([record.error for record in records])
    return time.perf_counter() - start


async def run_continuous(target: InProcessTarget, workload: Workload, rows: int) -> float:
    """Seconds for all requests."""
    records, seconds = await load.run_closed_loop(target, workload, rows)
    check([record.error for record in records])
    return seconds


def check(errors: list[str | None]) -> None:
    """Raise RuntimeError if a request failed."""
    failed = [error for error in errors if error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", default="32:128")
    parser.add_argument("--output-tokens", default="16:256:log")
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
            if name == "continuous":
                seconds = asyncio.run(run_continuous(target, workload, options.rows))
            else:
                is_padded = name == "static"
                seconds = asyncio.run(run_static(target, workload, options.rows, is_padded=is_padded))
            num_asked = sum(conversation.turns[0].max_tokens for conversation in workload.conversations)
            return {
                "seconds": seconds,
                "steps": target.engine.stats().num_steps - steps,
                "output tokens asked for": num_asked,
                "output tok/s": num_asked / seconds,
            }

        warm = workloads.random_lengths(options.rows, prompt, LengthRange(4, 4), vocab_size=30000, seed=99)
        asyncio.run(run_continuous(target, warm, options.rows))
        rounds = alternating.run_rounds(VARIANTS, options.rounds, measure)
    notes = [
        f"throughput continuous : {other} = {alternating.median_ratio(rounds, 'continuous', other, 'output tok/s'):.2f}"
        for other in VARIANTS[1:]
    ]
    alternating.show(
        f"{options.requests} requests, prompts {prompt}, outputs {output}, {options.rows} rows", rounds,
        notes=notes, json_file=options.json, model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
