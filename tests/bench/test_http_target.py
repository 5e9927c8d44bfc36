"""The HTTP target against a server that says known things."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.bench import load, workloads
from jaxserve.bench.http import HttpError, HttpTarget
from jaxserve.bench.workloads import LengthRange
from tests.bench.fake_server import FakeServer, event, tokens


def complete(server: FakeServer, prompt: list[int], max_tokens: int, **options: Any) -> load.RequestRecord:
    async def talk() -> load.RequestRecord:
        async with server.serve():
            target = HttpTarget(server.url, **options)
            await target.connect()
            return await target.complete(prompt, max_tokens)

    return asyncio.run(talk())


def test_counts_tokens_and_reads_usage() -> None:
    server = FakeServer(lambda body: tokens(body, cached=2))
    record = complete(server, [5, 6, 7], 4, api_key="secret")
    assert record.error is None
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (3, 4, 2)
    assert record.token_ids == [3, 4, 5, 6]
    assert record.counts == [1, 1, 1, 1]
    path, headers, body = server.requests[0]
    assert path == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"
    assert (body["model"], body["prompt"], body["max_tokens"], body["ignore_eos"]) == ("fake", [5, 6, 7], 4, True)


def test_extensions_can_be_left_out() -> None:
    server = FakeServer(tokens)
    assert complete(server, [1], 2, use_extensions=False).error is None
    assert not {"ignore_eos", "return_token_ids"} & server.requests[0][2].keys()


def test_times_follow_the_stream() -> None:
    record = complete(FakeServer(lambda body: tokens(body, pause=0.05)), [1, 2], 5)
    # A pause never ends early, so that lower bounds hold on a busy machine too.
    assert all(gap > 0.03 for gap in record.gaps)
    assert len(record.gaps) == 4
    assert record.start < record.times[0] <= record.times[-1] <= record.end
    assert record.tpot == pytest.approx((record.times[-1] - record.times[0]) / 4)


def test_pieces_of_several_tokens_without_ids_are_counted_by_usage() -> None:
    def answer(body: dict[str, Any]):
        yield event(choices=[{"text": "a b c", "finish_reason": None}])
        yield event(choices=[{"text": " d", "finish_reason": "length"}])
        yield event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4})
        yield b"data: [DONE]\n\n"

    record = complete(FakeServer(answer), [1], 4)
    assert (len(record.times), record.num_output_tokens, record.num_prompt_tokens) == (2, 4, 9)


def test_events_split_anywhere() -> None:
    def answer(body: dict[str, Any]):
        for byte in b"".join(piece for piece in tokens(body)):
            yield bytes([byte])

    assert complete(FakeServer(answer), [1, 2], 3).token_ids == [2, 3, 4]


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (lambda body: iter([b'{"error": {"message": "prompt too long"}}']), 400, "prompt too long"),
        (lambda body: iter([event(error={"message": "engine died"}), b"data: [DONE]\n\n"]), 200, "engine died"),
        (lambda body: iter([event(choices=[{"text": "a"}])]), 200, "without [DONE]"),
        (lambda body: iter([b"data: [DONE]\n\n"]), 200, "no token"),
        (lambda body: iter([b"data: {broken\n\n"]), 200, "DecodeError"),
    ],
)
def test_failures_are_records(answer: Any, status: int, said: str) -> None:
    record = complete(FakeServer(answer, status), [1], 1)
    assert record.error is not None
    assert said in record.error


def test_a_slow_answer_is_given_up() -> None:
    record = complete(FakeServer(lambda body: iter([30.0])), [1], 1, timeout_s=0.1)
    assert record.error == "no complete answer within 0.1 s"


def test_nobody_there() -> None:
    async def find_free_port() -> int:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return port

    target = HttpTarget(f"127.0.0.1:{asyncio.run(find_free_port())}")
    with pytest.raises(HttpError, match="nobody answers"):
        asyncio.run(target.connect())
    assert "nobody answers" in asyncio.run(target.complete([1], 1)).error


@pytest.mark.parametrize("url", ["ftp://host", "http://", "file:///etc"])
def test_refuses_other_urls(url: str) -> None:
    with pytest.raises(ValueError, match="allowed: http"):
        HttpTarget(url)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_url_may_name_the_api_root(suffix: str) -> None:
    server = FakeServer(tokens)

    async def talk() -> None:
        async with server.serve():
            await HttpTarget(server.url + suffix, model="m").complete([1], 1)

    asyncio.run(talk())
    assert server.requests[0][0] == "/v1/completions"


def test_closed_loop_keeps_the_number_of_clients() -> None:
    server = FakeServer(lambda body: tokens(body, pause=0.02))
    workload = workloads.random_lengths(9, LengthRange(2, 5), LengthRange(2, 2), vocab_size=5000)

    async def talk() -> tuple[list[load.RequestRecord], float]:
        async with server.serve():
            return await load.run_closed_loop(HttpTarget(server.url, model="m"), workload, 3)

    records, seconds = asyncio.run(talk())
    assert server.most_running == 3
    assert len(records) == 9
    assert seconds >= 3 * 2 * 0.02
    asked = sorted(tuple(body["prompt"]) for _, _, body in server.requests)
    assert asked == sorted(conversation.turns[0].new_ids for conversation in workload.conversations)


def test_turns_contain_the_true_answers() -> None:
    server = FakeServer(tokens)
    workload = workloads.multi_turn(2, 3, LengthRange(4, 6), LengthRange(2, 3), vocab_size=5000, system_tokens=5)

    async def talk() -> None:
        async with server.serve():
            await load.run_closed_loop(HttpTarget(server.url, model="m"), workload, 1)

    asyncio.run(talk())
    bodies = [body for _, _, body in server.requests]
    for conversation, mine in zip(workload.conversations, (bodies[:3], bodies[3:])):
        said: list[int] = []
        for turn, body in zip(conversation.turns, mine):
            said += turn.new_ids
            assert body["prompt"] == said
            said += range(len(said), len(said) + turn.max_tokens)  # what `tokens` answers


def test_a_failed_turn_ends_its_conversation() -> None:
    server = FakeServer(lambda body: iter([b"busy"]), 503)
    workload = workloads.multi_turn(2, 3, LengthRange(4, 6), LengthRange(2, 3), vocab_size=5000)

    async def talk() -> list[load.RequestRecord]:
        async with server.serve():
            return (await load.run_closed_loop(HttpTarget(server.url, model="m"), workload, 2))[0]

    records = asyncio.run(talk())
    assert [record.error for record in records] == ["status 503: busy"] * 2


def test_open_loop_does_not_wait_for_answers() -> None:
    server = FakeServer(lambda body: tokens(body, pause=0.3))
    workload = workloads.random_lengths(6, LengthRange(2, 2), LengthRange(2, 2), vocab_size=5000)

    async def talk(limit: int | None) -> None:
        async with server.serve():
            target = HttpTarget(server.url, model="m")
            await load.run_open_loop(target, workload, 1000.0, max_concurrency=limit)

    asyncio.run(talk(None))
    assert server.most_running == 6
    server.most_running = 0
    asyncio.run(talk(2))
    assert server.most_running == 2
