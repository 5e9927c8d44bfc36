"""Serve many simulated requests and check every one: nothing lost, starved, leaked or wrong.

    python benchmarks/simulate.py [--requests 300000] [--seed 0] [--no-overlap] [--policy lpm] [--json FILE]

Random arrivals, lengths, aborts, n > 1, prompt scores, priorities and shared prefixes over a small pool. The runner is
simulated, scheduler and cache are the real ones.
"""

from __future__ import annotations

import argparse
import json
import time

from jaxserve.simulator.stress import StressOptions, run_stress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="fcfs", choices=("fcfs", "lpm", "priority"))
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    start = time.perf_counter()
    report = run_stress(StressOptions(args.requests, seed=args.seed, policy=args.policy, overlap=not args.no_overlap))
    report["seconds"] = round(time.perf_counter() - start, 1)
    for name, value in report.items():
        print(f"{name:24} {value}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file)


if __name__ == "__main__":
    main()
