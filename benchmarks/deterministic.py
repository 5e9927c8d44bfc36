"""What `deterministic=True` costs: throughput and single-stream speed beside the default.

python benchmarks/deterministic.py [--requests 32] [--concurrency 16] [--rounds 3] [--json out.json]
"""

from __future__ import annotations

import asyncio

import alternating

from jaxserve.bench import load, report, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange
from jaxserve.config import EngineConfig


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", default="32:512")
    parser.add_argument("--output-tokens", default="16:128")
    options = parser.parse_args()
    prompt, output = LengthRange.parse(options.prompt_tokens), LengthRange.parse(options.output_tokens)
    targets = {}
    for name, is_on in (("deterministic", True), ("default", False)):
        targets[name] = InProcessTarget(
            EngineConfig(
                model=options.model,
                dtype=options.dtype,
                deterministic=is_on,
                max_num_rows=options.concurrency,
                max_model_len=prompt.high + output.high,
            )
        )

    def measure(name: str, number: int) -> alternating.Figures:
        target = targets[name]
        target.flush_cache()
        mixed = workloads.random_lengths(options.requests, prompt, output, vocab_size=30000, seed=number)
        batch = report.summarize(*asyncio.run(load.run_closed_loop(target, mixed, options.concurrency)))
        alone = workloads.random_lengths(1, LengthRange(128, 128), output, vocab_size=30000, seed=500 + number)
        single = report.summarize(*asyncio.run(load.run_closed_loop(target, alone, 1)))
        return {
            "output tok/s": batch["output_tok_s"],
            "total tok/s": batch["total_tok_s"],
            "ttft mean s": batch["ttft_s"]["mean"],
            "decode tok/s, one stream": single["decode_tok_s"],
        }

    for name in targets:
        measure(name, 99)
    rounds = alternating.run_rounds(list(targets), options.rounds, measure)
    notes = [
        f"{figure}: deterministic : default = "
        f"{alternating.median_ratio(rounds, 'deterministic', 'default', figure):.3f}"
        for figure in ("output tok/s", "decode tok/s, one stream")
    ]
    alternating.show(
        f"{options.requests} requests, {options.concurrency} at once, prompts {prompt}, outputs {output}", rounds,
        notes=notes, json_file=options.json, model=options.model, dtype=options.dtype, rounds=options.rounds,
    )  # fmt: skip
    for target in targets.values():
        target.engine.close()


if __name__ == "__main__":
    main()
