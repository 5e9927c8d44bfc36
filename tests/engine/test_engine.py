"""The engine over a scripted runner: text, ends, mistakes, failures, time."""

from __future__ import annotations

import random

import msgspec
import pytest
from engine_fakes import EOS, VOCAB_SIZE, alphabet, last_of, make_engine, run_dry, scripted, text_of

from jaxserve.admission import continuation_seed
from jaxserve.engine import EngineCrash
from jaxserve.messages import (
    AbortRequest,
    AddRequest,
    FlushCache,
    Heartbeat,
    OutputBatch,
    Shutdown,
    decode_from_engine,
    encode,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.trace import summarize


def request(request_id: str = "r", prompt: str | list[int] = "hello", **options) -> AddRequest:
    message = {k: options.pop(k) for k in ("stream_interval", "deadline_s", "namespace") if k in options}
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return AddRequest(request_id=request_id, prompt=ids, params=SamplingParams(**options), **message)


@pytest.mark.parametrize("overlap", [True, False])
def test_max_tokens_ends_with_length(overlap):
    engine = make_engine(overlap=overlap)
    engine.add(request(max_tokens=5))
    outputs = run_dry(engine)
    last = last_of(outputs)
    assert text_of(outputs) == "abcde"
    assert [t for out in outputs for t in out.token_ids] == list(b"abcde")
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    assert (last.num_prompt_tokens, last.num_output_tokens, last.num_cached_tokens) == (5, 5, 0)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("overlap", [True, False])
def test_end_of_sequence_is_counted_and_not_written(overlap):
    engine = make_engine(scripted({1: b"hi"}), overlap=overlap)
    engine.add(request(seed=1, skip_special_tokens=False))
    outputs = run_dry(engine)
    assert text_of(outputs) == "hi"
    assert [t for out in outputs for t in out.token_ids] == [*b"hi", EOS]
    assert last_of(outputs).finish_reason == "stop" and last_of(outputs).stop_reason is None
    assert last_of(outputs).num_output_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_stop_token(include, text):
    engine = make_engine()
    engine.add(request(stop_token_ids=(ord("c"),), include_stop_str_in_output=include, max_tokens=20))
    outputs = run_dry(engine)
    assert text_of(outputs) == text
    assert (last_of(outputs).finish_reason, last_of(outputs).stop_reason) == ("stop", ord("c"))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcdef")])
def test_stop_string(overlap, include, text):
    engine = make_engine(overlap=overlap)
    engine.add(request(stop=("def", "zz"), include_stop_str_in_output=include, max_tokens=20))
    outputs = run_dry(engine)
    assert text_of(outputs) == text
    last = last_of(outputs)
    assert (last.finish_reason, last.stop_reason, last.num_output_tokens) == ("stop", "def", 6)
    assert [t for out in outputs for t in out.token_ids] == list(b"abcdef")
    engine.scheduler.check_integrity()


def test_stop_string_completed_by_the_last_allowed_token_is_a_stop():
    engine = make_engine()
    engine.add(request(stop=("de",), max_tokens=5))
    outputs = run_dry(engine)
    assert text_of(outputs) == "abc" and last_of(outputs).finish_reason == "stop"


def test_held_back_text_comes_at_the_end():
    engine = make_engine()
    engine.add(request(stop=("efX",), max_tokens=6))
    outputs = run_dry(engine)
    assert text_of(outputs) == "abcdef" and last_of(outputs).finish_reason == "length"


def test_stop_strings_wait_for_min_tokens():
    engine = make_engine()
    engine.add(request(stop=("c", "f"), min_tokens=5, max_tokens=20))
    assert text_of(run_dry(engine)) == "abcde"


def test_characters_come_whole():
    tea = "one 🍵, two 🍵".encode()
    engine = make_engine(scripted({1: tea}))
    engine.add(request(seed=1))
    outputs = run_dry(engine)
    assert text_of(outputs) == tea.decode()
    assert all("\ufffd" not in out.text for out in outputs)


def test_half_a_character_at_the_end_is_flushed_once():
    engine = make_engine(scripted({1: "a🍵".encode()}))
    engine.add(request(seed=1, max_tokens=3))
    assert text_of(run_dry(engine)) == "a\ufffd"


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 9), (4, [1, 4, 4]), (5, [1, 5, 3]), (100, [1, 8]), (0, [9])])
def test_stream_interval(interval, sizes):
    engine = make_engine()
    engine.add(request(max_tokens=9, stream_interval=interval))
    outputs = run_dry(engine)
    assert [len(out.token_ids) for out in outputs] == sizes
    assert text_of(outputs) == "abcdefghi"
    assert [out.num_output_tokens for out in outputs] == [sum(sizes[: k + 1]) for k in range(len(sizes))]


