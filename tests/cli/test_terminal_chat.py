"""Chatting with a server: what is sent, what is shown."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxserve import terminal_chat
from tests.bench.fake_server import FakeServer, event


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """The asyncio server in a thread, for clients that block."""
    loop = asyncio.new_event_loop()
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server.serve():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


def chat_events(*words: str, cached: int = 0) -> Iterator[bytes]:
    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for word in words:
        yield event(choices=[{"index": 0, "delta": {"content": word}}])
    yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    usage = {"completion_tokens": len(words) + 1, "prompt_tokens_details": {"cached_tokens": cached}}
    yield event(choices=[], usage=usage)
    yield b"data: [DONE]\n\n"


def chat(server: FakeServer, typed: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with running(server), terminal_chat.http_backend(server.url, api_key="k", options={"top_p": 0.5}) as backend:
        terminal_chat.run_chat(backend, **options)


def test_conversation_goes_on_and_can_be_cleared(monkeypatch: Any, capsys: Any) -> None:
    server = FakeServer(lambda body: chat_events("Hel", "lo", "\u00fc"))
    chat(server, "one\n\ntwo\n/clear\nthree\n/exit\nnever\n", monkeypatch, system="be brief")
    bodies = [body for _, _, body in server.requests]
    assert [path for path, _, _ in server.requests] == ["/v1/chat/completions"] * 3
    system, reply = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "Helloü"}
    one, two, three = ({"role": "user", "content": text} for text in ("one", "two", "three"))
    assert [body["messages"] for body in bodies] == [[system, one], [system, one, reply, two], [system, three]]
    assert all(body["top_p"] == 0.5 and body["model"] == "fake" and body["stream"] for body in bodies)
    assert server.requests[0][1]["authorization"] == "Bearer k"
    assert capsys.readouterr().out == "Helloü\n" * 3


def test_system_can_be_changed(monkeypatch: Any, capsys: Any) -> None:
    server = FakeServer(lambda body: chat_events("a"))
    chat(server, "one\n/system in French\ntwo\n/nonsense\n", monkeypatch)
    assert [m["role"] for m in server.requests[0][2]["messages"]] == ["user"]
    assert server.requests[1][2]["messages"][0] == {"role": "system", "content": "in French"}
    assert len(server.requests) == 2
    assert "/clear" in capsys.readouterr().out  # an unknown command shows the help


def test_counts_come_from_usage() -> None:
    server = FakeServer(lambda body: chat_events("a", "b", cached=7))
    with running(server), terminal_chat.http_backend(server.url + "/v1/", api_key=None, options={}) as backend:
        pieces = list(backend([{"role": "user", "content": "x"}]))
    assert "".join(piece.text for piece in pieces) == "ab"
    assert (pieces[-1].num_output_tokens, pieces[-1].num_cached_tokens) == (3, 7)


def test_errors_of_the_server_are_connection_errors() -> None:
    def fails(server: FakeServer) -> str:
        with running(server), pytest.raises(ConnectionError) as caught:  # noqa: SIM117
            with terminal_chat.http_backend(server.url, api_key=None, options={}) as backend:
                list(backend([{"role": "user", "content": "x"}]))
        return str(caught.value)

    assert "too long" in fails(FakeServer(lambda body: iter([b"prompt too long"]), status=400))
    assert "engine died" in fails(FakeServer(lambda body: iter([event(error={"message": "engine died"})])))


@pytest.mark.parametrize(("url", "error"), [("ftp://x", ValueError), ("http://127.0.0.1:9", ConnectionError)])
def test_bad_urls(url: str, error: type[Exception]) -> None:
    with pytest.raises(error), terminal_chat.http_backend(url, api_key=None, options={}):
        pass
