"""One replica of `jaxserve serve --replicas N`: a server that ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from jaxserve.server.app import run_server
from jaxserve.server.settings import ServerSettings

from jaxserve.config import EngineConfig

_PARENT_POLL_S = 0.5


def _watch_parent(parent: int) -> None:
    """End as after SIGTERM when process `parent` is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    """A replica: serve what the JSON at standard input says."""
    given = json.loads(sys.stdin.buffer.read())
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in given["settings"].items()}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the router tells when to end
    _watch_parent(os.getppid())
    return run_server(EngineConfig(**given["config"]), ServerSettings(**settings))


if __name__ == "__main__":
    sys.exit(main())