def test_logprobs_follow_their_tokens():
    engine = make_engine()
    engine.add(request(max_tokens=6, logprobs=3, stream_interval=4, stop=("e",)))
    outputs = run_dry(engine)
    scores = [score for out in outputs for score in out.logprobs]
    assert [score.token_id for score in scores] == list(b"abcde")
    assert [score.rank for score in scores] == [t + 1 for t in b"abcde"]
    assert scores[0].logprob == pytest.approx(-0.97)
    assert [t for t, _ in scores[0].top] == [0, 1, 2]
    assert all(out.prompt_logprobs is None for out in outputs)


def test_prompt_logprobs_come_once_with_the_first_output():
    engine = make_engine(max_step_tokens=8)
    prompt = "a long prompt in several chunks"
    engine.add(request(prompt=prompt, max_tokens=3, prompt_logprobs=2))
    first, *others = run_dry(engine)
    assert first.prompt_logprobs[0] is None
    assert [score.token_id for score in first.prompt_logprobs[1:]] == list(prompt.encode()[1:])
    assert all(len(score.top) == 2 for score in first.prompt_logprobs[1:])
    assert all(out.prompt_logprobs is None for out in others) and first.logprobs is None


def test_impossible_tokens_have_finite_logprobs():
    engine = make_engine(scripted({1: b"ab"}))
    collect = engine._runner.collect

    def with_infinity(handle):
        result = collect(handle)
        result.logprobs[:] = float("-inf")
        result.top_logprobs[:, 1] = float("nan")
        return result

    engine._runner.collect = with_infinity
    engine.add(request(seed=1, logprobs=2))
    score = next(score for out in run_dry(engine) for score in out.logprobs)
    assert score.logprob == -9999.0 and score.top[1][1] == -9999.0


def test_n_continuations_have_their_own_text_end_and_seed():
    seeds = [continuation_seed(7, index) for index in range(3)]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    texts = dict(zip(seeds, (b"first", b"the second", b"3"), strict=True))
    engine = make_engine(scripted(texts))
    engine.add(request(seed=7, n=3))
    outputs = run_dry(engine)
    assert [text_of(outputs, index=k) for k in range(3)] == ["first", "the second", "3"]
    assert [last_of(outputs, index=k).finish_reason for k in range(3)] == ["stop"] * 3
    assert engine.stats().num_finished == {"stop": 3}


def test_seed_is_taken_modulo_64_bits_and_draws_differ_without_one():
    seen = set()

    def script(work):
        seen.add(work.seed)
        return EOS

    engine = make_engine(script)
    engine.add(request("a", seed=-1))
    run_dry(engine)
    assert seen == {2**64 - 1}
    for name in "bcd":
        engine.add(request(name))
    run_dry(engine)
    assert len(seen) == 4 and all(0 <= seed < 2**64 for seed in seen)


