"""How a front end and the engine's process find each other. No jax.

The front end makes a folder that only its user can enter, binds a PAIR socket in it, and starts
`python -m jaxserve.engine_process`, which connects. One pair lasts as long as one engine: a restarted engine gets
a new address, so nothing meant for the dead one can reach it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from jaxserve.config import EngineConfig

IPC_PREFIX = "ipc://"


def make_private_folder() -> Path:
    """A new folder (mode 0700) for sockets. The caller removes it."""
    return Path(tempfile.mkdtemp(prefix="jaxserve-"))


def check_address(address: str) -> None:
    """Raise ValueError unless `address` is ipc inside a folder that no other user can enter."""
    if not address.startswith(IPC_PREFIX):
        raise ValueError(f"socket: got {address!r}; allowed: {IPC_PREFIX}PATH")
    folder = Path(address.removeprefix(IPC_PREFIX)).parent
    try:
        status = folder.stat()
    except OSError as error:
        raise ValueError(f"socket: got {address!r}; its folder cannot be used: {error}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"socket: got {address!r}; allowed: a socket in a folder of this user with mode 0700")


def open_socket(context: zmq.Context, address: str, *, bind: bool) -> zmq.Socket:
    """A PAIR socket without limits on its queues: the engine must never wait for a slow reader."""
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)  # milliseconds for the last outputs to leave
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def engine_command(config: EngineConfig, address: str) -> list[str]:
    """The command line that serves `config` to the socket bound at `address`, as a child of this process."""
    options = json.dumps(dataclasses.asdict(config))
    return [
        sys.executable, "-m", "jaxserve.engine_process",
        "--config", options, "--socket", address, "--parent", str(os.getpid()),
    ]  # fmt: skip


def parse_config(text: str) -> EngineConfig:
    """EngineConfig from JSON, or from the path of a JSON or msgpack file. Raises ValueError naming the field."""
    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text, type=EngineConfig)
    data = Path(text).read_bytes()
    decoder = msgspec.json if data.lstrip().startswith(b"{") else msgspec.msgpack
    return decoder.decode(data, type=EngineConfig)
