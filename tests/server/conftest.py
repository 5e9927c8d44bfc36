"""One toy server for most tests; it must be alive and idle after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, serving, wait_for
from toy_model import write_toy_tokenizer


@pytest.fixture(scope="session")
def toy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def _shared(toy_tokenizer: Path) -> Iterator[Live]:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer))
    with serving(settings) as live:
        yield live.wait_ready()


@pytest.fixture
def live(_shared: Live) -> Iterator[Live]:
    yield _shared
    assert _shared.http.get("/ready").status_code == 200
    wait_for(lambda: _shared.state.client.num_in_flight == 0)
