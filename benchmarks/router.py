"""What cache-aware routing is worth: real engines on this machine, or simulated ones.

    python benchmarks/router.py real [--model smollm2-135m] [--replicas 4] [--rounds 2]
    python benchmarks/router.py simulated [--replicas 8,16,64]

Real: `jaxserve serve` processes with small page pools, `jaxserve router` in front, a closed loop of clients. Workloads:
generated-shared-prefix (every group equally often, random order), all prefixes together 2.8 x one worker's cache; the
same with zipf popularity; all-unique prompts. Policies take turns on requests of equal lengths with other tokens, so
that no cache carries over. Hits are the workers' own counts.

Simulated: Llama-3.1-8B on one H100 each by the roofline model, the same workloads scaled to its cache.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from jaxserve.bench import load, report, workloads
from jaxserve.bench.http import HttpTarget
from jaxserve.bench.workloads import Conversation, LengthRange, TokenSource, Turn, Workload
from jaxserve.routing.policy import make_policy
from jaxserve.simulator import workloads as simulated_workloads
from jaxserve.simulator.devices import DEVICES
from jaxserve.simulator.fleet import FleetOptions, FleetSimulator
from jaxserve.simulator.model_shape import load_shape
from jaxserve.simulator.planner import Candidate
from jaxserve.simulator.workloads import Lengths

PAGE, NUM_PAGES, ROWS, STEP_TOKENS = 16, 180, 4, 128
PREFIX, OWN, OUTPUT, CLIENTS_PER_WORKER = 512, 32, 4, 2
VOCAB = 32_000  # ids of prompts are drawn from so many
_ASKED, _FOUND, _MADE = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:generation_tokens_total",
)


class Process:
    """A server of ours; `url` once it has said where it listens."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._log = log
        # Processes share cores: a thread that waits must not hold one.
        environment = {**os.environ, "JAXSERVE_CPU_SPIN_US": "0"}
        with log.open("wb") as file:
            command = [sys.executable, "-m", "jaxserve.cli", *arguments, "--port", "0"]
            self.process = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL, env=environment)
        self.url = ""
        end = time.monotonic() + 120
        while not self.url:
            found = [word for word in log.read_text().split() if word.startswith("http://")]
            self.url = found[0] if found else ""
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{arguments[0]} did not start:\n{log.read_text()}")
            time.sleep(0.1)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except (urllib.error.URLError, ConnectionError) as error:
            return getattr(error, "code", 0), str(error)

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        end = time.monotonic() + timeout_s
        while self.get("/ready")[0] != 200:
            if time.monotonic() > end:
                raise RuntimeError(f"not ready: {self._log.read_text()[-2000:]}")
            time.sleep(0.2)

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in (_ASKED, _FOUND, _MADE):
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
        return found

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def shared(num_requests: int, groups: int, seed: int, zipf: float = 0.0) -> Workload:
    source = TokenSource((seed, 77), VOCAB)
    prefixes = [source.ids(PREFIX) for _ in range(groups)]
    rng = np.random.default_rng(seed)
    if zipf:
        weights = np.arange(1, groups + 1, dtype=float) ** -zipf
        chosen = rng.choice(groups, num_requests, p=weights / weights.sum())
    else:
        chosen = rng.permutation(np.arange(num_requests) % groups)
    conversations = tuple(Conversation((Turn(prefixes[k] + source.ids(OWN), OUTPUT),)) for k in chosen)
    return Workload(f"shared-prefix zipf={zipf}", {"groups": groups}, conversations)


