"""What passes through the router, and what it does itself."""

from __future__ import annotations

import json
import threading
import time

import pytest
from cluster import ADMIN, Cluster, wait_for


def test_streams_pass_unchanged_and_piece_by_piece(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    worker.num_chunks, worker.gap_s = 4, 0.15
    with cluster.router():
        times = []
        with cluster.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["x-jaxserve-worker"] == worker.url
            pieces = []
            for piece in answer.iter_raw():
                pieces.append(piece)
                times.append(time.monotonic())
        expected = [b'data: {"worker":"w0","n":%d}\n\n' % number for number in range(4)] + [b"data: [DONE]\n\n"]
        assert b"".join(pieces) == b"".join(expected)
        # The first piece was there long before the worker had written the last one.
        assert times[-1] - times[0] > 0.3


def test_bodies_headers_and_paths_arrive_as_they_were_sent(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router():
        body = {"prompt": "Grüße 漢字", "max_tokens": 3, "odd": [1, None, {"x": 2.5}]}
        headers = {"X-Request-Id": "my-id", "X-Custom": "kept", "Authorization": "Bearer key"}
        answer = cluster.http.post("/v1/chat/completions", json=body, headers=headers)
        seen, received = worker.requests[0]
        assert received == body
        assert seen["x-request-id"] == "my-id" and seen["x-custom"] == "kept"
        assert seen["authorization"] == "Bearer key"
        assert seen["host"] == worker.url.removeprefix("http://")
        assert answer.headers["x-request-id"] == "my-id"
        assert cluster.http.get("/v1/models?limit=3").json()["path"] == "/v1/models?limit=3"


def test_a_request_without_an_id_gets_one_that_the_worker_sees_too(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router():
        ids = [cluster.post().headers["x-request-id"] for _ in range(2)]
        assert len(set(ids)) == 2
        assert [headers["x-request-id"] for headers, _ in worker.requests] == ids


def test_connections_to_workers_are_used_again(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router(probe_interval_s=30.0):
        for _ in range(20):
            assert cluster.post().status_code == 200
        assert len(worker._writers) == 1


def test_requests_with_one_prefix_go_to_one_worker_and_new_prefixes_spread(cluster: Cluster) -> None:
    cluster.start_workers(4)
    with cluster.router():
        by_group: dict[int, set[str]] = {}
        for turn in range(4):
            for group in range(8):
                answer = cluster.post(f"{group} is the prefix of this group. " * 20 + f"question {turn}")
                by_group.setdefault(group, set()).add(answer.json()["worker"])
        assert all(len(workers) == 1 for workers in by_group.values())
        counts = [len(worker.requests) for worker in cluster.workers]
        assert counts == [8] * 4
        known = cluster.metric("jaxserve_router_worker_prefix_bytes_known_total")
        assert 0.70 < known / cluster.metric("jaxserve_router_worker_prefix_bytes_total") < 0.76  # 3 of 4 turns


def test_chats_and_token_ids_have_prefixes_too(cluster: Cluster) -> None:
    cluster.start_workers(3)
    with cluster.router():
        for start in (0, 1000):
            history = list(range(start, start + 300))
            workers = {cluster.post([*history, n]).json()["worker"] for n in range(5)}
            assert len(workers) == 1
        messages = [{"role": "system", "content": "You know everything about boats. " * 10}]
        workers = set()
        for turn in range(5):
            messages.append({"role": "user", "content": [{"type": "text", "text": f"And the {turn}th?"}]})
            workers.add(cluster.http.post("/v1/chat/completions", json={"messages": messages}).json()["worker"])
        assert len(workers) == 1


def test_prefixes_of_different_keys_and_salts_are_different(cluster: Cluster) -> None:
    cluster.start_workers(2)
    with cluster.router():
        prompt = "one and the same prompt " * 10
        first = cluster.post(prompt, headers={"Authorization": "Bearer a"}).json()["worker"]
        assert cluster.post(prompt, headers={"Authorization": "Bearer b"}).json()["worker"] != first
        assert cluster.post(prompt, headers={"Authorization": "Bearer a"}).json()["worker"] == first


def test_a_body_that_is_no_json_is_the_workers_to_refuse(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router():
        answer = cluster.http.post("/v1/completions", content=json.dumps(["not", "an", "object"]))
        assert answer.status_code == 502 or worker.requests  # it reached the worker as it was


def test_keys_guard_everything_that_tells_something(cluster: Cluster) -> None:
    cluster.start_workers(1)
    with cluster.router(api_keys=("k1", "k2")):
        assert cluster.post().status_code == 401
        assert cluster.http.get("/metrics").status_code == 401
        assert cluster.http.get("/health").status_code == cluster.http.get("/ready").status_code == 200
        for key in ("k1", "k2"):
            assert cluster.post(headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert cluster.http.get("/workers", headers={"Authorization": "Bearer k1"}).status_code == 401
        assert cluster.http.get("/workers", headers=ADMIN).status_code == 200


def test_without_an_admin_key_there_is_no_admin_api(cluster: Cluster) -> None:
    cluster.start_workers(1)
    with cluster.router(admin_key=None):
        assert cluster.http.get("/workers").status_code == 404
        assert cluster.http.post("/workers", json={"url": "http://127.0.0.1:1"}).status_code == 404


def test_a_rate_limit_is_per_client(cluster: Cluster) -> None:
    cluster.start_workers(1)
    with cluster.router(api_keys=("k1", "k2"), requests_per_second=0.01, burst=2):
        one, two = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}
        assert [cluster.post(headers=one).status_code for _ in range(3)] == [200, 200, 429]
        refused = cluster.post(headers=one)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded" and int(refused.headers["retry-after"]) > 60
        assert cluster.post(headers=two).status_code == 200


def test_workers_are_added_drained_and_removed_at_run_time(cluster: Cluster) -> None:
    first, second = cluster.start_workers(2)
    with cluster.router(workers=(first.url,)):
        assert {cluster.post(str(n)).json()["worker"] for n in range(4)} == {"w0"}
        added = cluster.http.post("/workers", json={"url": second.url + "/"}, headers=ADMIN)
        assert added.status_code == 201
        wait_for(lambda: cluster.state(second) == "ready")
        assert {cluster.post(str(n)).json()["worker"] for n in range(10, 18)} == {"w0", "w1"}
        first.num_chunks, first.gap_s = 10, 0.05
        second.num_chunks, second.gap_s = 10, 0.05
        events: list[list[object]] = []
        streams = [threading.Thread(target=lambda n=n: events.append(cluster.stream(f"s{n}"))) for n in range(4)]
        for stream in streams:
            stream.start()
        wait_for(lambda: cluster.app.fleet.in_flight == 4)
        answer = cluster.http.post("/workers/drain", json={"url": first.url}, headers=ADMIN)
        assert answer.status_code == 202 and answer.json()["state"] == "draining"
        assert {cluster.post(f"new {n}").json()["worker"] for n in range(3)} == {"w1"}
        for stream in streams:
            stream.join()
        assert all(len(found) == 11 and found[-1] == "[DONE]" for found in events)  # nothing was cut off
        wait_for(lambda: len(cluster.http.get("/workers", headers=ADMIN).json()["workers"]) == 1)
        removed = cluster.http.delete("/workers", params={"url": second.url}, headers=ADMIN)
        assert removed.status_code == 200
        assert cluster.http.get("/ready").status_code == 503


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h/path", "nothing", "http://u:p@h"])
def test_bad_addresses_of_workers_are_refused(cluster: Cluster, url: str) -> None:
    with cluster.router(workers=()):
        answer = cluster.http.post("/workers", json={"url": url}, headers=ADMIN)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "url"


def test_more_than_a_worker_may_get_waits_in_order(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    worker.delay_s = 0.1
    with cluster.router(max_worker_in_flight=1):
        order: list[int] = []

        def ask(number: int) -> None:
            cluster.post(str(number))
            order.append(number)

        threads = []
        for number in range(4):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            wait_for(lambda n=number: cluster.app.proxy.num_open >= min(n + 1, 4) - len(order))
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        assert order == sorted(order)
        assert [body["prompt"] for _, body in worker.requests] == ["0", "1", "2", "3"]


def test_reports_of_workers_appear_in_metrics(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    worker.metrics = (
        'vllm:num_requests_running{model_name="m"} 3.0\nvllm:num_requests_waiting{model_name="m"} 2.0\n'
        'vllm:prefix_cache_queries_total{model_name="m"} 100.0\nvllm:prefix_cache_hits_total{model_name="m"} 60.0\n'
    )
    with cluster.router():
        wait_for(lambda: cluster.metric("jaxserve_router_worker_cached_tokens_total") == 60)
        assert cluster.metric("jaxserve_router_worker_waiting", worker=worker.url) == 2
        assert cluster.metric("jaxserve_router_worker_state", worker=worker.url, state="ready") == 1


def test_a_restarted_worker_has_an_empty_cache(cluster: Cluster) -> None:
    first, _ = cluster.start_workers(2)
    for worker in cluster.workers:
        worker.metrics = "process_start_time_seconds 1000.0\n"
    with cluster.router():
        prompt = "a prefix that was cached once " * 10
        assert cluster.post(prompt).json()["worker"] == "w0"
        index = cluster.app.fleet.policy.index
        assert index.size(first.url) > 0
        wait_for(lambda: cluster.app.probes._lives.get(first.url) is not None)
        first.metrics = "process_start_time_seconds 2000.0\n"
        wait_for(lambda: index.size(first.url) == 0)


def test_foreign_names_are_not_answered_on_loopback(cluster: Cluster) -> None:
    """The router writes a host name of its own to workers: it has to look at the client's itself."""
    cluster.start_workers(1)
    with cluster.router():
        assert cluster.post(headers={"Host": "evil.example"}).status_code == 421
    with cluster.router(allowed_hosts=("good.example",)):
        assert cluster.post(headers={"Host": "good.example"}).status_code == 200


def test_a_body_that_is_too_long_is_refused_before_it_is_read(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router(max_body_bytes=2048):
        assert cluster.post("x" * 4000).status_code == 413
        assert not worker.requests