@pytest.mark.parametrize(
    ("options", "parameter", "names"),
    [
        ({"prompt": []}, "prompt", "0 tokens"),
        ({"prompt": [1] * 64}, "prompt", "64 tokens"),
        ({"prompt": [1, -1]}, "prompt", "-1 at index 1"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", f"0 to {VOCAB_SIZE - 1}"),
        ({"prompt": [2**62]}, "prompt", str(2**62)),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", str(VOCAB_SIZE)),
        ({"stop_token_ids": (9999,)}, "stop_token_ids", "9999"),
        ({"stream_interval": -1}, "stream_interval", "-1"),
        ({"deadline_s": float("nan")}, "deadline_s", "nan"),
    ],
)
def test_mistakes_are_answered_and_nobody_else_notices(options, parameter, names):
    engine = make_engine()
    engine.add(request("good", max_tokens=4))
    engine.step()
    engine.add(request("bad", n=2, **options))
    outputs = run_dry(engine)
    for index in range(2):
        bad = last_of(outputs, "bad", index)
        assert bad.finish_reason == "error" and bad.parameter == parameter
        assert parameter in bad.error and names in bad.error
    assert last_of(outputs, "good").num_output_tokens == 4


def test_the_longest_prompt_leaves_room_for_one_token():
    engine = make_engine(max_model_len=64)
    engine.add(request(prompt=[1] * 63))
    last = last_of(run_dry(engine))
    assert (last.finish_reason, last.num_output_tokens) == ("length", 1)


def test_a_small_cache_bounds_prompt_and_output():
    engine = make_engine(num_pages=5, page_size=4, max_model_len=64)
    engine.add(request("long", prompt=[1] * 16))
    engine.add(request("fits", prompt=[1] * 10))
    outputs = run_dry(engine)
    assert "15 tokens" in last_of(outputs, "long").error
    assert last_of(outputs, "fits").num_output_tokens == 6


def test_an_id_in_flight_is_refused_and_may_be_used_again_later():
    engine = make_engine()
    engine.add(request(max_tokens=4))
    engine.add(request(max_tokens=4))
    outputs = run_dry(engine)
    assert [out.parameter for out in outputs if out.finish_reason == "error"] == ["request_id"]
    assert sum(out.finish_reason == "length" for out in outputs) == 1
    engine.add(request(max_tokens=4))
    assert last_of(run_dry(engine)).finish_reason == "length"


def test_a_full_queue_refuses():
    engine = make_engine(max_waiting=2)
    for name in "abcd":
        engine.add(request(name, max_tokens=2))
    outputs = run_dry(engine)
    reasons = [last_of(outputs, name).finish_reason for name in "abcd"]
    assert reasons == ["length", "length", "error", "error"]
    assert last_of(outputs, "d").parameter == "max_waiting"


def test_abort_ends_every_continuation_once():
    engine = make_engine()
    engine.add(request("a", n=3))
    engine.add(request("b", max_tokens=3))
    outputs = engine.step() + engine.step()
    engine.handle(AbortRequest("a"))
    engine.handle(AbortRequest("a"))
    engine.handle(AbortRequest("unknown"))
    outputs += run_dry(engine)
    assert [last_of(outputs, "a", index).finish_reason for index in range(3)] == ["abort"] * 3
    assert last_of(outputs, "b").finish_reason == "length"
    assert engine.stats().num_finished == {"abort": 3, "length": 1}
    engine.scheduler.check_integrity()


def test_a_deadline_ends_a_request():
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    engine.add(request("slow", deadline_s=5.0))
    engine.add(request("fast", deadline_s=5.0, max_tokens=2))
    outputs = engine.step() + engine.step() + engine.step()
    now[0] = 5.0
    outputs += run_dry(engine)
    slow = last_of(outputs, "slow")
    assert (slow.finish_reason, slow.parameter) == ("abort", "deadline_s") and "5 s" in slow.error
    assert last_of(outputs, "fast").finish_reason == "length"


def test_shutdown_drains_then_aborts():
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    engine.add(request("short", max_tokens=3))
    engine.add(request("long"))
    engine.handle(Shutdown(drain_s=10.0))
    engine.add(request("late"))
    outputs = []
    for _ in range(8):
        outputs += engine.step()
    assert not engine.is_drained
    now[0] = 10.0
    outputs += run_dry(engine)
    assert engine.is_drained
    assert last_of(outputs, "short").finish_reason == "length"
    assert last_of(outputs, "long").finish_reason == "abort"
    assert last_of(outputs, "late").parameter == "engine"


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_a_failure_of_the_runner_is_fatal_and_stays_so(fails_at):
    engine = make_engine()
    engine._runner.fails_at = fails_at
    engine.add(request())
    with pytest.raises(EngineCrash, match="the device is gone"):
        run_dry(engine)
    with pytest.raises(EngineCrash, match="the device is gone"):
        engine.step()


def test_a_request_whose_text_cannot_be_made_ends_alone():
    engine = make_engine(scripted({1: b"abc", 2: b"a\x00c"}))
    bytes_of = engine.tokenizer.token_bytes

    def broken(token_id):
        if token_id == 0:
            raise KeyError("no such piece")
        return bytes_of(token_id)

    engine.tokenizer.token_bytes = broken
    engine.add(request("good", seed=1))
    engine.add(request("bad", seed=2))
    outputs = run_dry(engine)
    assert last_of(outputs, "good").finish_reason == "stop" and text_of(outputs, "good") == "abc"
    bad = last_of(outputs, "bad")
    assert bad.finish_reason == "error" and "no such piece" in bad.error and bad.parameter is None
    engine.scheduler.check_integrity()


def test_a_request_the_scheduler_cannot_take_ends_alone():
    engine = make_engine()
    add = engine.scheduler.add

    def picky(request):
        if request.index == 2:
            raise ValueError("no room in the tree")
        add(request)

    engine.scheduler.add = picky
    engine.add(request("good", max_tokens=3))
    engine.add(request("bad", n=3))
    outputs = run_dry(engine)
    assert last_of(outputs, "good").finish_reason == "length"
    assert all("no room in the tree" in last_of(outputs, "bad", k).error for k in range(3))
    engine.scheduler.check_integrity()


@pytest.mark.parametrize(("overlap", "depth"), [(True, 2), (False, 1)])
def test_steps_in_flight_and_what_the_trace_says(overlap, depth):
    engine = make_engine(overlap=overlap)
    engine.add(request(max_tokens=20))
    run_dry(engine)
    assert engine._runner.max_in_flight == depth
    records = list(engine.trace)
    decodes = [record for record in records if record.num_decodes][:-2]
    assert {record.queue_depth for record in decodes} == {depth - 1}
    figures = summarize(decodes)
    assert figures["num_steps"] == len(decodes) and figures["host_ms_p50"] > 0
    assert figures["num_reads_without_queue"] == (0 if overlap else len(decodes))
    stats = engine.stats()
    assert stats.num_steps == len(records) >= 20
    assert stats.num_computed_prefill_tokens == 5
    assert stats.num_output_tokens == 20
    assert stats.num_reads_without_queue == sum(record.queue_depth == 0 for record in records)


def test_outputs_travel_as_messages():
    engine = make_engine()
    engine.add(request(max_tokens=4, logprobs=2, prompt_logprobs=1))
    outputs = run_dry(engine)
    assert decode_from_engine(encode(OutputBatch(outputs))) == OutputBatch(outputs)
    assert decode_from_engine(encode(Heartbeat(engine.stats()))) == Heartbeat(engine.stats())


def test_cached_tokens_are_reported_per_request_and_in_sum():
    engine = make_engine()
    for name in "ab":
        engine.add(request(name, prompt="twelve bytes and", max_tokens=3))
        last = last_of(run_dry(engine), name)
        assert last.num_cached_tokens == (0 if name == "a" else 12)  # full pages; the last token is computed
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_prefill_tokens) == (32, 12, 20)
    engine.add(request("c", prompt="twelve bytes and", namespace="other", max_tokens=3))
    assert last_of(run_dry(engine), "c").num_cached_tokens == 0


