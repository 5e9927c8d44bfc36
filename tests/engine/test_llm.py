"""LLM over a scripted engine: order, batches, streams, threads, tasks, mistakes, interruption."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
import time

import numpy as np
import pytest
from engine_fakes import EOS, alphabet, make_engine, scripted

import jaxserve
from jaxserve import LLM, SamplingParams
from jaxserve.admission import continuation_seed
from jaxserve.engine import EngineCrash
from jaxserve.outputs import RequestFailed, RequestRefused


def slow_alphabet(work):
    time.sleep(0.002)
    return alphabet(work)


@contextlib.contextmanager
def llm_of(script=alphabet, **options):
    llm = LLM.from_engine(make_engine(script, **options), default_params=SamplingParams(max_tokens=5))
    with llm:
        yield llm


def wait_until_idle(llm: LLM) -> None:
    for _ in range(500):
        stats = llm.stats()
        if not stats.num_running + stats.num_waiting:
            return
        time.sleep(0.01)
    raise AssertionError(f"still at work: {stats}")


@pytest.mark.parametrize("progress", [False, True])
def test_generate_keeps_the_order_of_prompts(progress):
    texts = {k: f"answer {k}, ".encode() * (20 - k) for k in range(20)}
    with llm_of(scripted(texts), max_model_len=300, num_pages=400, max_num_rows=6) as llm:
        params = [SamplingParams(seed=k) for k in range(20)]
        outputs = llm.generate([f"prompt {k}" for k in range(20)], params, progress=progress)
    assert [out.text.encode() for out in outputs] == [texts[k] for k in range(20)]
    assert [out.prompt for out in outputs] == [f"prompt {k}" for k in range(20)]
    assert all(out.token_ids == [*texts[k], EOS] for k, out in enumerate(outputs))
    assert {out.finish_reason for out in outputs} == {"stop"}


def test_prompts_may_be_text_or_token_ids_one_or_many():
    with llm_of() as llm:
        for prompts, num in (
            ("hi", 1), (["hi", "ho"], 2), ([104, 105], 1), ([[104], [105], [106]], 3), (np.array([1, 2]), 1),
            (["hi", [104, 105]], 2), ([], 0), (("a", "b"), 2),
        ):  # fmt: skip
            outputs = llm.generate(prompts)
            assert [out.text for out in outputs] == ["abcde"] * num
        assert llm.generate([104, 105])[0].prompt_token_ids == [104, 105]
        with pytest.raises(TypeError, match=r"prompts\[0\]\[1\]: got 1.5"):
            llm.generate([[1, 1.5]])


def test_logprobs_n_and_stop_reach_the_result():
    texts = {continuation_seed(3, k): text for k, text in enumerate((b"one|x", b"two|y"))}
    with llm_of(scripted(texts)) as llm:
        (out,) = llm.generate("p!", SamplingParams(seed=3, n=2, stop=("|",), logprobs=1, prompt_logprobs=0))
    assert [c.text for c in out.outputs] == ["one", "two"]
    assert [c.stop_reason for c in out.outputs] == ["|", "|"]
    assert [score.token_id for score in out.outputs[1].logprobs] == list(b"two|")
    assert out.prompt_logprobs[0] is None and out.prompt_logprobs[1].token_id == ord("!")
    assert "one" in repr(out) and "two" in out._repr_html_() and out.num_output_tokens == 8


def test_html_shows_text_as_text():
    with llm_of(scripted({1: b"<script>"})) as llm:
        (out,) = llm.generate("<b>", SamplingParams(seed=1))
    assert "&lt;script&gt;" in out._repr_html_() and "<script>" not in out._repr_html_()


def test_chat_renders_conversations():
    with llm_of() as llm:
        conversation = [{"role": "user", "content": "hi"}]
        (one,) = llm.chat(conversation)
        assert bytes(one.prompt_token_ids) == b"[user]hi[assistant]"
        assert len(llm.chat([conversation, conversation])) == 2
        prefilled = [*conversation, {"role": "assistant", "content": "Well,"}]
        (more,) = llm.chat(prefilled, continue_final_message=True)
        assert bytes(more.prompt_token_ids).endswith(b"Well,")


def test_stream_yields_pieces_that_join_to_the_text():
    with llm_of(scripted({1: "tea 🍵 time".encode()})) as llm:
        pieces = list(llm.stream("x", SamplingParams(seed=1)))
        assert "".join(map(str, pieces)) == "tea 🍵 time"
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == "stop" and pieces[-1].num_output_tokens == 14


def test_leaving_a_stream_aborts_its_request():
    with llm_of(slow_alphabet, max_model_len=4000, num_pages=2000) as llm:
        stream = llm.stream("x", SamplingParams(max_tokens=3000))
        assert str(next(stream)) == "a"
        stream.close()
        wait_until_idle(llm)
        assert llm.stats().num_finished == {"abort": 1}


def test_mistakes_name_the_parameter_and_abort_the_rest():
    with llm_of(slow_alphabet, max_model_len=4000, num_pages=2000) as llm:
        with pytest.raises(RequestRefused, match="token ids 0 to 257") as caught:
            llm.generate([[1, 2], [1, 999]], SamplingParams(max_tokens=3000))
        assert caught.value.parameter == "prompt" and "prompt 1 of 2" in caught.value.__notes__[0]
        wait_until_idle(llm)
        with pytest.raises(ValueError, match="params: got 1; allowed: one, or one for each of 2"):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(RequestRefused, match="0 tokens"):
            list(llm.stream([]))
        assert llm.generate("ok")[0].text == "abcde"


def test_unknown_options_are_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match=r"max_model_length: not an option of LLM; allowed: .*max_model_len"):
        LLM("model", max_model_length=3)
    with pytest.raises(ValueError, match="dtype: got 'float8'"):
        LLM("model", dtype="float8")


def test_tasks_share_the_batch():
    with llm_of(slow_alphabet, max_num_rows=8, max_model_len=200, num_pages=600) as llm:

        async def main():
            params = SamplingParams(max_tokens=40)
            return await asyncio.gather(*(llm.async_generate(f"p{k}", params) for k in range(8)))

        outputs = asyncio.run(main())
        assert {len(out.token_ids) for out in outputs} == {40}
        assert llm.stats().num_steps < 8 * 40 / 2
        assert max(record.num_decodes for record in llm.trace) == 8


def test_async_stream_and_cancellation():
    with llm_of(slow_alphabet, max_model_len=4000, num_pages=2000) as llm:

        async def main():
            texts = [str(piece) async for piece in llm.async_stream("x")]
            task = asyncio.create_task(llm.async_generate("y", SamplingParams(max_tokens=3000)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return texts

        assert "".join(asyncio.run(main())) == "abcde"
        wait_until_idle(llm)
        assert llm.stats().num_finished == {"length": 1, "abort": 1}


def test_a_dead_event_loop_does_not_keep_its_request():
    with llm_of(slow_alphabet, max_model_len=4000, num_pages=2000) as llm:
        loop = asyncio.new_event_loop()
        outputs = llm._async_outputs([1], SamplingParams(max_tokens=3000), interval=1)
        loop.run_until_complete(anext(outputs))
        loop.close()
        wait_until_idle(llm)
        assert llm.generate("ok")[0].text == "abcde"


def test_several_threads_at_once():
    texts = {k: f"text {k}".encode() for k in range(64)}
    with llm_of(scripted(texts)) as llm, concurrent.futures.ThreadPoolExecutor(8) as pool:

        def one(k):
            return llm.generate("p", SamplingParams(seed=k))[0].text

        assert list(pool.map(one, range(64))) == [texts[k].decode() for k in range(64)]


def test_interrupt_aborts_and_leaves_the_llm_usable():
    with llm_of(slow_alphabet, max_model_len=4000, num_pages=2000) as llm:
        threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3000))
        finally:
            signal.signal(signal.SIGINT, previous)
        wait_until_idle(llm)
        assert llm.stats().num_finished == {"abort": 3}
        assert llm.generate("ok")[0].text == "abcde"


def test_a_crash_reaches_everyone_and_says_why():
    with llm_of(slow_alphabet, max_model_len=4000, num_pages=2000) as llm:
        engine = llm._thread._engine
        stream = llm.stream("x", SamplingParams(max_tokens=3000))
        next(stream)
        engine._runner.fails_at = engine._runner.num_dispatched + 3
        with pytest.raises(EngineCrash, match="the device is gone"):
            list(stream)
        with pytest.raises(EngineCrash, match="the device is gone"):
            llm.generate("later")
        assert "the device is gone" in repr(llm)
        assert engine._runner.is_closed


def test_a_failed_request_is_a_runtime_error():
    def broken(token_id):
        raise KeyError("no such piece")

    with llm_of() as llm:
        llm.tokenizer.token_bytes = broken
        with pytest.raises(RequestFailed, match="no such piece"):
            llm.generate("x")


def test_close_aborts_and_releases_the_runner():
    llm = LLM.from_engine(make_engine(slow_alphabet, max_model_len=4000, num_pages=2000))
    runner = llm._thread._engine._runner
    stream = llm.stream("x", SamplingParams(max_tokens=3000))
    next(stream)
    llm.close()
    llm.close()
    assert runner.is_closed and list(stream)[-1].finish_reason == "abort"
    with pytest.raises(EngineCrash, match="closed"):
        llm.generate("x")
    assert "closed" in repr(llm)


def test_a_forgotten_llm_ends_its_thread():
    llm = LLM.from_engine(make_engine())
    thread = llm._thread._thread
    assert llm.generate("x")
    del llm
    thread.join(5)
    assert not thread.is_alive()


def test_repr_and_flush():
    with llm_of(prefix_cache=True) as llm:
        llm.generate("a prompt with more than one page")
        assert llm.stats().num_pages_cached == 9 and "36 tokens kept" in repr(llm)
        llm.flush_cache()
        assert llm.stats().num_pages_cached == 0
        assert repr(llm).startswith("LLM('scripted', float32, context 64, cache of ")


def test_a_long_generation_shows_its_rate(monkeypatch, capsys):
    monkeypatch.setattr("jaxserve.progress._PATIENCE_S", 0.0)
    with llm_of(slow_alphabet) as llm:
        llm.generate(["a", "b"], progress=True)
        assert "2/2" in (shown := capsys.readouterr().err) and "tok/s" in shown
        llm.generate(["a", "b"])
        llm.generate(["a", "b"], use_tqdm=False)
        assert capsys.readouterr().err == ""


def test_names_of_the_package():
    assert jaxserve.LLM is LLM
