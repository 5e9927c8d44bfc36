"""Many hosts, one engine: host 0 sends each step to the others over TCP, and all notice when one is gone. No jax.

The first host listens, the others connect. A frame is its length (4 bytes), its kind (1 byte) and its body. Every
host sends a beat each BEAT_S; a connection that ends, or that is silent for SILENT_S, is a lost host. Host 0 tells the
others whom it lost, so that every host says the same. Nothing can go on without all hosts: whoever notices a loss makes
check() raise, and ends the process EXIT_AFTER_S later if it is still there, for a device may wait for ever for the lost
host's part of a sum. Supervisors start the processes again (jaxserve/host_process.py, server/supervisor.py).

Connections are plain TCP between the machines of one group, as the devices' own traffic is. All must bring the same
options, and the same JAXSERVE_GROUP_KEY if there is one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig

logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENT_S = 8.0
STARTING_SILENT_S = 120.0  # while models are loaded and compiled, Python threads may stand still for long
EXIT_AFTER_S = 3.0
JOIN_S = 600.0  # for all hosts to come: one of them may still be starting again
EXIT_HOST_LOST = 4

_HEAD = struct.Struct(">IB")
HELLO, WELCOME, BEAT, STEP, VALUE, DIGEST, LOST, CLOSE = range(8)
_MAX_FRAME = 2**30


class HostLost(RuntimeError):
    """A host of the group is gone, or the hosts disagree; nothing can be computed any more."""


def address_of(coordinator: str) -> tuple[str, int]:
    """ "node0:7700" -> ("node0", 7700)."""
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ValueError(f"coordinator: got {coordinator!r}; allowed: HOST:PORT with a port of 1 to 65534")
    return host, int(port)


def group_digest(config: EngineConfig) -> str:
    """Equal on hosts that may work together: all options but the host's own number, folders and files, what is in the
    plan of experts' copies, and the group's key."""
    options = dataclasses.asdict(config) | {"host_id": 0, "compile_cache_dir": None, "expert_load": ""}
    if config.expert_replicas:
        options["expert_replicas"] = Path(config.expert_replicas).read_text()
    text = json.dumps(options, sort_keys=True) + os.environ.get("JAXSERVE_GROUP_KEY", "")
    return hashlib.sha256(text.encode()).hexdigest()


class Connection:
    """Frames over one socket. send() may be called from several threads."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(STARTING_SILENT_S)
        self.name = name
        self._socket = connected
        self._lock = threading.Lock()

    def send(self, kind: int, body: bytes = b"") -> None:
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(body), kind) + body)

    def receive(self) -> tuple[int, bytes]:
        """The next frame. Raises OSError (TimeoutError after a silence) or EOFError."""
        size, kind = _HEAD.unpack(self._read(_HEAD.size))
        if size > _MAX_FRAME:
            raise OSError(f"a frame of {size} bytes")
        return kind, self._read(size)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError("the connection ended")
            parts += part
        return bytes(parts)

    def expect_beats(self) -> None:
        """From now on SILENT_S of silence is a loss."""
        self._socket.settimeout(SILENT_S)

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class HostLink:
    """This host's connections: to every other host on host 0, to host 0 on the others.

    join() makes it; check() raises HostLost once a host is gone. The owner's thread calls everything else.
    """

    def __init__(self, connections: list[Connection], host_id: int, *, compares_digests: bool = False) -> None:
        self.host_id = host_id
        self._connections = connections
        self._compares = compares_digests
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._values: dict[str, queue.SimpleQueue[int]] = {one.name: queue.SimpleQueue() for one in connections}
        self._lost: str | None = None
        self._is_closed = False
        self._state = threading.Lock()
        self._num_sent = 0
        self._digests: dict[int, str] = {}
        for connection in connections:
            threading.Thread(target=self._listen, args=(connection,), name="host-link", daemon=True).start()
        threading.Thread(target=self._beat, name="host-beat", daemon=True).start()

    @classmethod
    def join(cls, config: EngineConfig) -> HostLink:
        """Wait for all hosts of the group. Raises HostLost naming those that do not come, or bring other options."""
        host, port = address_of(config.coordinator)
        digest = group_digest(config)
        if config.host_id:
            connections = [_connect(host, port, config.host_id, digest)]
        else:
            connections = _accept_all(port, config.num_hosts, digest)
        return cls(connections, config.host_id, compares_digests=config.compare_hosts)

    def check(self) -> None:
        """Raise HostLost if a host is gone."""
        if self._lost is not None:
            raise HostLost(self._lost)

    def start_serving(self) -> None:
        """Everything is loaded and compiled: a silent host is noticed soon."""
        for connection in self._connections:
            connection.expect_beats()

    def send_step(self, body: bytes) -> None:
        """On host 0: hand a step to all other hosts."""
        self.check()
        self._num_sent += 1
        if self._compares:
            self._digests[self._num_sent] = hashlib.sha256(body).hexdigest()
            self._digests.pop(self._num_sent - 1000, None)
        for connection in self._connections:
            self._try_send(connection, STEP, body)

    def receive_step(self) -> bytes | None:
        """On the others: the next step; None: the engine was closed. Raises HostLost."""
        body = self._steps.get()
        if body is None:
            self.check()
        return body

    def report_digest(self, number: int, digest: str) -> None:
        """On the others, with compare_hosts: what this host made of step `number` (from 1)."""
        self._try_send(self._connections[0], DIGEST, f"{number} {digest}".encode())

    def agree(self, value: int) -> int:
        """The least value of all hosts, once all have come here. All hosts call it in the same order."""
        if self.host_id:
            self._try_send(self._connections[0], VALUE, str(value).encode())
            return self._next_value(self._connections[0])
        least = min([value, *(self._next_value(connection) for connection in self._connections)])
        for connection in self._connections:
            self._try_send(connection, VALUE, str(least).encode())
        return least

    def close(self) -> None:
        """End the group in order: the other hosts end as well."""
        with self._state:
            self._is_closed = True
        for connection in self._connections:
            if not self.host_id and self._lost is None:
                try:
                    connection.send(CLOSE)
                except OSError:
                    pass
            connection.close()
        self._steps.put(None)

    def _next_value(self, connection: Connection) -> int:
        while True:
            self.check()
            try:
                return self._values[connection.name].get(timeout=BEAT_S)
            except queue.Empty:
                continue

    def _try_send(self, connection: Connection, kind: int, body: bytes) -> None:
        try:
            connection.send(kind, body)
        except OSError as error:
            self._lose(f"{connection.name} was lost: {error}")
            self.check()

    def _beat(self) -> None:
        while not self._is_closed and self._lost is None:
            for connection in self._connections:
                try:
                    connection.send(BEAT)
                except OSError as error:
                    self._lose(f"{connection.name} was lost: {error}")
            time.sleep(BEAT_S)

    def _listen(self, connection: Connection) -> None:
        handlers: dict[int, Callable[[bytes], Any]] = {
            STEP: self._steps.put,
            VALUE: lambda body: self._values[connection.name].put(int(body)),
            DIGEST: lambda body: self._compare(connection, body),
            LOST: lambda body: self._lose(body.decode()),
            BEAT: lambda body: None,
        }
        try:
            while True:
                kind, body = connection.receive()
                if kind == CLOSE:
                    with self._state:
                        self._is_closed = True
                    self._steps.put(None)
                    return
                handlers[kind](body)
        except TimeoutError:
            self._lose(f"{connection.name} was lost: no sign of life")
        except (OSError, EOFError) as error:
            self._lose(f"{connection.name} was lost: {error}")

    def _compare(self, connection: Connection, body: bytes) -> None:
        number, _, digest = body.decode().partition(" ")
        own = self._digests.get(int(number))
        if own is not None and own != digest:
            self._lose(f"{connection.name} computes another step {number} than host 0")

    def _lose(self, reason: str) -> None:
        with self._state:
            if self._is_closed or self._lost is not None:
                return
            self._lost = reason
        logger.error("%s; this host cannot go on without it", reason)
        for connection in self._connections:
            if not self.host_id:
                try:
                    connection.send(LOST, reason.encode())
                except OSError:
                    pass
        self._steps.put(None)
        threading.Thread(target=self._end_process, args=(reason,), name="host-lost", daemon=True).start()

    def _end_process(self, reason: str) -> None:
        time.sleep(EXIT_AFTER_S)
        if not self._is_closed:
            print(f"jaxserve host {self.host_id}: {reason}; ending this process", file=sys.stderr, flush=True)
            os._exit(EXIT_HOST_LOST)


