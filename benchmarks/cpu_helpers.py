"""What threads that stay awake between the calls of a step are worth, on CPU: decode at one row and at many.

    python benchmarks/cpu_helpers.py [--rows 16] [--output-tokens 64] [--spin-us 0 200 400] [--rounds 8]

One engine serves the same requests with helpers that look for work so many microseconds before they sleep (0: they
sleep at once, and every call wakes them), in turn.
"""

from __future__ import annotations

import asyncio

import alternating
from jaxserve.pallas_kernels.cpu_ffi import helpers

from jaxserve.bench import load, report, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange
from jaxserve.config import EngineConfig


def main() -> None:
    parser = alternating.make_parser(__doc__, rounds=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--spin-us", type=int, nargs="+", default=[0, 200, 400])
    options = parser.parse_args()
    lengths = [LengthRange(n, n) for n in (options.prompt_tokens, options.output_tokens)]
    target = InProcessTarget(
        EngineConfig(
            model=options.model,
            dtype=options.dtype,
            max_num_rows=options.rows,
            max_model_len=options.prompt_tokens + options.output_tokens,
        )
    )
    values = {f"{value} us": value for value in options.spin_us}

    def measure(name: str, number: int) -> alternating.Figures:
        helpers.set_spin_us(values[name])
        found = {}
        for rows in (1, options.rows):
            target.flush_cache()
            workload = workloads.random_lengths(rows, *lengths, vocab_size=30000, seed=number)
            records, seconds = asyncio.run(load.run_closed_loop(target, workload, rows))
            found[f"output tok/s, {rows} rows"] = report.summarize(records, seconds)["output_tok_s"]
        return found

    for name in values:
        measure(name, 99)
    rounds = alternating.run_rounds(list(values), options.rounds, measure)
    first, *others = values
    notes = [
        f"{figure}: {name} : {first} = {alternating.median_ratio(rounds, name, first, figure):.3f}"
        for figure in next(iter(rounds.values()))[0]
        for name in others
    ]
    alternating.show(
        "helpers that stay awake", rounds, notes=notes, json_file=options.json,
        model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip
    target.engine.close()


if __name__ == "__main__":
    main()
