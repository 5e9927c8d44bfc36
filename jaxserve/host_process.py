"""Hosts other than the first: they compute what host 0 decides, and are started again when the group breaks.

`jaxserve serve MODEL --num-hosts N --host-id I ...` with I > 0 ends here: supervise() keeps one child process,
`python -m jaxserve.host_process --config JSON`, alive. The child ends

    0  when host 0 has closed the engine: then supervise() returns
    4  when a host of the group was lost (runner/host_link.py): it is started again and waits for host 0
    1  for anything else: started again, but given up after MAX_FAILURES within FAILURE_WINDOW_S
    2  when its options are wrong: given up at once
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from types import FrameType

from jaxserve.config import EngineConfig
from jaxserve.engine_link import parse_config

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
RESTART_DELAY_S = 1.0
MAX_FAILURES, FAILURE_WINDOW_S = 5, 600.0


def supervise(config: EngineConfig) -> int:
    """Run this host's part until the engine is closed. Returns an exit status."""
    command = [sys.executable, "-m", "jaxserve.host_process", "--config", json.dumps(dataclasses.asdict(config))]
    failures: deque[float] = deque()
    child: subprocess.Popen[bytes] | None = None
    is_stopping = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True
        if child is not None:
            child.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not is_stopping:
        child = subprocess.Popen(command)
        logger.info("host %d of %d: process %d", config.host_id, config.num_hosts, child.pid)
        status = child.wait()
        if is_stopping or status in (EXIT_OK, EXIT_USAGE):
            return EXIT_OK if is_stopping else status
        now = time.monotonic()
        failures.append(now)
        while now - failures[0] > FAILURE_WINDOW_S:
            failures.popleft()
        if len(failures) > MAX_FAILURES:
            logger.error("host %d ended %d times in %g s; given up", config.host_id, len(failures), FAILURE_WINDOW_S)
            return EXIT_FAILED
        logger.error("host %d ended with status %d; started again", config.host_id, status)
        time.sleep(RESTART_DELAY_S)
    return EXIT_OK


def main(arguments: list[str] | None = None) -> int:
    """Compute host 0's steps; returns the exit status."""
    parser = argparse.ArgumentParser(prog="jaxserve.host_process", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", required=True, help="EngineConfig: JSON, or the path of a JSON or msgpack file")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    try:
        config = parse_config(options.config)
        if not 0 < config.host_id < config.num_hosts:
            raise ValueError(f"host_id: got {config.host_id} of {config.num_hosts} hosts; allowed: 1 or more here")
    except (ValueError, OSError) as error:
        print(f"jaxserve.host_process: {error}", file=sys.stderr)
        return EXIT_USAGE
    from jaxserve.engine_process import watch_parent
    from jaxserve.runner.host_link import EXIT_HOST_LOST, HostLost
    from jaxserve.runner.runner import ModelRunner

    watch_parent(os.getppid())
    try:
        runner = ModelRunner(config)
        runner.follow()
    except HostLost as lost:
        print(f"jaxserve host {config.host_id}: {lost}", file=sys.stderr, flush=True)
        return EXIT_HOST_LOST
    except Exception:
        logger.exception("host %d cannot go on", config.host_id)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    # A lost group leaves nothing behind that could be ended in order: devices may wait for ever.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)
