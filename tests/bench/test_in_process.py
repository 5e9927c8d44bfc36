"""The in-process target over an engine whose answers are known."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from jaxserve.bench import load, workloads
from jaxserve.bench.in_process import InProcessTarget
from jaxserve.bench.workloads import LengthRange
from jaxserve.messages import AddRequest, RequestOutput


class CountingEngine:
    """Answers every request with the token len(prompt), one a step; prompts of one token are refused."""

    is_stalled = False

    def __init__(self, crash_after: int | None = None) -> None:
        self.live: dict[str, list[int]] = {}
        self.refused: deque[str] = deque()
        self.most_live = self.num_steps = 0
        self.crash_after = crash_after
        self.is_closed = False

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.refused)

    def handle(self, message: AddRequest) -> None:
        assert message.params.is_greedy
        assert message.params.ignore_eos
        if len(message.prompt) == 1:
            self.refused.append(message.request_id)
        else:
            self.live[message.request_id] = [len(message.prompt), message.params.max_tokens, 0]
        self.most_live = max(self.most_live, len(self.live))

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        if self.crash_after is not None and self.num_steps > self.crash_after:
            raise RuntimeError("the device is gone")
        outputs = [RequestOutput(request_id=key, finish_reason="error", error="too short") for key in self.refused]
        self.refused.clear()
        for key, entry in list(self.live.items()):
            entry[2] += 1
            is_last = entry[2] == entry[1]
            outputs.append(
                RequestOutput(
                    request_id=key,
                    token_ids=[entry[0]],
                    finish_reason="length" if is_last else None,
                    num_prompt_tokens=entry[0],
                    num_cached_tokens=2,
                    num_output_tokens=entry[2],
                )
            )
            if is_last:
                del self.live[key]
        return outputs

    def close(self) -> None:
        self.is_closed = True


def test_closed_loop() -> None:
    engine = CountingEngine()
    workload = workloads.random_lengths(10, LengthRange(2, 9), LengthRange(1, 6), vocab_size=5000)
    with InProcessTarget(engine) as target:
        records, _ = asyncio.run(load.run_closed_loop(target, workload, 4))
    assert engine.is_closed
    assert engine.most_live == 4
    turns = [conversation.turns[0] for conversation in workload.conversations]
    expected = sorted((len(turn.new_ids), turn.max_tokens) for turn in turns)
    assert sorted((record.num_prompt_tokens, record.num_output_tokens) for record in records) == expected
    for record in records:
        assert record.token_ids == [record.num_prompt_tokens] * record.num_output_tokens
        assert len(record.times) == record.num_output_tokens
        assert record.num_cached_tokens == 2
        assert record.start <= record.times[0] <= record.end == record.times[-1]


def test_target_outlives_event_loops() -> None:
    with InProcessTarget(CountingEngine()) as target:
        for _ in range(2):
            assert asyncio.run(target.complete([1, 2], 3)).num_output_tokens == 3


def test_refusals_are_records() -> None:
    with InProcessTarget(CountingEngine()) as target:
        assert asyncio.run(target.complete([1], 3)).error == "too short"


def test_a_crash_reaches_every_caller() -> None:
    async def ask(target: InProcessTarget) -> list[object]:
        return await asyncio.gather(*(target.complete([1, 2], 9) for _ in range(3)), return_exceptions=True)

    with InProcessTarget(CountingEngine(crash_after=2)) as target:
        answers = asyncio.run(ask(target))
    assert [str(answer) for answer in answers] == ["the device is gone"] * 3
    assert all(isinstance(answer, RuntimeError) for answer in answers)


def test_crash_is_raised_through_a_load() -> None:
    workload = workloads.random_lengths(4, LengthRange(2, 9), LengthRange(5, 6), vocab_size=5000)
    with (
        InProcessTarget(CountingEngine(crash_after=2)) as target,
        pytest.raises(RuntimeError, match="device is gone"),
    ):
        asyncio.run(load.run_closed_loop(target, workload, 2))
