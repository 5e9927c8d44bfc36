"""The same programs on an LLM, on a jaxserve server by tokens, and by OpenAI's protocol: the same values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxserve import lang
from jaxserve.lang.backends.http import ServerError
from jaxserve.llm import LLM

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from jaxserve.server.settings import ServerSettings
from live import serving, wait_for
from simulated_engine import make_engine
from toy_model import write_toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def llm(tokenizer):
    with LLM.from_engine(make_engine(str(tokenizer))) as local:
        yield local


@pytest.fixture(scope="module")
def url(tokenizer):
    command = (sys.executable, str(Path(__file__).parent / "simulated_engine.py"), f"--tokenizer={tokenizer}")
    with serving(ServerSettings(engine_command=command)) as live:
        wait_for(lambda: live.http.get("/ready").status_code == 200, 30)
        yield live.url


@pytest.fixture(scope="module")
def endpoint(url):
    return lang.RuntimeEndpoint(url)


@pytest.fixture(scope="module")
def completions(url):
    return lang.OpenAI("toy-model", is_chat_model=False, base_url=f"{url}/v1")


@pytest.fixture(scope="module")
def chat(url):
    return lang.OpenAI("toy-model", is_chat_model=True, base_url=f"{url}/v1")


def text_program(s, word):
    s += "12 " + word + ":" + lang.gen("a", max_tokens=6)
    branches = s.fork(2)
    branches += lambda index: f" {index}" + lang.gen("b", max_tokens=4, stop="9")
    branches.join()
    s += " = " + s["b"][0] + lang.select("c", [" 11", " 2", " 345"])
    s += lang.select("d", ["(", "()"], choices_method=lang.greedy_token_selection)
    s += lang.select("e", ["7!", "8"], choices_method=lang.unconditional_likelihood_normalized)
    s += " many" + lang.gen("n", max_tokens=3, n=3)


def chat_program(s, word):
    s += lang.system("12")
    s += lang.user(word)
    s += lang.assistant(lang.gen("a", max_tokens=5))
    s += lang.user("and 34?")
    s += lang.assistant(lang.gen("b", max_tokens=5))


def values(program, backend, **options):
    state = lang.function(program).run("word", backend=backend, seed=1, **options)
    assert state.error() is None, state.error()
    names = [name for name in "abcden" if name in state]
    return {name: state[name] for name in names}, state


@pytest.mark.parametrize("program", [text_program, chat_program])
def test_by_tokens_everything_is_the_same(llm, endpoint, program):
    expected, local = values(program, llm)
    found, remote = values(program, endpoint)
    assert found == expected
    assert remote.text() == local.text() and remote.messages() == local.messages()
    assert remote.get_meta_info("a")["finish_reason"] == local.get_meta_info("a")["finish_reason"]
    if program is text_program:
        for name in "cde":
            for mine, theirs in zip(
                remote.get_meta_info(name)["input_token_logprobs"], local.get_meta_info(name)["input_token_logprobs"]
            ):
                assert [entry[0] for entry in mine] == pytest.approx([entry[0] for entry in theirs])


def test_a_url_is_a_backend(llm, url):
    assert values(chat_program, url)[0] == values(chat_program, llm)[0]


def test_completions_give_the_same_values(llm, completions):
    expected, local = values(text_program, llm)
    found, remote = values(text_program, completions)
    assert found == expected and remote.text() == local.text()


def test_chat_completions_give_the_same_values(llm, chat):
    expected, local = values(chat_program, llm)
    found, remote = values(chat_program, chat)
    assert found == expected and remote.messages() == local.messages()


@pytest.mark.parametrize("name", ["endpoint", "completions"])
def test_compiled_programs_on_servers(llm, name, request):
    backend = request.getfixturevalue(name)
    compiled = lang.function(text_program).compile()
    state = compiled.run("word", backend=backend, seed=1)
    assert state.text() == lang.function(text_program).run("word", backend=llm, seed=1).text()


@pytest.mark.parametrize("name", ["endpoint", "completions", "chat"])
def test_streams(llm, name, request):
    backend = request.getfixturevalue(name)
    program = chat_program if name == "chat" else lambda s, word: s.__iadd__("12" + lang.gen("a", max_tokens=7))
    expected, _ = values(program, llm)
    state = lang.function(program).run("word", backend=backend, seed=1, stream=True)
    assert "".join(state.text_iter("a")) == expected["a"] == state["a"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"regex": "a+"}, "regex"),
        ({"dtype": int}, "dtype"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("backend", ["completions", "chat"])
def test_what_openai_has_no_word_for_is_refused_by_name(backend, options, name, request):
    def program(s):
        s += lang.user("x") if backend == "chat" else "x"
        s += lang.assistant(lang.gen("a", **options)) if backend == "chat" else lang.gen("a", **options)

    error = lang.function(program).run(backend=request.getfixturevalue(backend)).error()
    assert isinstance(error, ValueError) and str(error).startswith(f"{name}: ") and "OpenAI" in str(error)


def test_neutral_values_are_no_options(chat):
    def program(s):
        s += lang.user("x") + lang.assistant(lang.gen("a", max_tokens=2, top_k=-1, min_p=0.0, ignore_eos=False))

    assert lang.function(program).run(backend=chat).error() is None


@pytest.mark.parametrize(
    ("append", "message"),
    [
        (lambda: lang.user("x") + lang.assistant(lang.select("a", ["y", "n"])), "select: OpenAI's chat route"),
        (lambda: lang.user("x") + lang.assistant("So: " + lang.gen("a")), "gen: OpenAI's chat models"),
        (lambda: lang.user("x") + lang.gen("a"), "gen: OpenAI's chat models"),
    ],
)
def test_what_chat_models_cannot_do_is_refused_by_name(chat, append, message):
    error = lang.function(lambda s: s.__iadd__(append())).run(backend=chat).error()
    assert isinstance(error, ValueError) and message in str(error)


def test_roles_on_a_completion_model_are_refused(completions):
    error = lang.function(lambda s: s.__iadd__(lang.user("x"))).run(backend=completions).error()
    assert "role: got 'user'" in str(error)


@pytest.mark.parametrize("name", ["endpoint", "completions", "chat"])
def test_the_servers_own_words_reach_the_program(name, request):
    def program(s):
        long = "1 " * 2000
        s += lang.user(long) if name == "chat" else long
        s += lang.assistant(lang.gen("a")) if name == "chat" else lang.gen("a")

    error = lang.function(program).run(backend=request.getfixturevalue(name)).error()
    assert isinstance(error, ServerError) and error.status == 400 and "1024" in str(error)


def test_batches_over_http(llm, endpoint):
    program = lang.function(chat_program)
    batch = [{"word": f"{index}?"} for index in range(8)]
    expected = [state.text() for state in program.run_batch(batch, backend=llm, seed=1)]
    assert [state.text() for state in program.run_batch(batch, backend=endpoint, seed=1)] == expected


def test_flush_cache(llm, endpoint, chat):
    assert lang.flush_cache(endpoint) is True
    assert lang.flush_cache(chat) is False
