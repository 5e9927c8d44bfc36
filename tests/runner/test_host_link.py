"""Two ends of a host link in one process: who is let in, what they agree on, and how each kind of loss is noticed."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxserve.config import EngineConfig
from jaxserve.runner import host_link
from jaxserve.runner.host_link import HostLink, HostLost

WAIT_S = 5.0


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have ended the process."""
    found: list[str] = []
    monkeypatch.setattr(HostLink, "_end_process", lambda self, reason: found.append(reason))
    monkeypatch.setattr(host_link, "BEAT_S", 0.05)
    monkeypatch.setattr(host_link, "SILENT_S", 0.4)
    return found


def config() -> EngineConfig:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return EngineConfig(model="m", mesh="data=2", num_hosts=2, coordinator=f"127.0.0.1:{port}", compare_hosts=True)


def join(first: EngineConfig, **changes: object) -> list[HostLink | HostLost]:
    """What each host gets, the second with other options."""
    configs = [first, dataclasses.replace(first, host_id=1, **changes)]
    found: list[HostLink | HostLost | None] = [None, None]

    def one(index: int) -> None:
        try:
            found[index] = HostLink.join(configs[index])
        except HostLost as lost:
            found[index] = lost

    threads = [threading.Thread(target=one, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert None not in found
    return found


@pytest.fixture
def links() -> Iterator[list[HostLink]]:
    found = join(config())
    for link in found:
        link.start_serving()
    yield found
    for link in found:
        link.close()


def lost(link: HostLink) -> str:
    """Why check() raises, once it does."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            link.check()
        except HostLost as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("nothing was lost")


def test_steps_arrive_in_order_until_the_engine_is_closed(links: list[HostLink]) -> None:
    steps = [bytes([n]) * n for n in range(1, 20)]
    for step in steps:
        links[0].send_step(step)
    assert [links[1].receive_step() for _ in steps] == steps
    links[0].close()
    assert links[1].receive_step() is None
    links[1].check()  # an end in order is no loss


def test_hosts_agree_on_the_least_value(links: list[HostLink]) -> None:
    agreed: list[int] = []
    other = threading.Thread(target=lambda: agreed.append(links[1].agree(7)))
    other.start()
    assert links[0].agree(9) == 7
    other.join(WAIT_S)
    assert agreed == [7]


def test_a_host_with_other_options_is_refused() -> None:
    first, second = join(config(), max_num_rows=3)
    for one in (first, second):
        assert isinstance(one, HostLost) and "host 1 (127.0.0.1) was started with other options" in str(one)


def test_equal_steps_are_no_error_and_another_step_is_one_on_both_hosts(links: list[HostLink]) -> None:
    for number, own in ((1, b"one"), (2, b"two")):
        links[0].send_step(own)
        body = links[1].receive_step()
        assert body == own
        links[1].report_digest(number, hashlib.sha256(b"one").hexdigest())
    wanted = "host 1 (127.0.0.1) computes another step 2 than host 0"
    assert [lost(link) for link in links] == [wanted, wanted]


def test_a_host_that_is_gone_is_an_error_on_both(links: list[HostLink], ended: list[str]) -> None:
    links[1]._connections[0].close()  # as when its process is killed
    assert lost(links[0]).startswith("host 1 (127.0.0.1) was lost")
    with pytest.raises(HostLost):
        links[0].send_step(b"x")
    assert lost(links[1]).startswith("host 0 (127.0.0.1) was lost")
    with pytest.raises(HostLost):
        links[1].receive_step()
    deadline = time.monotonic() + WAIT_S
    while len(ended) < 2:  # each end's own thread does it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_host_is_lost(links: list[HostLink]) -> None:
    """A machine that hangs keeps its connections."""
    time.sleep(5 * host_link.BEAT_S)  # the limit of serving holds from the next beat on
    links[1]._is_closed = True  # stops its beats
    assert lost(links[0]) == "host 1 (127.0.0.1) was lost: no sign of life"
