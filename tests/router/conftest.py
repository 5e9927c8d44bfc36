"""One event loop for all fake workers and routers of these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from cluster import Cluster
from fake_worker import running_loop


@pytest.fixture(scope="session")
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    with running_loop() as loop:
        yield loop


@pytest.fixture
def cluster(_loop: asyncio.AbstractEventLoop) -> Iterator[Cluster]:
    cluster = Cluster(_loop)
    yield cluster
    for worker in cluster.workers:
        if worker._server is not None:
            cluster.run(worker.kill())
