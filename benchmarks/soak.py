"""A long mixed load on a running server, and whether it leaves anything behind.

    python benchmarks/soak.py [--url http://127.0.0.1:8000] [--minutes 20] [--clients 64] [--json FILE]

Clients call every route: streams and plain answers of all dialects, embeddings, scores, token counts. One request in
five is left before its answer has come, one in ten is invalid. Looked at: statuses (no 5xx but a deliberate 503),
pages held by nobody once all is quiet, the resident memory of the server's processes, and the time of /health.

Memory is compared between the end of the first fifth of the run, when caches are full, and its end: it must not have
grown by more than --growth. Processes are found by the server's address, so both run on one machine; without
permission to look, or from another machine, memory is not judged. Exit status: 0 if everything holds, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parent))

from fuzz import BODIES, is_right, mutated

WORDS = [
    "the",
    "old",
    "harbour",
    "keeps",
    "seven",
    "boats",
    "and",
    "some",
    "lamps",
    "under",
    "rain",
    "while",
    "nobody",
    "counts",
    "them",
]
HEALTH_LIMIT_S = 0.050
_POLL_S = 0.25
_QUIET_S = 60.0


class Load:
    """What the clients saw."""

    def __init__(self, url: str, headers: dict[str, str], seed: int) -> None:
        self.url = url
        self.headers = headers
        self.source = random.Random(seed)
        self.statuses: collections.Counter[str] = collections.Counter()
        self.health: list[float] = []
        self.faults: list[str] = []
        self.num_left = 0
        self.ends_at = 0.0

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.ends_at:
            path, data = self.body()
            leaves = self.source.random() < 0.2
            try:
                if leaves:
                    self.num_left += 1
                    await asyncio.wait_for(self.ask(http, path, data), self.source.uniform(0.01, 1.5))
                else:
                    await self.ask(http, path, data)
            except TimeoutError:
                self.statuses["left"] += 1
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1
                self.faults.append(f"{path}: {type(error).__name__}: {error}")

    async def ask(self, http: httpx.AsyncClient, path: str, data: bytes) -> None:
        async with http.stream("POST", path, content=data) as response:
            await response.aread()
        self.statuses[str(response.status_code)] += 1
        if not is_right(response):
            self.faults.append(f"{path}: {response.status_code}: {response.text[:200]}")
        if response.status_code == 503:
            await asyncio.sleep(0.5)

    def body(self) -> tuple[str, bytes]:
        path = self.source.choice(list(BODIES))
        body = self.source.choice(BODIES[path])
        if self.source.random() < 0.1:
            return path, mutated(self.source, body)
        return path, json.dumps(self.varied(body)).encode()

    def varied(self, body: dict[str, Any]) -> dict[str, Any]:
        """A valid body with other texts and lengths."""
        text = " ".join(self.source.choices(WORDS, k=self.source.randint(3, 60)))
        new = dict(body)
        for name, value in body.items():
            if name in ("max_tokens", "max_output_tokens", "max_completion_tokens") and "tools" not in body:
                new[name] = self.source.choice((1, 4, 16, 64))
            elif name in ("prompt", "input", "text", "query", "text_1") and isinstance(value, str):
                new[name] = text
            elif name == "messages" and len(value) == 1:
                new[name] = [{"role": "user", "content": text}]
        return new

    async def watch_health(self) -> None:
        """A client of its own: what a load balancer would see."""
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as http:
            while time.monotonic() < self.ends_at:
                started = time.monotonic()
                response = await http.get("/health")
                self.health.append(time.monotonic() - started)
                if response.status_code != 200:
                    self.faults.append(f"/health: {response.status_code}")
                await asyncio.sleep(_POLL_S)


def processes_of(url: str) -> list[int]:
    """Ids of the process that listens on the port and of its children; empty if they cannot be seen."""
    port = int(re.search(r":(\d+)", url.split("://", 1)[1])[1]) if re.search(r":\d+", url.split("://", 1)[1]) else 80
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    owners, parents = set(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if inodes & {str(link.readlink()) for link in (folder / "fd").iterdir()}:
                owners.add(int(folder.name))
        except OSError:
            continue
    found = set(owners)
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found)
        found |= more


def resident_mib(processes: list[int]) -> float:
    """Private and shared resident memory, MiB; shared pages count in each process."""
    total = 0
    for process in processes:
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return total * 4096 / 2**20


def gauges(http: httpx.Client) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in http.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0]
            state = re.search(r'state="(\w+)"', name)
            found[f"{key}:{state[1]}" if state else key] = float(value)
    return found


def wait_quiet(http: httpx.Client) -> dict[str, float]:
    """Gauges once nothing runs any more."""
    end = time.monotonic() + _QUIET_S
    while True:
        found = gauges(http)
        is_quiet = not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]
        if is_quiet or time.monotonic() > end:
            return found
        time.sleep(0.5)


async def drive(load: Load, clients: int, minutes: float, processes: list[int]) -> list[tuple[float, float]]:
    """Run the load; (seconds, MiB) every few seconds."""
    samples = []
    started = time.monotonic()
    load.ends_at = started + 60 * minutes
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    headers = {"Content-Type": "application/json", **load.headers}
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits, headers=headers) as http:
        tasks = [asyncio.create_task(load.client(http)) for _ in range(clients)]
        tasks.append(asyncio.create_task(load.watch_health()))
        while time.monotonic() < load.ends_at:
            samples.append((time.monotonic() - started, resident_mib(processes)))
            await asyncio.sleep(min(5.0, 0.6 * minutes))
        await asyncio.gather(*tasks)
    return samples


def judge(load: Load, samples: list[tuple[float, float]], quiet: dict[str, float], growth: float) -> dict[str, Any]:
    health = sorted(load.health)
    p99 = health[int(0.99 * (len(health) - 1))] if health else float("nan")
    length = samples[-1][0] if samples else 0.0
    early = [mib for second, mib in samples if 0.2 * length <= second <= 0.4 * length]
    late = [mib for second, mib in samples if second >= 0.8 * length]
    ratio = statistics.median(late) / statistics.median(early) - 1 if early and late and early[0] else None
    held = quiet.get("jaxserve_pages:held", 0.0)
    restarts = quiet.get("jaxserve_engine_restarts_total", 0.0)
    # 503 with Retry-After is deliberate: is_right() lets it pass and everything else with 5xx is a fault.
    return {
        "requests": sum(load.statuses.values()), "left": load.num_left, "statuses": dict(sorted(load.statuses.items())),
        "faults": len(load.faults), "pages_held_when_quiet": held,
        "requests_running_when_quiet": quiet["vllm:num_requests_running"],
        "engine_restarts": restarts,
        "compiles_after_warmup": quiet.get("jaxserve_compiles_after_warmup_total", 0.0),
        "memory_mib_early": round(statistics.median(early), 1) if early else None,
        "memory_mib_late": round(statistics.median(late), 1) if late else None,
        "memory_growth": None if ratio is None else round(ratio, 4),
        "health_p50_ms": round(1e3 * statistics.median(health), 1) if health else None,
        "health_p99_ms": round(1e3 * p99, 1),
        "checks": {
            "no fault": not load.faults, "no leaked page": held == 0, "no restart": not restarts,
            "memory flat": ratio is None or ratio <= growth, "health fast": p99 < HEALTH_LIMIT_S,
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--growth", type=float, default=0.03, help="share by which memory may have grown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    load = Load(options.url.rstrip("/"), headers, options.seed)
    processes = processes_of(load.url)
    samples = asyncio.run(drive(load, options.clients, options.minutes, processes))
    with httpx.Client(base_url=load.url, headers=headers, timeout=60) as http:
        result = judge(load, samples, wait_quiet(http), options.growth)
    result |= {"minutes": options.minutes, "clients": options.clients, "processes": len(processes)}
    if options.json:
        options.json.write_text(json.dumps({**result, "fault_texts": load.faults[:50], "memory": samples}, indent=1))
    for fault in load.faults[:10]:
        print(fault)
    print(json.dumps(result, indent=1))
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
