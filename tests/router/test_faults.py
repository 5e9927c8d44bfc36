"""Workers that die, refuse, hang and come back: what has not begun to be answered is never lost."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from cluster import Cluster, wait_for


def test_a_worker_killed_in_the_middle_of_a_stream_ends_that_stream_with_an_error(cluster: Cluster) -> None:
    first, second = cluster.start_workers(2)
    first.behaviour = second.behaviour = "cut"
    with cluster.router():
        events = cluster.stream()
        assert [event.get("n") for event in events[:-1]] == [0, 1]
        assert events[-1]["error"]["code"] == "worker_lost"
        assert "[DONE]" not in events
        assert len(first.requests) + len(second.requests) == 1  # what has begun is not tried again
        assert cluster.metric("jaxserve_router_cut_total") == 1


def test_a_plain_answer_that_breaks_is_not_passed_off_as_whole(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    worker.behaviour = "cut_whole"
    with cluster.router(), pytest.raises(httpx.RemoteProtocolError):
        cluster.post()


def test_a_worker_that_closes_without_an_answer_is_left_for_another(cluster: Cluster) -> None:
    first, second = cluster.start_workers(2)
    first.behaviour = "refuse"
    with cluster.router(policy="round_robin"):
        for _ in range(4):
            assert cluster.post().json()["worker"] == second.name
        assert len(first.requests) >= 1


def test_a_worker_that_answers_503_is_left_for_another(cluster: Cluster) -> None:
    first, _ = cluster.start_workers(2)
    first.behaviour = "503"
    with cluster.router(policy="round_robin", probe_interval_s=30.0):
        assert [cluster.post().status_code for _ in range(6)] == [200] * 6
        assert len(first.requests) == 1  # it says that it is not ready: it is asked again after a good probe
        assert cluster.state(first) == "not_ready"


def test_full_queues_everywhere_are_told_to_the_client_after_the_time_to_wait(cluster: Cluster) -> None:
    cluster.start_workers(2)
    for worker in cluster.workers:
        worker.behaviour = "queue_full"
    with cluster.router(queue_timeout_s=0.3):
        answer = cluster.post()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        assert all(worker.requests for worker in cluster.workers)


def test_a_request_waits_for_a_worker_that_comes_back(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router():
        cluster.run(worker.kill())
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(cluster.post()))
        waiting.start()
        wait_for(lambda: cluster.app.fleet.num_waiting == 1)
        cluster.run(worker.start())
        waiting.join(10)
        assert answers[0].status_code == 200


def test_without_any_worker_the_answer_is_503(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    cluster.run(worker.kill())
    with cluster.router(wait=False, queue_timeout_s=0.2):
        assert cluster.http.get("/ready").status_code == 503
        answer = cluster.post()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"
        assert answer.headers["retry-after"] == "5"


def test_a_request_that_breaks_workers_does_not_reach_all_of_them(cluster: Cluster) -> None:
    workers = cluster.start_workers(5)
    for worker in workers:
        worker.behaviour = "refuse"
    with cluster.router(max_attempts=2):
        assert cluster.post().status_code == 503
        assert sum(len(worker.requests) for worker in workers) == 2


def test_a_worker_that_does_not_answer_in_time_is_left_for_another(cluster: Cluster) -> None:
    first, second = cluster.start_workers(2)
    first.behaviour = "hang"
    with cluster.router(policy="round_robin", first_byte_timeout_s=0.3):
        assert [cluster.post().json()["worker"] for _ in range(2)] == [second.name] * 2
        assert first.requests


def test_a_slow_worker_gets_less(cluster: Cluster) -> None:
    slow, fast = cluster.start_workers(2)
    slow.delay_s = 0.5
    with cluster.router(policy="load"):
        ask_many(cluster, 40, 4)
        assert len(fast.requests) > 3 * len(slow.requests) > 0


def test_nothing_is_lost_while_a_worker_dies_and_comes_back(cluster: Cluster) -> None:
    workers = cluster.start_workers(3)
    for worker in workers:
        worker.delay_s = 0.005
    with cluster.router():
        stop = threading.Event()

        def trouble() -> None:
            while not stop.wait(0.1):
                cluster.run(workers[0].kill())
                stop.wait(0.1)
                cluster.run(workers[0].start())

        maker = threading.Thread(target=trouble)
        maker.start()
        try:
            answers = ask_many(cluster, 300, 8)
        finally:
            stop.set()
            maker.join()
        assert [answer.status_code for answer in answers] == [200] * 300
        wait_for(lambda: cluster.state(workers[0]) in ("ready", "half_open"))


def test_failures_open_the_circuit_and_one_trial_closes_it(cluster: Cluster) -> None:
    first, _ = cluster.start_workers(2)
    first.behaviour = "500"  # passed on: another worker would say the same
    with cluster.router(policy="round_robin", breaker_failures=2, breaker_cooldown_s=0.4):
        codes = [cluster.post().status_code for _ in range(8)]
        assert codes.count(500) == 2 and cluster.state(first) == "open"
        first.behaviour = "ok"
        wait_for(lambda: first.url in cluster.app.fleet.loads)
        assert cluster.state(first) == "half_open"
        assert {cluster.post().json()["worker"] for _ in range(4)} == {"w0", "w1"}
        assert cluster.state(first) == "ready"


def test_a_client_that_leaves_frees_the_worker(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    worker.num_chunks, worker.gap_s = 1000, 0.05
    with cluster.router():
        body = {"prompt": "x", "stream": True}
        with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_bytes())
        wait_for(lambda: worker.num_left >= 1)
        wait_for(lambda: cluster.app.fleet.in_flight == 0)


def test_a_restarted_router_serves_on(cluster: Cluster) -> None:
    cluster.start_workers(2)
    with cluster.router():
        assert cluster.post().status_code == 200
    with cluster.router():
        assert cluster.post().status_code == 200


def ask_many(cluster: Cluster, count: int, num_clients: int) -> list[Any]:
    """`count` requests by several clients at once."""
    answers: list[Any] = []
    numbers = iter(range(count))

    def client() -> None:
        for number in numbers:
            answers.append(cluster.post(f"request {number}"))

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == count
    return answers
