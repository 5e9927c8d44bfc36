"""Requests about a stored response reach the worker that has it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from cluster import ADMIN, Cluster, wait_for
from fake_worker import FakeWorker
from jaxserve.server.router.response_homes import named_response

from jaxserve.routing.homes import Homes


def create(cluster: Cluster, text: str = "hello", **fields: Any) -> Any:
    answer = cluster.http.post("/v1/responses", json={"model": "m", "input": text, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def owner(cluster: Cluster, name: str) -> FakeWorker:
    return next(worker for worker in cluster.workers if name in worker.responses)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_a_conversation_stays_with_the_worker_that_stores_it(cluster: Cluster, policy: str, is_stream: bool) -> None:
    workers = cluster.start_workers(3)
    for worker in workers:
        worker.gap_s = 0.02  # the pieces of a stream arrive one by one
    with cluster.router(policy=policy):
        for number in range(6):
            text = f"{number} is where this begins, " * 20
            if is_stream:
                body = {"input": text, "stream": True}
                with cluster.http.stream("POST", "/v1/responses", json=body) as answer:
                    events = b"".join(answer.iter_bytes()).decode()
                first = events.partition("data: ")[2].partition("\n")[0]
                name = json.loads(first)["response"]["id"]
            else:
                name = create(cluster, text)["id"]
            home = owner(cluster, name)
            for turn in range(3):
                found = create(cluster, f"and {turn}", previous_response_id=name)
                assert found["worker"] == home.name
                name = found["id"]
            assert cluster.http.get(f"/v1/responses/{name}").json()["worker"] == home.name
            assert cluster.http.get(f"/v1/responses/{name}/input_items?limit=1").json()["worker"] == home.name
            assert cluster.http.post(f"/v1/responses/{name}/cancel", json={}).json()["worker"] == home.name
            assert cluster.http.delete(f"/v1/responses/{name}").json()["worker"] == home.name
        # Nobody was asked in vain: the router has read the ids of what it handed on.
        assert sum(len(worker.asked) for worker in workers) == 6 * 4


def test_a_router_that_has_not_seen_a_response_asks_for_it_once(cluster: Cluster) -> None:
    workers = cluster.start_workers(3)
    workers[2].responses.add("resp_old")
    with cluster.router(policy="round_robin"):
        for _ in range(4):
            assert create(cluster, previous_response_id="resp_old")["worker"] == "w2"
        assert [worker.asked for worker in workers] == [["GET /v1/responses/resp_old"]] * 3


def test_of_a_response_that_nobody_has_a_worker_says_so(cluster: Cluster) -> None:
    cluster.start_workers(2)
    with cluster.router():
        body = {"input": "hello", "previous_response_id": "resp_nowhere"}
        answer = cluster.http.post("/v1/responses", json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "response_not_found"
        assert cluster.http.get("/v1/responses/resp_nowhere").status_code == 404


def test_a_worker_that_is_drained_still_continues_its_own(cluster: Cluster) -> None:
    workers = cluster.start_workers(2)
    with cluster.router():
        name = create(cluster)["id"]
        home = owner(cluster, name)
        home.delay_s = 1.0
        busy = threading.Thread(target=create, args=(cluster,), kwargs={"previous_response_id": name})
        busy.start()
        wait_for(lambda: len(home.requests) == 2)
        home.delay_s = 0.0
        cluster.http.post("/workers/drain", json={"url": home.url, "timeout_s": 10}, headers=ADMIN)
        assert create(cluster, previous_response_id=name)["worker"] == home.name
        assert create(cluster)["worker"] != home.name
        busy.join()
        wait_for(lambda: len(cluster.app.fleet.workers) == 1)
        # It has gone, and what it had: the other one says so.
        answer = cluster.http.post("/v1/responses", json={"input": "and", "previous_response_id": name})
        assert answer.status_code == 404
    assert sum(len(worker.requests) for worker in workers) == 5


def test_a_request_waits_for_the_one_worker_that_can_serve_it(cluster: Cluster) -> None:
    cluster.start_workers(2)
    with cluster.router(queue_timeout_s=5.0):
        name = create(cluster)["id"]
        home = owner(cluster, name)
        home.is_ready = False
        wait_for(lambda: cluster.state(home) == "not_ready")
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(create(cluster, previous_response_id=name)))
        waiting.start()
        assert create(cluster)["worker"] != home.name  # others do not wait behind it
        assert not found
        home.is_ready = True
        waiting.join()
        assert found[0]["worker"] == home.name


def test_full_queues_at_home_are_told_to_the_client_after_the_time_to_wait(cluster: Cluster) -> None:
    cluster.start_workers(2)
    with cluster.router(queue_timeout_s=0.4):
        name = create(cluster)["id"]
        home = owner(cluster, name)
        home.behaviour = "queue_full"
        answer = cluster.http.post("/v1/responses", json={"input": "x", "previous_response_id": name})
        assert answer.status_code == 503
        assert 2 <= len(home.requests) <= 10  # tried again, after pauses


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", b'{"input": "x", "previous_response_id": "resp_1"}', "resp_1"),
        ("/v1/responses/input_tokens", b'{"previous_response_id": "resp_1"}', "resp_1"),
        ("/v1/responses/resp_2", b"", "resp_2"),
        ("/v1/responses/resp_2/cancel", b'{"previous_response_id": "resp_1"}', "resp_2"),
        ("/v1/responses", b'{"input": "x"}', ""),
        ("/v1/responses", b"{", ""),
        ("/v1/responses", b'{"previous_response_id": 7}', ""),
        ("/v1/responses", b'{"previous_response_id": "a b\\r\\n"}', ""),
        ("/v1/responses/..%2f..%2fworkers", b"", ""),
        ("/v1/completions", b'{"previous_response_id": "resp_1"}', ""),
    ],
)
def test_the_response_that_a_request_is_about(path: str, body: bytes, name: str) -> None:
    assert named_response(path, body) == name


def test_homes_forget_what_was_used_least_recently() -> None:
    homes = Homes(capacity=3)
    for name in "abc":
        homes.note(name, f"worker of {name}")
    assert homes.find("a") == "worker of a"
    homes.note("d", "worker of a")
    assert [homes.find(name) for name in "abcd"] == ["worker of a", "", "worker of c", "worker of a"]
    homes.note("e", "worker of a")
    homes.remove_worker("worker of a")
    assert len(homes) == 1 and homes.find("c")
    with pytest.raises(ValueError, match="capacity: got 0"):
        Homes(capacity=0)
