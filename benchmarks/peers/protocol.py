"""How compare_peers.py talks to the engine of one peer. Standard library only: it runs in every environment.

A peer is a process that reads one JSON object per line from its standard input and answers each with one line:

    {"op": "run", "requests": [{"ids": [...], "max_tokens": n}, ...], "concurrency": c, "num_priming": p,
     "use_prefix_cache": true}
    -> {"seconds": s, "records": [{"ttft": s, "e2e": s, "num_output": n, "num_cached": n}, ...], "cpu": {...}}
    {"op": "quit"}

Its first line, sent when the model is loaded, is {"ready": {...}}. Everything that the peer's libraries print goes
to standard error. All peers are stepped by the same loop (`drive`), with the same number of requests under way.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TextIO


class Progress(NamedTuple):
    """What a step brought for one request."""

    key: str
    num_new_tokens: int
    is_finished: bool
    num_cached_tokens: int = 0


class SteppedEngine(Protocol):
    """An engine that computes when it is told to. Greedy, end-of-sequence ignored."""

    def add(self, key: str, ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> Iterable[Progress]: ...


class _Live:
    __slots__ = ("first", "num_cached", "num_output", "start")

    def __init__(self, start: float) -> None:
        self.start, self.first = start, 0.0
        self.num_output = self.num_cached = 0

    def record(self, end: float) -> dict[str, float]:
        return {"ttft": self.first - self.start, "e2e": end - self.start, "num_output": self.num_output,
                "num_cached": self.num_cached}  # fmt: skip


def drive(engine: SteppedEngine, requests: list[dict[str, Any]], concurrency: int) -> list[dict[str, float]]:
    """Keep `concurrency` requests under way until all are done. Raises RuntimeError if tokens are missing."""
    waiting = iter(enumerate(requests))
    live: dict[str, _Live] = {}
    records = []
    is_fed = False
    while live or not is_fed:
        while len(live) < concurrency and not is_fed:
            number, request = next(waiting, (0, None))
            if request is None:
                is_fed = True
                break
            key = f"{number}-{time.monotonic_ns()}"
            live[key] = _Live(time.perf_counter())
            engine.add(key, request["ids"], request["max_tokens"])
        if not live:
            break
        progress = list(engine.step())
        now = time.perf_counter()
        for key, num_new, is_finished, num_cached in progress:
            entry = live[key]
            if num_new and not entry.num_output:
                entry.first = now
            entry.num_output += num_new
            entry.num_cached = max(entry.num_cached, num_cached)
            if is_finished:
                records.append(live.pop(key).record(now))
    expected = sum(request["max_tokens"] for request in requests)
    seen = sum(int(record["num_output"]) for record in records)
    if seen != expected:
        raise RuntimeError(f"{seen} output tokens, {expected} asked for")
    return records


class CpuWatch:
    """Shares of the machine's CPU time between enter and exit: this process and its children, others, steal.

    A wall-clock figure taken while others were busy is no figure of the engine.
    """

    def __enter__(self) -> CpuWatch:
        self._start, self._before, self._own = time.perf_counter(), _machine_ticks(), _own_ticks()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
        busy, steal = (after - before for after, before in zip(_machine_ticks(), self._before))
        capacity = os.sysconf("SC_CLK_TCK") * self.seconds * (os.cpu_count() or 1)
        own = (_own_ticks() - self._own) / capacity
        self.shares = {"own": own, "others": max(0.0, busy / capacity - own), "steal": steal / capacity}


def _machine_ticks() -> tuple[int, int]:
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:]]
    return sum(ticks[:3]) + sum(ticks[5:7]), ticks[7]


def _own_ticks() -> int:
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(fields[1]), []).append(int(name))
            used[int(name)] = sum(int(ticks) for ticks in fields[11:15])  # with children that have ended
    total, pending = 0, [os.getpid()]
    while pending:
        process = pending.pop()
        total += used.get(process, 0)
        pending += children.get(process, ())
    return total


def take_stdout() -> TextIO:
    """The real standard output for this protocol alone; whatever else is printed goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


RunFunction = Callable[[list[dict[str, Any]], int, bool], list[dict[str, float]]]


def serve(channel: TextIO, ready: dict[str, Any], run: RunFunction) -> None:
    """Answer commands until "quit" or the end of input by run(requests, concurrency, use_prefix_cache)."""
    _send(channel, {"ready": ready})
    for command in _commands(sys.stdin):
        requests, num_priming = command["requests"], command["num_priming"]
        try:
            with CpuWatch() as watch:
                records = []
                if num_priming:
                    records += run(requests[:num_priming], 1, command["use_prefix_cache"])
                records += run(requests[num_priming:], command["concurrency"], command["use_prefix_cache"])
            _send(channel, {"seconds": watch.seconds, "records": records, "cpu": watch.shares})
        except Exception as error:
            traceback.print_exc()
            _send(channel, {"error": f"{type(error).__name__}: {error}"})


def _commands(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        command = json.loads(line)
        if command["op"] == "quit":
            return
        yield command


def _send(channel: TextIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()
