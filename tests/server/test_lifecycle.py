"""Requests that end early, engines that die, servers that stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from jaxserve.server.settings import ServerSettings
from live import Events, Live, engine_command, ok, refused, server_process, serving, strict, wait_for

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Write on", "max_tokens": 400, "ignore_eos": True}


def drop(live: Live, body: dict, *, chunks: int = 0) -> None:
    """Send a request, read a little, close the connection hard."""
    host, port = live.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        if chunks:
            for _ in range(chunks):
                assert connection.recv(512)
        else:
            wait_for(lambda: live.state.client.num_in_flight > 0)


@pytest.fixture(scope="module")
def slow(toy_tokenizer: Path) -> Iterator[Live]:
    """20 ms a token: a whole answer takes 8 s."""
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer, step=0.02))
    with serving(settings) as live:
        yield live.wait_ready()


@pytest.mark.parametrize("stream", [False, True])
def test_work_ends_when_the_client_leaves(slow: Live, stream: bool) -> None:
    for _ in range(3):
        drop(slow, {**LONG, "n": 2, "stream": stream}, chunks=2 if stream else 0)
        start = time.monotonic()
        wait_for(lambda: slow.state.client.num_in_flight == 0, 2)
        assert time.monotonic() - start < 1
        assert slow.metric("vllm:num_requests_running") == 0, "at once, not with the next heartbeat"
    assert slow.complete(prompt="a", max_tokens=2)["choices"]


def test_many_dropped_streams_leave_nothing(slow: Live) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda k: drop(slow, {**LONG, "prompt": f"S {k}", "stream": True}, chunks=1 + k % 2), range(32)))
    wait_for(lambda: slow.state.client.num_in_flight == 0, 3)
    wait_for(lambda: slow.metric("vllm:num_requests_running") == 0)
    assert len(slow.stream_completion(prompt="after", max_tokens=3, ignore_eos=True).choices()) >= 3


def test_a_client_that_leaves_in_the_middle_of_its_body(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
    assert live.complete(prompt="a", max_tokens=1)


def test_equal_ids_of_clients(live: Live) -> None:
    def one(number: int) -> dict:
        body = {"prompt": f"n {number}", "max_tokens": 30, "seed": number, "request_id": "dup"}
        return ok(live.post(COMPLETIONS, body, headers={"X-Request-Id": "dup"}))

    alone = [one(number)["choices"][0]["text"] for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert [answer["choices"][0]["text"] for answer in answers] == alone
    assert {answer["id"] for answer in answers} == {"cmpl-dup"}


def test_two_requests_on_one_connection(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    body = b'{"prompt":"a","max_tokens":3}'
    one = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(one + one)
        connection.settimeout(5)
        data = b""
        while data.count(b"text_completion") < 2:
            data += connection.recv(65536)
    assert data.count(b"HTTP/1.1 200") == 2


def test_health_while_busy(slow: Live) -> None:
    with ThreadPoolExecutor(32) as pool:
        work = [pool.submit(slow.stream_completion, prompt=f"x{k}", max_tokens=30, ignore_eos=True) for k in range(32)]
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert slow.http.get("/health").json() == {"status": "ready"}
            times.append(time.perf_counter() - start)
        assert all(future.result().is_done for future in work)
    assert sorted(times)[10] < 0.1


def test_full_queue(toy_tokenizer: Path) -> None:
    command = engine_command(toy_tokenizer, step=0.02, rows=1)
    with serving(ServerSettings(engine_command=command), max_waiting=2) as live:
        live.wait_ready()
        with ThreadPoolExecutor(6) as pool:
            body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}
            answers = list(pool.map(lambda k: live.post(COMPLETIONS, {**body, "stream": k % 2 == 0}), range(6)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200, 200, 200, 503, 503, 503]
        for answer in answers:
            if answer.status_code == 503:
                assert refused(answer, 503)["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1


def test_own_limit_of_prompts_in_flight(toy_tokenizer: Path) -> None:
    command = engine_command(toy_tokenizer, step=0.02)
    settings = ServerSettings(engine_command=command, max_in_flight=3, max_n=4, max_sequences=6)
    with serving(settings) as live:
        live.wait_ready()
        assert refused(live.post(COMPLETIONS, {"prompt": ["a"] * 4, "max_tokens": 1}), 503)["code"] == "queue_full"
        assert refused(live.post(COMPLETIONS, {"prompt": "a", "n": 5}))["message"] == "n: got 5; allowed: 1 to 4"
        assert "6" in refused(live.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 4}))["message"]
        assert live.complete(prompt=["a", "b", "c"], n=2, max_tokens=1)["choices"][5]["index"] == 5


def test_before_the_engine_is_ready(toy_tokenizer: Path) -> None:
    with serving(ServerSettings(engine_command=engine_command(toy_tokenizer, load=1.0))) as live:
        assert live.http.get("/health").json() == {"status": "starting"}
        response = live.http.get("/ready")
        assert response.status_code == 503 and response.headers["retry-after"]
        for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize"):
            response = live.post(path, {"prompt": "a"})
            assert refused(response, 503)["code"] == "starting" and response.headers["retry-after"]
        assert ok(live.http.get("/v1/models"))["data"][0]["max_model_len"] is None
        assert "jaxserve_engine_up" in live.http.get("/metrics").text
        assert live.http.get("/").status_code == 200
        live.wait_ready()
        assert live.complete(prompt="a", max_tokens=1)["choices"]


@contextlib.contextmanager
def interrupted_streams(live: Live, count: int = 4) -> Iterator[list[Events]]:
    """Streams (and as many plain requests) that run when the block is entered; their ends when it is left."""
    results: list[Events] = []
    plain: list[httpx.Response] = []

    started = threading.Semaphore(0)

    def stream() -> None:
        with live.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            started.release()  # the head comes with the first token
            results.append(Events(b"".join(response.iter_bytes())))

    def whole() -> None:
        plain.append(live.post(COMPLETIONS, LONG))

    threads = [threading.Thread(target=work) for work in (stream, whole) for _ in range(count)]
    for thread in threads:
        thread.start()
    assert all(started.acquire(timeout=10) for _ in range(count))
    wait_for(lambda: live.state.client.num_in_flight == 2 * count)
    yield results
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    for response in plain:
        assert refused(response, 503)["code"] == "engine_unavailable" and response.headers["retry-after"]


def check_interrupted(results: list[Events], count: int = 4) -> None:
    assert len(results) == count
    for events in results:
        assert not events.is_done and events.finish() == []
        assert events.chunks[-1]["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("how", ["CRASH-NOW", "FAIL-NOW", "kill"])
def test_a_lost_engine_is_replaced(toy_tokenizer: Path, tmp_path: Path, how: str) -> None:
    starts = tmp_path / "starts"
    command = engine_command(toy_tokenizer, step=0.02, starts=starts)
    with serving(ServerSettings(engine_command=command, restart_delay_s=0.05)) as live:
        live.wait_ready()
        with interrupted_streams(live) as results:
            start = time.monotonic()
            if how == "kill":
                os.kill(int(starts.read_text().split()[-1]), signal.SIGKILL)
            else:
                assert live.post(COMPLETIONS, {"prompt": how}).status_code == 503
        check_interrupted(results)
        assert time.monotonic() - start < 5
        assert live.http.get("/health").status_code == 200
        live.wait_ready()
        assert live.complete(prompt="a", max_tokens=1)["choices"]
        assert len(starts.read_text().split()) == 2
        assert live.metric("jaxserve_engine_restarts_total") == 1


def test_a_stuck_engine_is_replaced(toy_tokenizer: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    command = engine_command(toy_tokenizer, step=0.02, starts=starts)
    settings = ServerSettings(engine_command=command, restart_delay_s=0.05, heartbeat_timeout_s=1.0)
    with serving(settings) as live:
        live.wait_ready()
        with interrupted_streams(live) as results:
            assert live.post(COMPLETIONS, {"prompt": "HANG-NOW"}).status_code == 503
        check_interrupted(results)
        live.wait_ready()
        assert live.complete(prompt="a", max_tokens=1)["choices"]
        assert len(starts.read_text().split()) == 2


def test_an_engine_that_is_lost_again_and_again_ends_the_server(toy_tokenizer: Path) -> None:
    command = list(engine_command(toy_tokenizer))
    settings = {"engine_command": command, "restart_delay_s": 0.01, "max_restarts": 2}
    with server_process(settings) as (process, live):
        for _ in range(3):
            wait_for(lambda: answers(live, "/ready") == 200)
            live.post(COMPLETIONS, {"prompt": "CRASH-NOW"})
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "3 times" in process.stderr.read()


def answers(live: Live, path: str) -> int:
    try:
        return live.http.get(path).status_code
    except httpx.TransportError:
        return 0


def test_a_model_that_cannot_be_loaded_ends_the_server(toy_tokenizer: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    command = list(engine_command(toy_tokenizer, fail="ValueError: tensor blk.3 has the wrong shape", starts=starts))
    with server_process({"engine_command": command}) as (process, _):
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "jaxserve: ValueError: tensor blk.3 has the wrong shape" in process.stderr.read()
    assert len(starts.read_text().split()) == 1, "it was tried again"


def test_a_command_that_does_not_exist_ends_the_server() -> None:
    with server_process({"engine_command": ["/nowhere/engine"]}) as (process, _):
        assert process.wait(10) == 1


def test_an_address_in_use(live: Live) -> None:
    with server_process({"port": int(live.url.rpartition(":")[2]), "engine_command": ["x"]}) as (process, _):
        assert process.wait(10) == 2


def start_stream(live: Live, max_tokens: int) -> tuple[threading.Thread, list[Events]]:
    results: list[Events] = []
    first = threading.Event()

    def run() -> None:
        body = {"prompt": "Write on", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with live.http.stream("POST", COMPLETIONS, json=body) as response:
            data = b""
            for piece in response.iter_bytes():
                data += piece
                first.set()
        results.append(Events(data))

    thread = threading.Thread(target=run)
    thread.start()
    assert first.wait(10)
    return thread, results


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_are_finished_on_a_signal(toy_tokenizer: Path, tmp_path: Path, number: int) -> None:
    starts = tmp_path / "starts"
    command = list(engine_command(toy_tokenizer, step=0.01, starts=starts))
    with server_process({"engine_command": command}) as (process, live):
        wait_for(lambda: answers(live, "/ready") == 200)
        thread, results = start_stream(live, 100)
        process.send_signal(number)
        time.sleep(0.2)
        assert answers(live, "/ready") in (0, 503)
        thread.join(10)
        assert results[0].is_done and results[0].finish() == ["length"]
        assert process.wait(5) == 0
    engine = int(starts.read_text())
    wait_for(lambda: not Path(f"/proc/{engine}").exists())


def test_after_the_drain_the_rest_is_told(toy_tokenizer: Path) -> None:
    command = list(engine_command(toy_tokenizer, step=0.02))
    with server_process({"engine_command": command, "drain_s": 0.3}) as (process, live):
        wait_for(lambda: answers(live, "/ready") == 200)
        thread, results = start_stream(live, 400)
        process.send_signal(signal.SIGTERM)
        thread.join(5)
        assert results[0].chunks[-1]["error"]["code"] == "shutting_down" and not results[0].is_done
        assert process.wait(5) == 0


def test_a_second_signal_ends_at_once(toy_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setenv("TMPDIR", str(sockets))
    starts = tmp_path / "starts"
    command = list(engine_command(toy_tokenizer, step=0.05, starts=starts))
    with server_process({"engine_command": command}) as (process, live):
        wait_for(lambda: answers(live, "/ready") == 200)
        connection = socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2])))
        body = json.dumps({**LONG, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert connection.recv(100)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(3) == 128 + signal.SIGTERM
        assert list(sockets.iterdir()) == []
        connection.close()
    engine = int(starts.read_text())
    wait_for(lambda: not Path(f"/proc/{engine}").exists())


def test_sockets_are_private_and_removed(toy_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serving(ServerSettings(engine_command=engine_command(toy_tokenizer))) as live:
        live.wait_ready()
        folders = list(tmp_path.iterdir())
        assert len(folders) == 1 and folders[0].stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_unread_answers_are_dropped(toy_tokenizer: Path) -> None:
    """A client that neither reads nor leaves."""
    command = engine_command(toy_tokenizer, step=0)
    settings = ServerSettings(engine_command=command, write_timeout_s=0.5)
    with serving(settings) as live:
        live.wait_ready()
        host, port = live.url.removeprefix("http://").split(":")
        body = {**LONG, "n": 128, "logprobs": 20, "stream": True, "return_token_ids": True}
        data = json.dumps(body).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            wait_for(lambda: live.state.client.num_in_flight == 1)
            wait_for(lambda: live.state.client.num_in_flight == 0, 20)
            time.sleep(5)  # the engine may have been faster than the time-out, and the server slow to see it
            connection.settimeout(20)
            received = b""
            while True:
                try:
                    piece = connection.recv(1 << 20)
                except ConnectionError:
                    break
                if not piece:
                    break
                received = (received + piece)[-100:]
            assert b"[DONE]" not in received
        assert strict(live.http.get("/health").text)["status"] == "ready"
