"""Does the device wait for the host? Steady decode, overlap on and off, from the engine's own trace.

    python benchmarks/overlap.py [--rows 16] [--output-tokens 256] [--rounds 3] [--json out.json]

`--rows` requests decode together; only steps in which all of them decode are counted. `host share` is the host's
time between two dispatches that is not spent waiting, over the time between two dispatches; a read without queue
is one at which no later step had been dispatched, so that the device ran dry.
"""

from __future__ import annotations

import asyncio

import alternating

from jaxserve.bench import load, report, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange
from jaxserve.config import EngineConfig
from jaxserve.trace import StepRecord, summarize


def steady_steps(trace: list[StepRecord], rows: int) -> list[StepRecord]:
    """The decode-only steps of the full batch, but for the last two: those know that everything ends."""
    steady = [step for step in trace if step.num_decodes == rows and step.num_tokens == rows]
    return steady[1:-2]


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=256)
    options = parser.parse_args()
    lengths = [LengthRange(n, n) for n in (options.prompt_tokens, options.output_tokens)]
    targets = {}
    for name, is_on in (("overlap on", True), ("overlap off", False)):
        targets[name] = InProcessTarget(
            EngineConfig(
                model=options.model,
                dtype=options.dtype,
                overlap=is_on,
                max_num_rows=options.rows,
                max_model_len=options.prompt_tokens + options.output_tokens,
            )
        )

    def measure(name: str, number: int) -> alternating.Figures:
        target = targets[name]
        target.flush_cache()
        target.engine.trace.clear()
        workload = workloads.random_lengths(options.rows, *lengths, vocab_size=30000, seed=number)
        records, seconds = asyncio.run(load.run_closed_loop(target, workload, options.rows))
        figures = report.summarize(records, seconds)
        steps = steady_steps(list(target.engine.trace), options.rows)
        if len(steps) < 2:
            raise RuntimeError(f"{len(steps)} steps with {options.rows} decoding rows; ask for more output tokens")
        trace = summarize(steps)
        return {
            "steady steps": trace["num_steps"],
            "reads without queue": trace["num_reads_without_queue"],
            "step ms, p50": trace["period_ms_p50"],
            "step ms, p99": trace["period_ms_p99"],
            "host ms, p50": trace["host_ms_p50"],
            "host ms, p99": trace["host_ms_p99"],
            "host share": trace["host_share"],
            "output tok/s": figures["output_tok_s"],
        }

    on, off = targets
    for name in targets:
        measure(name, 99)
    rounds = alternating.run_rounds(list(targets), options.rounds, measure)
    ratio = alternating.median_ratio(rounds, on, off, "output tok/s")
    alternating.show(
        f"steady decode, {options.rows} rows", rounds,
        notes=[f"throughput on : off = {ratio:.3f}"], json_file=options.json,
        model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip
    for target in targets.values():
        target.engine.close()


if __name__ == "__main__":
    main()
