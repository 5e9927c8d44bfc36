"""The engine of an encoder over a scripted device: batches, order, ends, mistakes, failures."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fakes import ByteTokenizer, last_of, run_dry

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.encoder_engine import EncoderEngine, Text
from jaxserve.engine import EngineCrash
from jaxserve.messages import AbortRequest, AddEmbedding, AddRequest, FlushCache, ModelInfo, Shutdown
from jaxserve.sampling_params import SamplingParams

SIZE = 4


class ScriptedBatches:
    """Vectors say what they were made of: sum of the tokens, their number, the pooling's place, one."""

    max_model_len = 32

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.fails = False
        self.is_closed = False

    def length_of(self, num_tokens: int) -> int:
        return 8 if num_tokens <= 8 else 32

    def batches(self, length: int) -> tuple[int, ...]:
        return (4, 1) if length == 8 else (2, 1)

    def run(self, work: list[Text]) -> np.ndarray:
        if self.fails:
            raise RuntimeError("the device is gone")
        lengths = {self.length_of(len(text.token_ids)) for text in work}
        assert len(lengths) == 1 and len(work) in self.batches(lengths.pop())
        self.calls.append(len(work))
        places = ("mean", "cls", "last")
        return np.array([[t.token_ids.sum(), len(t.token_ids), places.index(t.pooling), 1] for t in work], np.float32)

    def close(self) -> None:
        self.is_closed = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(**options: object) -> tuple[EncoderEngine, ScriptedBatches, Clock]:
    model = ModelInfo(
        name="scripted", tokenizer_path="", vocab_size=258, max_model_len=32, eos_token_ids=[], max_num_rows=4,
        dtype="float32", num_pages=0, page_size=1, task="embed", pooling="mean", embedding_size=SIZE,
    )  # fmt: skip
    runner, clock = ScriptedBatches(), Clock()
    config = EngineConfig(**options)
    return EncoderEngine(runner, ByteTokenizer(), config, model=model, clock=clock), runner, clock


def text(request_id: str, prompt: list[int], **options: object) -> AddEmbedding:
    return AddEmbedding(request_id=request_id, prompt=prompt, **({"normalize": False} | options))


def test_texts_of_one_length_share_batches_and_the_oldest_goes_first() -> None:
    engine, runner, _ = make()
    prompts = {f"t{k}": [k + 1] * (3 if k % 3 else 20) for k in range(11)}
    for request_id, prompt in prompts.items():
        engine.handle(text(request_id, prompt))
    first = engine.step()
    assert [out.request_id for out in first] == ["t0", "t3"]  # long ones, two at a time
    outputs = first + run_dry(engine)
    assert runner.calls == [2, 4, 2, 1, 1, 1]
    for request_id, prompt in prompts.items():
        answer = last_of(outputs, request_id)
        assert answer.embedding == [sum(prompt), len(prompt), 0, 1]
        assert (answer.finish_reason, answer.num_prompt_tokens) == ("stop", len(prompt))
    assert engine.stats().num_finished == {"stop": 11} and not engine.has_work


def test_pooling_and_dimensions_are_those_asked_for() -> None:
    engine, _, _ = make()
    engine.handle(text("last", [5, 6], pooling="last"))
    engine.handle(text("two", [3, 4], dimensions=2, normalize=True))
    outputs = run_dry(engine)
    assert last_of(outputs, "last").embedding == [11, 2, 2, 1]
    np.testing.assert_allclose(last_of(outputs, "two").embedding, np.array([7, 2]) / np.hypot(7, 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        (text("x", []), "prompt"),
        (text("x", [1] * 33), "prompt"),
        (text("x", [1, 258]), "prompt"),
        (text("x", [1], pooling="max"), "pooling"),
        (text("x", [1], dimensions=5), "dimensions"),
        (text("x", [1], deadline_s=-1.0), "deadline_s"),
        (text("busy", [1]), "request_id"),
        (AddRequest(request_id="x", prompt=[1], params=SamplingParams(n=2)), "model"),
    ],
)
def test_mistakes_are_answered_by_name(message: AddEmbedding | AddRequest, parameter: str) -> None:
    engine, _, _ = make()
    engine.handle(text("busy", [9]))
    engine.handle(message)
    answers = [out for out in run_dry(engine) if out.finish_reason == "error"]
    assert {out.parameter for out in answers} == {parameter}
    assert len(answers) == (2 if isinstance(message, AddRequest) else 1)


def test_aborts_deadlines_and_a_full_queue() -> None:
    engine, _, clock = make(max_waiting=3)
    engine.handle(text("aborted", [1]))
    engine.handle(text("late", [2] * 20, deadline_s=1.0))
    engine.handle(text("kept", [3]))
    engine.handle(text("refused", [4]))
    engine.handle(AbortRequest("aborted"))
    engine.handle(AbortRequest("unknown"))
    engine.handle(FlushCache())
    clock.now = 2.0
    outputs = run_dry(engine)
    assert (last_of(outputs, "aborted").finish_reason, last_of(outputs, "aborted").embedding) == ("abort", None)
    assert last_of(outputs, "late").parameter == "deadline_s"
    assert last_of(outputs, "refused").parameter == "max_waiting"
    assert last_of(outputs, "kept").embedding == [3, 1, 0, 1]


def test_a_shutdown_finishes_what_waits_until_its_time_is_over() -> None:
    engine, _, clock = make()
    for k in range(3):
        engine.handle(text(f"t{k}", [k] * (2 if k else 20)))
    engine.handle(Shutdown(5.0))
    engine.handle(text("new", [1]))
    outputs = engine.step()
    assert not engine.is_drained
    clock.now = 6.0
    outputs += run_dry(engine)
    assert engine.is_drained
    assert last_of(outputs, "new").parameter == "engine"
    assert [last_of(outputs, f"t{k}").finish_reason for k in range(3)] == ["stop", "abort", "abort"]


def test_a_failing_device_is_a_crash_for_good() -> None:
    engine, runner, _ = make()
    runner.fails = True
    engine.handle(text("t", [1]))
    for _ in range(2):
        with pytest.raises(EngineCrash, match="the device is gone"):
            engine.step()
    engine.close()
    assert runner.is_closed


def test_llm_over_an_encoder() -> None:
    engine, runner, _ = make()
    with LLM.from_engine(engine) as llm:
        found = llm.embed(["ab", [1, 2, 3], "c" * 20], normalize=False)
        assert found.tolist() == [[97 + 98, 2, 0, 1], [6, 3, 0, 1], [20 * 99, 20, 0, 1]]
        assert "embeddings of 4 values" in repr(llm)
    assert runner.is_closed
