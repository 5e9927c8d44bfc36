"""What the router costs: the same streams to a worker directly and through the router, at a fixed rate.

    python benchmarks/router_overhead.py [--rate 500] [--seconds 10] [--chunks 8] [--cores]

Worker, router and load generator are processes of their own; with --cores the router has one core for itself. The
worker is a plain asyncio server that writes a canned stream at once, so that what is left is transport. Reported are
medians over requests of the time to the first piece and to the end, both ways in turn, and the router's CPU share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)


class _Worker(asyncio.Protocol):
    """Answers each POST with a stream; each GET with an empty answer."""

    num_chunks, gap_s = 8, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            self._data = self._data[end + 4 + length :]
            if head.startswith(b"get"):
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            self._transport.write(_HEAD + _CHUNK)
            self._next(self.num_chunks - 1)

    def _next(self, left: int) -> None:
        if not left:
            self._transport.write(b"0\r\n\r\n")
            return
        self._transport.write(_CHUNK)
        asyncio.get_running_loop().call_later(self.gap_s, self._next, left - 1)


async def _serve_worker(chunks: int, gap_s: float) -> None:
    _Worker.num_chunks, _Worker.gap_s = chunks, gap_s
    server = await asyncio.get_running_loop().create_server(_Worker, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class _Client(asyncio.Protocol):
    """One kept-open connection of the load generator."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._done: asyncio.Future[None] | None = None
        self.first = 0.0
        self._tail = b""

    def ask(self, data: bytes) -> asyncio.Future[None]:
        self.first = 0.0
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = time.perf_counter()
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n" and self._done is not None and not self._done.done():
            self._done.set_result(None)


async def _measure(port: int, rate: float, seconds: float, body_bytes: int) -> tuple[list[float], list[float]]:
    """Times to first piece and to end, in seconds; requests leave at fixed times whether or not others are done."""
    loop = asyncio.get_running_loop()
    idle: list[_Client] = []
    firsts: list[float] = []
    ends: list[float] = []

    async def one(number: int) -> None:
        client = idle.pop() if idle else (await loop.create_connection(_Client, "127.0.0.1", port))[1]
        text = f"{number % 50} " * (body_bytes // 3)
        body = json.dumps({"model": "m", "prompt": text, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}"
        start = time.perf_counter()
        await asyncio.wait_for(client.ask(head.encode() + b"\r\n\r\n" + body), 30)
        end = time.perf_counter()
        firsts.append(client.first - start)
        ends.append(end - start)
        idle.append(client)

    begin = time.perf_counter()
    tasks = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    return firsts, ends


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--gap", type=float, default=0.005, help="seconds between two pieces")
    parser.add_argument("--body-bytes", type=int, default=4096)
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--cores", action="store_true", help="the router gets core 0, the rest another one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        uvloop.run(_serve_worker(options.chunks, options.gap))
        return
    flags = ["--chunks", str(options.chunks), "--gap", str(options.gap)]
    worker = subprocess.Popen([sys.executable, __file__, "--worker", *flags], stdout=subprocess.PIPE, text=True)
    router = None
    try:
        assert worker.stdout is not None
        direct = int(worker.stdout.readline())
        command = [sys.executable, "-m", "jaxserve.cli", "router", "--workers", f"http://127.0.0.1:{direct}"]
        command += ["--port", "0", "--route", options.policy]
        router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert router.stderr is not None
        line = next(text for text in router.stderr if "router on" in text)
        through = int(line.split("://")[1].split(" ")[0].rpartition(":")[2])
        if options.cores:
            os.sched_setaffinity(router.pid, {0})
            others = set(range(1, os.cpu_count() or 1)) or {0}
            os.sched_setaffinity(worker.pid, others)
            os.sched_setaffinity(0, others)
        time.sleep(2.0)
        _report(options, direct, through, router.pid)
    finally:
        worker.kill()
        if router is not None:
            router.kill()


def _report(options: argparse.Namespace, direct: int, through: int, pid: int) -> None:
    rows = []
    for _ in range(options.rounds):
        row = []
        for port in (direct, through):
            used = _cpu_seconds(pid)
            begin = time.perf_counter()
            firsts, ends = uvloop.run(_measure(port, options.rate, options.seconds, options.body_bytes))
            share = (_cpu_seconds(pid) - used) / (time.perf_counter() - begin)
            row.append((statistics.median(firsts), statistics.median(ends), share, sorted(firsts)[-len(firsts) // 100]))
        rows.append(row)
        (f0, e0, _, p0), (f1, e1, cpu, p1) = row
        print(
            f"first piece p50 {1e3 * f0:.2f} -> {1e3 * f1:.2f} ms (+{1e3 * (f1 - f0):.2f}), p99 {1e3 * p0:.1f} -> "
            f"{1e3 * p1:.1f} ms; end p50 {1e3 * e0:.2f} -> {1e3 * e1:.2f} ms (+{1e3 * (e1 - e0):.2f}); "
            f"router's CPU {cpu:.2f} core"
        )
    added = [1e3 * (row[1][0] - row[0][0]) for row in rows]
    cpu = statistics.median(row[1][2] for row in rows)
    print(
        f"{options.rate:g} requests/s, {options.chunks} pieces each: the router adds {statistics.median(added):.2f} ms "
        f"to the first piece (median of {options.rounds} rounds), {1e3 * cpu / options.rate:.2f} ms CPU per request"
    )


if __name__ == "__main__":
    main()
