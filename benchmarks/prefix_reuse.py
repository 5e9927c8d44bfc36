"""What the prefix cache saves on a shared prefix, and what it costs where nothing is shared.

    python benchmarks/prefix_reuse.py [--requests 64] [--parts shared,unique] [--rounds 3] [--json out.json]

Three engines in turn: prefix cache on, on without reading shared pages together (cascade), and off. All requests of
a round arrive at once and the cache is empty, so that the shared prefix must be computed once although many want it
together. `computed / ideal` counts prefill tokens: the ideal is the prefix once and everybody's own tokens.

Where nothing is shared the expected difference is a percent, and two equal engines of one process differ by more
(where their memory came to lie). So that part makes both engines anew in every round, in an order that turns, and
wants more rounds: `--parts unique --rounds 8`.
"""

from __future__ import annotations

import asyncio

import alternating

from jaxserve.bench import load, report, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange, Workload
from jaxserve.config import MATMUL_BACKENDS, EngineConfig


def run(target: InProcessTarget, workload: Workload, ideal: int) -> alternating.Figures:
    target.flush_cache()
    before = target.engine.stats()
    concurrency = len(workload.conversations)
    records, seconds = asyncio.run(load.run_closed_loop(target, workload, concurrency))
    figures = report.summarize(records, seconds)
    if figures["num_failed"]:
        raise RuntimeError(f"{figures['num_failed']} requests failed: {figures['first_error']}")
    computed = target.engine.stats().num_computed_prefill_tokens - before.num_computed_prefill_tokens
    return {
        "seconds": seconds,
        "total tok/s": figures["total_tok_s"],
        "output tok/s": figures["output_tok_s"],
        "ttft mean s": figures["ttft_s"]["mean"],
        "computed prefill tokens": computed,
        "computed / ideal": computed / ideal,
        "cached tokens": figures["num_cached_tokens"],
    }


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--matmul-backend", default="auto", choices=MATMUL_BACKENDS)
    parser.add_argument("--parts", default="shared,unique", help="one of them, or both")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--unique-requests", type=int, default=16, help="of the run where nothing is shared")
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--own-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--max-num-rows", type=int, default=32)
    options = parser.parse_args()
    own, output = LengthRange(options.own_tokens, options.own_tokens), LengthRange(*[options.output_tokens] * 2)
    length = options.prefix_tokens + options.own_tokens + options.output_tokens

    parts = options.parts.split(",")
    if unknown := set(parts) - {"shared", "unique"}:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; there are shared and unique")
    variants = {"cache on": (True, True), "no cascade": (True, False), "cache off": (False, False)}
    on, alone, off = variants

    def make_target(name: str) -> InProcessTarget:
        prefix_cache, cascade = variants[name]
        target = InProcessTarget(
            EngineConfig(
                model=options.model,
                dtype=options.dtype,
                matmul_backend=options.matmul_backend,
                prefix_cache=prefix_cache,
                cascade=cascade,
                max_num_rows=options.max_num_rows,
                max_model_len=max(2048, length),
            )
        )
        run(target, workloads.random_lengths(4, LengthRange(8, 600), LengthRange(4, 4), vocab_size=30000, seed=99), 1)
        return target

    def measure_shared(name: str, number: int) -> alternating.Figures:
        workload = workloads.shared_prefix(
            options.requests, options.prefix_tokens, own, output, vocab_size=30000, seed=number
        )
        # No priming: they all come at once.
        workload = Workload(workload.name, workload.parameters, workload.conversations)
        return run(targets[name], workload, options.prefix_tokens + options.requests * options.own_tokens)

    def measure_unique(name: str, number: int) -> alternating.Figures:
        prompt = options.prefix_tokens + options.own_tokens
        workload = workloads.random_lengths(
            options.unique_requests, LengthRange(prompt, prompt), output, vocab_size=30000, seed=1000 + number
        )
        with make_target(name) as target:
            return run(target, workload, options.unique_requests * prompt)

    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "matmul_backend": options.matmul_backend,
        "rounds": options.rounds,
    }
    lengths = f"{options.prefix_tokens} + {options.own_tokens} tokens, {options.output_tokens} out"
    if "shared" in parts:
        targets = {name: make_target(name) for name in variants}
        shared = alternating.run_rounds(list(targets), options.rounds, measure_shared)
        for target in targets.values():
            target.engine.close()
        ratio = alternating.median_ratio(shared, on, off, "total tok/s")
        cascade_ratio = alternating.median_ratio(shared, on, alone, "total tok/s")
        alternating.show(
            f"{options.requests} requests with a common prefix, {lengths}", shared,
            notes=[f"throughput on : off = {ratio:.2f}, on : no cascade = {cascade_ratio:.2f}"],
            json_file=options.json, **settings,
        )  # fmt: skip
    if "unique" in parts:
        unique = alternating.run_rounds([on, off], options.rounds, measure_unique)
        ratio = alternating.median_ratio(unique, on, off, "total tok/s")
        unique_json = options.json.with_stem(options.json.stem + "-unique") if options.json else None
        alternating.show(
            f"{options.unique_requests} requests that share nothing, {lengths}", unique,
            notes=[f"throughput on : off = {ratio:.3f}"], json_file=unique_json, **settings,
        )  # fmt: skip


if __name__ == "__main__":
    main()