def unique(num_requests: int, seed: int) -> Workload:
    length = LengthRange(PREFIX // 2, PREFIX)
    return workloads.random_lengths(num_requests, length, LengthRange(OUTPUT, 4 * OUTPUT), vocab_size=VOCAB, seed=seed)


@dataclasses.dataclass
class Row:
    """imbalance, work_imbalance: the busiest worker's tokens over the mean; of prompts, and of those it computed."""

    rate: float
    hits: float
    imbalance: float
    work_imbalance: float
    ttft: float
    failed: int


def measure(workers: list[Process], router: Process, workload: Workload, clients: int) -> Row:
    async def run() -> tuple[list[load.RequestRecord], float]:
        target = HttpTarget(router.url)
        await target.connect()
        return await load.run_closed_loop(target, workload, clients)

    before = [worker.figures() for worker in workers]
    records, seconds = asyncio.run(run())
    after = [worker.figures() for worker in workers]
    asked, found, made = (
        [late.get(name, 0.0) - early.get(name, 0.0) for early, late in zip(before, after)]
        for name in (_ASKED, _FOUND, _MADE)
    )
    computed = [prompt - cached + output for prompt, cached, output in zip(asked, found, made)]
    good = [record for record in records if record.error is None]
    tokens = sum(record.num_prompt_tokens + record.num_output_tokens for record in good)
    return Row(
        tokens / seconds,
        sum(found) / max(sum(asked), 1.0),
        max(asked) * len(asked) / max(sum(asked), 1.0),
        max(computed) * len(computed) / max(sum(computed), 1.0),
        statistics.mean(record.ttft for record in good),
        len(records) - len(good),
    )


def real(options: argparse.Namespace) -> None:
    count = options.replicas
    groups = round(2.8 * (NUM_PAGES - 1) * PAGE / PREFIX)
    num_requests = options.requests
    policies = ["round_robin", "cache_aware", "cache_aware + events"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = ["--num-pages", str(NUM_PAGES), "--page-size", str(PAGE), "--max-num-rows", str(ROWS)]
        engine += ["--max-step-tokens", str(STEP_TOKENS), "--max-model-len", "1024", "--kv-events"]
        workers: list[Process] = []
        routers: dict[str, Process] = {}
        try:
            for number in range(count):
                workers.append(Process("serve", options.model, *engine, log=folder / f"w{number}"))
                workers[-1].wait_ready()  # one after another: the first one's compiled programs serve all
            for policy in policies:
                arguments = ["router", "--route", policy.split(" ")[0]]
                for worker in workers:
                    arguments += ["--workers", worker.url]
                if "events" in policy:
                    arguments += ["--prefix-source", "events"]
                routers[policy] = Process(*arguments, log=folder / policy.replace(" ", ""))
                routers[policy].wait_ready()
            print(
                f"{count} replicas of {options.model}, pools of {NUM_PAGES - 1} pages of {PAGE} tokens, {groups} "
                f"prefixes of {PREFIX}: "
                f"{groups * PREFIX / ((NUM_PAGES - 1) * PAGE):.1f} x one cache; {num_requests} requests, "
                f"{CLIENTS_PER_WORKER * count} clients; {report.describe_machine()['processor']}"
            )
            rows: dict[tuple[str, str], list[Row]] = {}
            seed = options.seed
            for round_number in range(options.rounds):
                for kind in options.kinds.split(","):
                    for policy in policies[round_number % 3 :] + policies[: round_number % 3]:
                        seed += 1
                        if kind == "unique":
                            workload = unique(num_requests // 2, seed)
                        else:
                            workload = shared(num_requests, groups, seed, zipf=1.1 if kind == "zipf" else 0.0)
                        row = measure(workers, routers[policy], workload, CLIENTS_PER_WORKER * count)
                        rows.setdefault((kind, policy), []).append(row)
                        print(
                            f"  {round_number} {kind}, {policy}: {row.rate:.0f} total tok/s, hits {row.hits:.1%}, TTFT "
                            f"{row.ttft:.3f} s, busiest {row.imbalance:.2f} x mean (prompt tokens), "
                            f"{row.work_imbalance:.2f} (computed tokens), {row.failed} failed",
                            flush=True,
                        )
            for kind in options.kinds.split(","):
                base = [row.rate for row in rows[kind, "round_robin"]]
                for policy in policies:
                    own = rows[kind, policy]
                    ratio = statistics.median(row.rate / other for row, other in zip(own, base))
                    print(
                        f"{kind}, {policy}: throughput {ratio:.2f} x round robin, hits "
                        f"{statistics.median(row.hits for row in own):.1%}, busiest "
                        f"{statistics.median(row.imbalance for row in own):.2f} x mean (prompt tokens), "
                        f"{statistics.median(row.work_imbalance for row in own):.2f} (computed tokens)"
                    )
        finally:
            for process in [*routers.values(), *workers]:
                process.stop()


def simulated(options: argparse.Namespace) -> None:
    shape, device = load_shape("llama-3.1-8b"), DEVICES["h100"]
    candidate = Candidate(shape=shape, device=device)
    cache = (candidate.geometry().num_pages - 1) * candidate.page_size
    print(f"{shape.name} on one {device.name} each: {cache} tokens of cache per worker")
    for count in [int(text) for text in str(options.replicas).split(",")]:
        prefix = 4096
        groups = round(2.8 * cache / prefix)
        num_requests, clients = 240 * count, 24 * count
        results = {}
        for kind in ("shared", "zipf", "unique"):
            for policy in ("round_robin", "cache_aware"):
                lengths = (Lengths(low=prefix, high=prefix), Lengths(low=128, high=128), Lengths(low=32, high=32))
                if kind == "unique":
                    long = Lengths(low=2048, high=4096)
                    output = Lengths(low=16, high=64)
                    workload = simulated_workloads.unique(num_requests, long, output, rate=float("inf"))
                else:
                    workload = simulated_workloads.shared_prefix(
                        num_requests, groups, *lengths, rate=float("inf"), zipf=1.1 if kind == "zipf" else 0.0
                    )
                fleet = FleetSimulator(
                    FleetOptions(
                        num_replicas=count, geometry=candidate.geometry(), cost=candidate.cost(), max_in_flight=clients
                    ),
                    make_policy(policy),
                )
                begin = time.perf_counter()
                results[policy] = result = fleet.run(workload)
                print(
                    f"  {count} workers, {kind}, {policy}: {result.total_rate:,.0f} total tok/s, hits "
                    f"{result.hit_rate:.1%}, TTFT mean {result.ttft.mean:.2f} s, busiest {result.imbalance:.2f} x mean "
                    f"(requests), {result.busy_imbalance:.2f} (time); {time.perf_counter() - begin:.0f} s to simulate",
                    flush=True,
                )
            ratio = results["cache_aware"].total_rate / results["round_robin"].total_rate
            print(f"{count} workers, {kind}: cache_aware {ratio:.2f} x round_robin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("real", "simulated"))
    parser.add_argument("--model", default="smollm2-135m", help="of real engines")
    parser.add_argument("--replicas", default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--kinds", default="shared,zipf,unique")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "real":
        options.replicas = int(options.replicas or 4)
        real(options)
    else:
        options.replicas = options.replicas or "8,16,64"
        simulated(options)


if __name__ == "__main__":
    main()
