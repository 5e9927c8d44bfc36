"""Serve many simulated requests and check every one: nothing lost, starved, leaked or wrong.

    python benchmarks/simulate.py [--requests 300000] [--seed 0] [--json FILE]

Random arrivals, lengths, aborts, n > 1, prompt scores, penalties, stop tokens, priorities and shared prefixes, over
pools of different size and kind. The runner is simulated (every token is a hash of what it reads from its pages),
scheduler and cache are the real ones. Runs on one core.
"""

from __future__ import annotations

import argparse
import json
import time

from jaxserve.simulator.stress import StressOptions, run_stress

# name -> (share of the requests, options)
VARIANTS: dict[str, tuple[float, dict[str, object]]] = {
    "fcfs, overlap": (0.38, {}),
    "fcfs, no overlap": (0.16, {"overlap": False, "page_size": 16, "num_pages": 150}),
    "lpm": (0.1, {"policy": "lpm"}),
    "priority": (0.15, {"policy": "priority", "page_size": 8, "num_pages": 240}),
    "deterministic": (0.1, {"deterministic": True}),
    "no prefix cache": (0.05, {"prefix_cache": False, "page_size": 2}),
    "tiny pool": (0.03, {"num_pages": 130, "page_size": 2}),
    "tiny pool, long outputs": (0.015, {"num_pages": 40, "page_size": 8, "mean_output": 40.0}),
    "the same, no overlap": (0.015, {"num_pages": 40, "page_size": 8, "mean_output": 40.0, "overlap": False}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    start, cpu_start = time.perf_counter(), time.process_time()
    reports = {}
    left = args.requests
    for i, (name, (share, options)) in enumerate(VARIANTS.items()):
        count = left if i == len(VARIANTS) - 1 else round(share * args.requests)
        left -= count
        began = time.process_time()
        report = run_stress(StressOptions(count, seed=args.seed + i, **options))
        report["CPU seconds"] = round(time.process_time() - began, 1)
        reports[name] = report
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in report.items()), flush=True)
    total = {
        "requests": sum(report["requests"] for report in reports.values()),
        "preemptions": sum(report["preemptions"] for report in reports.values()),
        "idle points checked": sum(report["idle points checked"] for report in reports.values()),
        "seconds": round(time.perf_counter() - start, 1),
        "CPU seconds": round(time.process_time() - cpu_start, 1),
    }
    print("total: " + ", ".join(f"{key} {value}" for key, value in total.items()))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"total": total, "variants": reports}, file, indent=1)


if __name__ == "__main__":
    main()
