"""Limits, host names, origins, HTTPS, ids and logs, metrics, traces."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import http.client
import json
import logging
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, ok, refused, server_process, serving, wait_for

BODY = {"prompt": "a", "max_tokens": 1}


def settings(tokenizer: Path, **fields: Any) -> ServerSettings:
    return ServerSettings(engine_command=engine_command(tokenizer), **fields)


def test_each_key_has_its_own_allowance(toy_tokenizer: Path) -> None:
    keys = ("one-key", "sha256:" + hashlib.sha256(b"other-key").hexdigest())
    with serving(settings(toy_tokenizer, api_keys=keys, max_requests_per_minute=3)) as live:
        live.wait_ready()

        def ask(key: str) -> httpx.Response:
            return live.post("/v1/completions", BODY, headers={"Authorization": f"Bearer {key}"})

        assert [ask("one-key").status_code for _ in range(4)] == [200, 200, 200, 429]
        answer = ask("one-key")
        assert refused(answer, 429)["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert ask("other-key").status_code == 200
        assert ask("sha256:" + hashlib.sha256(b"other-key").hexdigest()).status_code == 401  # a digest is no key
        assert live.http.get("/health").status_code == 200


def test_requests_at_once_are_bounded(toy_tokenizer: Path) -> None:
    with serving(settings(toy_tokenizer, max_requests_at_once=2)) as live:
        live.wait_ready()
        long = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        threads = [threading.Thread(target=lambda: httpx.post(live.url + "/v1/completions", json=long)) for _ in "ab"]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.state.client.num_in_flight == 2)
        assert refused(live.post("/v1/completions", BODY), 429)["code"] == "rate_limit_exceeded"
        for thread in threads:
            thread.join()
        assert ok(live.post("/v1/completions", BODY))


def asked_as(live: Live, host: str) -> int:
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=10)
    connection.putrequest("GET", "/v1/models", skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    return connection.getresponse().status


def test_a_local_server_answers_under_local_names_only(live: Live) -> None:
    for name in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert asked_as(live, name) == 200, name
    for name in ("evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "localhost.evil.example"):
        assert asked_as(live, name) == 421, name


def test_allowed_hosts_and_origins(toy_tokenizer: Path) -> None:
    options = {"allowed_hosts": ("api.example", "*.wide.example"), "cors_origins": ("https://page.example",)}
    with serving(settings(toy_tokenizer, **options)) as live:
        live.wait_ready()
        for name, status in (
            ("api.example", 200), ("a.wide.example:8", 200), ("wide.example", 421), ("other", 421), ("localhost", 200),
        ):  # fmt: skip
            assert asked_as(live, name) == status, name
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        answer = live.http.options("/v1/chat/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        answer = live.http.options("/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        plain = live.http.get("/v1/models", headers={"Origin": "https://page.example"})
        assert plain.headers["access-control-allow-origin"] == "https://page.example"


def test_no_origin_is_allowed_by_default(live: Live) -> None:
    answer = live.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def plain_socket(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_headers_that_do_not_end(toy_tokenizer: Path) -> None:
    with serving(settings(toy_tokenizer, header_timeout_s=0.5)) as live:
        live.wait_ready()
        for start in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "):
            with plain_socket(live) as slow:
                slow.sendall(start)
                started = time.monotonic()
                assert read_all(slow) == b""
                assert time.monotonic() - started < 8
        with plain_socket(live) as endless:
            endless.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            with contextlib.suppress(OSError):
                for _ in range(200):
                    endless.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")
            answer = read_all(endless)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        # A connection that is used again has its time for each request.
        with plain_socket(live) as twice:
            for _ in range(3):
                twice.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert twice.recv(65536).startswith(b"HTTP/1.1 200 ")
                time.sleep(0.4)


def test_a_plain_answer_that_is_not_read_is_dropped(toy_tokenizer: Path) -> None:
    with serving(settings(toy_tokenizer, write_timeout_s=0.5)) as live:
        live.wait_ready()
        body = b'{"tokens":[' + b"5," * 5_000_000 + b"5]}"  # an answer that no socket buffer holds
        head = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with plain_socket(live) as reader:
            reader.settimeout(60)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            poll = select.poll()
            poll.register(reader, select.POLLERR | select.POLLHUP)
            assert poll.poll(60_000), "the connection is still open"


def test_connections_are_bounded(toy_tokenizer: Path) -> None:
    with serving(settings(toy_tokenizer, max_connections=8)) as live:
        live.wait_ready()
        held = [plain_socket(live) for _ in range(7)]
        with plain_socket(live) as other:
            assert read_all(other).startswith(b"HTTP/1.1 503 ")
        for connection in held:
            connection.close()
        wait_for(lambda: httpx.get(live.url + "/health").status_code == 200)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl cannot make a certificate here")
    return cert, key


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:  # not listening yet
        return False


def test_https(toy_tokenizer: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    options = {"engine_command": engine_command(toy_tokenizer), "ssl_certfile": str(cert), "ssl_keyfile": str(key)}
    with server_process(options) as (process, live):
        assert live.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=live.url, verify=context) as client:
            wait_for(lambda: answers(client, "/ready"))
            assert client.post("/v1/completions", json=BODY).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(live.url.replace("https", "http") + "/health")
        process.terminate()
        assert process.wait(20) == 0


def test_logs_are_json_lines_with_the_requests_id(toy_tokenizer: Path) -> None:
    options = {"engine_command": engine_command(toy_tokenizer), "log_format": "json", "access_log": True}
    with server_process(options) as (process, live):
        live.wait_ready()
        answer = live.post("/v1/completions", BODY, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        made = live.http.get("/v1/models").headers["x-request-id"]
        assert len(made) >= 16
        process.terminate()
        assert process.wait(20) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    by_id = {line.get("request_id"): line for line in lines if line["logger"] == "jaxserve.access"}
    line = by_id["mine-1"]
    assert (line["route"], line["status"], line["prompt_tokens"], line["output_tokens"]) == (
        "/v1/completions",
        200,
        1,
        1,
    )
    assert line["seconds"] >= line["first_token_seconds"] > 0 and line["level"] == "info"
    assert datetime.datetime.fromisoformat(line["time"]).tzinfo is not None
    assert made in by_id and any("ready" in line["message"] for line in lines)


def test_metrics_have_the_names_that_dashboards_ask_for(live: Live) -> None:
    live.stream_completion(prompt="a", max_tokens=5, ignore_eos=True)
    text = live.http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "request_success_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "time_per_output_token_seconds_count", "request_time_per_output_token_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "request_inference_time_seconds_count", "request_prompt_tokens_count",
        "request_generation_tokens_count",
    ):  # fmt: skip
        assert f"\nvllm:{name}{{" in text or f"\nvllm:{name} " in text, name
    assert live.metric("vllm:inter_token_latency_seconds_count") >= 4
    before = live.metric("jaxserve_http_requests_total")
    live.http.get("/nowhere/at/all")
    assert live.metric("jaxserve_http_requests_total") >= before + 1
    assert 'route="other",status="404"' in live.http.get("/metrics").text


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP endpoint that keeps what it gets."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_trace_goes_on_in_the_server(toy_tokenizer: Path, collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    endpoint, got = collector
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with serving(settings(toy_tokenizer, otlp_endpoint=endpoint)) as live:
        live.wait_ready()
        ok(live.post("/v1/completions", BODY, headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}))
    spans = [
        span
        for data in got
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (span,) = [span for span in spans if span.trace_id.hex() == trace_id]
    attributes = {item.key: item.value.string_value or item.value.int_value for item in span.attributes}
    assert span.name == "POST /v1/completions" and span.parent_span_id.hex() == "b7ad6b7169203331"
    assert (attributes["http.response.status_code"], attributes["gen_ai.usage.output_tokens"]) == (200, 1)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"log_format": "xml"}, "log_format"), ({"ssl_certfile": "a"}, "ssl_certfile"),
        ({"ssl_certfile": "/no/such", "ssl_keyfile": "/no/such"}, "ssl_certfile"),
        ({"cors_origins": ("page.example",)}, "cors_origins"), ({"cors_origins": ("https://a/b",)}, "cors_origins"),
        ({"allowed_hosts": ("a*b",)}, "allowed_hosts"), ({"otlp_endpoint": "localhost"}, "otlp_endpoint"),
        ({"api_keys": ("sha256:12",)}, "api_keys"), ({"api_keys": ("a",), "admin_api_key": "a"}, "admin_api_key"),
        ({"max_requests_per_minute": -1}, "max_requests_per_minute"), ({"request_timeout_s": 0}, "request_timeout_s"),
    ],
)  # fmt: skip
def test_settings_say_what_is_wrong(fields: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ServerSettings(**fields)


def test_a_defect_is_a_500_that_tells_nothing(live: Live, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("an internal secret")

    monkeypatch.setattr(live.state.client, "submit", broken)
    with caplog.at_level(logging.ERROR):
        answer = live.post("/v1/completions", BODY)
    assert refused(answer, 500)["type"] == "server_error" and "secret" not in answer.text


def test_run_batch_answers_a_file_in_order(toy_tokenizer: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    good = [
        {"custom_id": f"c{k}", "method": "POST", "url": url, "body": body}
        for k, (url, body) in enumerate(
            [
                ("/v1/chat/completions", chat),
                ("/v1/completions", {**BODY, "n": 2}),
                ("/v1/embeddings", {"input": "a"}),
                ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
            ]
            * 3
        )
    ]
    bad = [
        "{", "[1]", json.dumps({"custom_id": "x"}), json.dumps({**good[0], "custom_id": "s", "body": {"stream": True}}),
        json.dumps({**good[0], "custom_id": "u", "url": "/metrics"}), '{"custom_id": "\\ud800"}', "\udcff",
        json.dumps({**good[0], "custom_id": "r", "body": {**chat, "max_tokens": 0}}),
    ]  # fmt: skip
    lines = [json.dumps(line) for line in good] + ["", *bad]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    code = (
        "import sys; from pathlib import Path; from jaxserve.config import EngineConfig;"
        "from jaxserve.server.batch_file import run_file; from jaxserve.server.settings import ServerSettings;"
        "sys.exit(run_file(EngineConfig(model='toy'), ServerSettings(engine_command=tuple(sys.argv[3:])),"
        "Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(file), str(output), *engine_command(toy_tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers[: len(good)]] == [line["custom_id"] for line in good]
    assert all(answer["response"]["status_code"] == 200 and not answer["error"] for answer in answers[: len(good)])
    assert len(answers[1]["response"]["body"]["choices"]) == 2
    assert len(answers) == len(good) + len(bad) and all(answer["error"]["message"] for answer in answers[len(good) :])
    assert answers[-1]["response"]["status_code"] == 400
    assert f"{len(answers)} requests, {len(bad)} of them failed" in done.stderr
