"""A server process for tests: python serve.py JSON, with the fields of settings and config."""

from __future__ import annotations

import json
import sys

from jaxserve.server.app import ServerSettings, run_server

from jaxserve.config import EngineConfig

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in given["settings"].items()}
    sys.exit(run_server(EngineConfig(**given["config"]), ServerSettings(**settings)))