def _accept_all(port: int, num_hosts: int, digest: str) -> list[Connection]:
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + JOIN_S
    with socket.create_server(("", port), backlog=num_hosts, reuse_port=False) as server:
        while len(found) < num_hosts - 1:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                accepted, peer = server.accept()
            except TimeoutError:
                missing = [str(host) for host in range(1, num_hosts) if host not in found]
                raise HostLost(f"hosts {', '.join(missing)} did not come within {JOIN_S:g} s") from None
            host_id = _greet(accepted, peer[0], num_hosts, digest, found)
            if host_id:
                logger.info("host %d of %d is here (%s)", host_id, num_hosts, peer[0])
    for connection in found.values():
        connection.send(WELCOME)
    return [found[host] for host in sorted(found)]


def _greet(accepted: socket.socket, peer: str, num_hosts: int, digest: str, found: dict[int, Connection]) -> int:
    """Take a host into `found`; 0 if what connected is none of ours."""
    connection = Connection(accepted, peer)
    try:
        kind, body = connection.receive()
        host_id, _, their_digest = body.decode().partition(" ")
        number = int(host_id) if kind == HELLO and host_id.isdecimal() else 0
    except (OSError, EOFError, UnicodeDecodeError):
        connection.close()
        return 0
    if not 0 < number < num_hosts:
        logger.warning("%s connected as host %r of %d: refused", peer, host_id, num_hosts)
        connection.close()
        return 0
    if their_digest != digest:
        reason = f"host {number} ({peer}) was started with other options, or another JAXSERVE_GROUP_KEY, than host 0"
        connection.send(LOST, reason.encode())
        connection.close()
        raise HostLost(reason)
    connection.name = f"host {number} ({peer})"
    if number in found:
        found[number].close()  # it has started again while others were awaited
    found[number] = connection
    return number


def _connect(host: str, port: int, host_id: int, digest: str) -> Connection:
    deadline = time.monotonic() + JOIN_S
    name = f"host 0 ({host})"
    while True:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=SILENT_S), name)
            connection.send(HELLO, f"{host_id} {digest}".encode())
            return _wait_for_welcome(connection, deadline)
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise HostLost(f"{name} cannot be reached at port {port}: {error}") from None
            time.sleep(BEAT_S)


def _wait_for_welcome(connection: Connection, deadline: float) -> Connection:
    """Others may still be awaited, so silence is no loss here. Raises EOFError if host 0 has gone away."""
    while time.monotonic() < deadline:
        try:
            kind, body = connection.receive()
        except TimeoutError:
            continue
        if kind == WELCOME:
            return connection
        if kind == LOST:
            raise HostLost(body.decode())
    raise HostLost(f"{connection.name} did not start within {JOIN_S:g} s")