def test_scores_of_a_cached_prompt_are_complete():
    engine = make_engine()
    for _ in range(2):
        engine.add(request(max_tokens=2, prompt_logprobs=1, n=2))
        outputs = run_dry(engine)
        for index in range(2):
            scored = [out for out in outputs if out.index == index and out.prompt_logprobs is not None]
            assert len(scored) == 1
            assert [score.token_id for score in scored[0].prompt_logprobs[1:]] == list(b"ello")


def test_flush_is_taken_while_requests_run():
    engine = make_engine()
    engine.add(request(max_tokens=4))
    outputs = engine.step()
    engine.handle(FlushCache())
    assert text_of(outputs + run_dry(engine)) == "abcd"


WORDS = ["tea", "é", "🍵", " ", "stop", "st", "op", "日本", "\n", "x"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_soak(seed, overlap):
    """Random texts, stops, intervals, aborts: every request ends once, and its text is the plain decoding, cut."""
    rng = random.Random(seed)
    texts = {k: "".join(rng.choices(WORDS, k=rng.randint(0, 20))).encode() for k in range(1, 4000)}
    engine = make_engine(scripted(texts), num_pages=20, max_num_rows=6, overlap=overlap)
    expected, outputs, aborted, key = {}, [], set(), 0
    for _ in range(1500):
        if rng.random() < 0.25:
            key += 1
            stops = tuple(rng.sample(["stop", "ts", "op", "é日", "🍵x"], rng.randint(0, 3)))
            limit = rng.choice([None, 1, 2, 5, 20])
            engine.add(
                request(
                    f"{key}", prompt=rng.choices(range(256), k=rng.randint(1, 30)), seed=key, stop=stops,
                    max_tokens=limit, stream_interval=rng.choice([0, 1, 3]),
                )
            )  # fmt: skip
            expected[f"{key}"] = (texts[key], stops, limit)
        if expected and rng.random() < 0.03:
            victim = rng.choice(list(expected))
            engine.abort(victim)
            aborted.add(victim)
        outputs += engine.step()
    outputs += run_dry(engine)
    for name, (text, stops, limit) in expected.items():
        last = last_of(outputs, name)
        if name in aborted and last.finish_reason == "abort":
            assert text.decode("utf-8", "replace").startswith(text_of(outputs, name).rstrip("\ufffd"))
            continue
        room = min(limit or 64, 64 - last.num_prompt_tokens)
        whole = text[:room].decode("utf-8", "replace")
        ends = [
            (whole.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole
        ]  # the first to be complete, the longest of those
        if ends:
            end, _, stop = min(ends)
            assert (last.finish_reason, last.stop_reason) == ("stop", stop)
            assert text_of(outputs, name) == whole[: end - len(stop)]
        else:
            assert last.finish_reason == ("stop" if len(text) < room else "length")
            assert text_of(outputs, name) == whole
    assert len(aborted) > 5 and len(expected) > 200
    engine.scheduler.check_integrity()
    assert not engine._answers.by_number and not engine._answers.groups
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_pages_held == 0
    assert stats.num_preemptions > 0
    engine.flush_cache()
    assert engine.stats().num_pages_cached == 0
    assert sum(stats.num_finished.values()) == len(expected)
    assert stats.num_output_tokens == sum(len(out.token_ids) for out in outputs)


def test_messages_in_flight_do_not_grow_the_engine():
    engine = make_engine(alphabet)
    for k in range(300):
        engine.add(request(f"{k}", max_tokens=1, deadline_s=1000.0))
        run_dry(engine)
    assert len(engine._deadlines._heap) <= 257


def test_add_request_round_trips_through_msgpack():
    message = request(stop=("a",), logit_bias={3: 1.5}, n=2)
    assert msgspec.msgpack.decode(encode(message), type=AddRequest) == message
