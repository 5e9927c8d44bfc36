"""The words of the language on a model that writes a hash of what it reads."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from lang_fakes import SlowRunner, make_llm, written

from benchmarks.prefill_meter import PrefillMeter
from jaxserve import lang
from jaxserve.lang.backends.local import LocalBackend
from jaxserve.sampling_params import InvalidParameter


@pytest.fixture(scope="module")
def llm():
    with make_llm() as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_leaks(llm):
    """After every test no page is held, and every page and reference is accounted for."""
    yield
    gc.collect()  # errors hold frames, and frames the prefix of a batch
    for _ in range(200):
        if not llm.stats().num_pages_held:
            break
        time.sleep(0.01)
    assert llm.stats().num_pages_held == 0
    llm.engine_thread.call(lambda engine: engine.scheduler.check_integrity())


def run(llm, body, **options):
    """Run a function of a state as a program, with the seed that written() expects."""
    return lang.function(body).run(backend=llm, seed=1, **options)


def test_gen_goes_on_from_the_text(llm):
    def program(s):
        s += "Hello" + lang.gen("a", max_tokens=6)
        s += " and " + lang.gen("b", max_tokens=4) + "!"

    state = run(llm, program)
    first = written("Hello", 6)
    second = written(f"Hello{first} and ", 4)
    assert (state["a"], state["b"]) == (first, second)
    assert state.text() == f"Hello{first} and {second}!"
    assert "a" in state and "c" not in state
    assert state.error() is None


def test_where_text_is_cut_does_not_matter(llm):
    def program(s):
        s += "ab"
        s += "c" + lang.gen("a", max_tokens=3)

    assert run(llm, program)["a"] == written("abc", 3)


def test_gen_never_blocks_and_reading_waits(llm):
    appended = threading.Event()

    def program(s):
        for _ in range(30):
            s += "x" + lang.gen("a", max_tokens=8)
        appended.set()
        return s["a"]

    state = run(llm, program)
    assert appended.is_set()
    text = ""
    for _ in range(30):
        text += "x"
        text += written(text, 8)
    assert state.text() == text and text.endswith(state.ret_value)


def test_options_of_run_are_defaults_and_gen_overrides_them(llm):
    def program(s):
        s += "q" + lang.gen("a") + lang.gen("b", max_tokens=2)

    state = run(llm, program, max_new_tokens=5)
    assert len(state["a"]) == 5 and len(state["b"]) == 2
    assert state.get_meta_info("a")["finish_reason"] == {"type": "length", "length": 5}


def test_stop_strings_end_before_the_stop_and_text_goes_on_behind_it(llm):
    whole = written("stop", 12)
    stop = whole[5]
    before = whole[: whole.index(stop)]

    def program(s):
        s += "stop" + lang.gen("a", max_tokens=12, stop=stop) + "|" + lang.gen("b", max_tokens=3)

    state = run(llm, program)
    assert state["a"] == before
    assert state["b"] == written(f"stop{before}|", 3)
    assert state.get_meta_info("a")["finish_reason"] == {"type": "stop", "matched": stop}


def test_an_end_token_is_not_part_of_the_text(llm):
    start = next(f"end{number}" for number in range(1000) if 2 <= len(written(f"end{number}", 20)) < 15)

    def program(s):
        s += start + lang.gen("a", max_tokens=20) + "." + lang.gen("b", max_tokens=3)

    state = run(llm, program)
    assert state["a"] == written(start, 20)
    assert state["b"] == written(start + state["a"] + ".", 3)


def test_n_gives_a_list_and_the_first_goes_on(llm):
    def program(s):
        s += "many" + lang.gen("a", max_tokens=5, n=4)
        s += "." + lang.gen("b", max_tokens=3)

    state = run(llm, program)
    assert len(state["a"]) == 4 == len(set(state["a"])) == len(state.get_meta_info("a"))
    assert state["a"][0] == written("many", 5)
    assert state["b"] == written("many" + state["a"][0] + ".", 3)


def test_log_probabilities_in_meta_info(llm):
    def program(s):
        s += "logs" + lang.gen(
            "a", max_tokens=4, return_logprob=True, logprob_start_len=1, return_text_in_logprobs=True
        )

    meta = run(llm, program).get_meta_info("a")
    assert [text for _, _, text in meta["output_token_logprobs"]] == list(written("logs", 4))
    assert [text for _, _, text in meta["input_token_logprobs"]] == ["o", "g", "s"]
    assert all(logprob <= 0 for logprob, _, _ in meta["output_token_logprobs"] + meta["input_token_logprobs"])
    assert meta["prompt_tokens"] == 4 and meta["completion_tokens"] == 4


def test_roles_as_calls_and_as_blocks(llm):
    def program(s):
        s += lang.system("Be brief.")
        with s.user():
            s += "Hi"
            s += " there"
        s += lang.assistant("So: " + lang.gen("a", max_tokens=4))
        s.user("Bye")
        with s.assistant():
            s += lang.gen("b", max_tokens=3)

    state = run(llm, program)
    prompt = "[system]Be brief.\n[user]Hi there\n[assistant]So: "
    assert state["a"] == written(prompt, 4)
    prompt += state["a"] + "\n[user]Bye\n[assistant]"
    assert state["b"] == written(prompt, 3)
    assert state.text() == prompt + state["b"] + "\n"
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "So: " + state["a"]},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": state["b"]},
    ]


def test_role_marks_are_the_same_by_begin_and_end(llm):
    def by_marks(s):
        s += lang.user_begin() + "Hi" + lang.user_end() + lang.assistant_begin() + "yes" + lang.assistant_end()

    def by_roles(s):
        s += lang.user("Hi") + lang.assistant("yes")

    assert run(llm, by_marks).text() == run(llm, by_roles).text() == "[user]Hi\n[assistant]yes\n"


def test_messages_inside_messages_are_refused(llm):
    def program(s):
        with s.user():
            s += lang.assistant("no")

    assert "one message after another" in str(run(llm, program).error())


def test_fork_goes_on_from_everything_appended_before(llm):
    def program(s):
        s += "root" + lang.gen("a", max_tokens=3) + ":"
        branches = s.fork(3)
        branches += lambda index: str(index) + lang.gen("b", max_tokens=4)
        s += "root again"
        branches.join()
        return [branch["a"] for branch in branches]

    state = run(llm, program)
    stem = "root" + written("root", 3) + ":"
    assert state["b"] == [written(f"{stem}{index}", 4) for index in range(3)]
    assert state.ret_value == [written("root", 3)] * 3
    assert state.text() == stem + "root again"


def test_groups_take_expressions_lists_and_functions(llm):
    def program(s):
        branches = s.fork(2)
        branches += "same"
        branches += ["x", "y"]
        branches += lambda index: f"{index}"
        branches[1] += "!"
        for branch in branches:
            branch += lang.gen("a", max_tokens=2)
        assert len(branches) == 2
        return [branch.text() for branch in branches]

    state = run(llm, program)
    assert state.ret_value == [prompt + written(prompt, 2) for prompt in ("samex0", "samey1!")]


def test_join_concatenates_text(llm):
    def program(s):
        s += "list:"
        branches = s.fork(2)
        branches += lambda index: f"\n{index}." + lang.gen("item", max_tokens=3)
        branches.join("concate_and_append")
        s += "\nend" + lang.gen("c", max_tokens=2)

    state = run(llm, program)
    items = [f"\n{index}." + written(f"list:\n{index}.", 3) for index in range(2)]
    assert state.text().startswith("list:" + items[0] + items[1] + "\nend")
    assert state["c"] == written("list:" + items[0] + items[1] + "\nend", 2)
    with pytest.raises(ValueError, match="gather_variable"):
        run(llm, lambda s: s.fork(2).join("nope"))


def test_copy_is_a_branch_whose_variables_come_back(llm):
    def program(s):
        s += "stem"
        with s.copy() as copied:
            copied += "?" + lang.gen("a", max_tokens=3)
        s += "." + lang.gen("b", max_tokens=3)

    state = run(llm, program)
    assert state["a"] == [written("stem?", 3)]
    assert state["b"] == written("stem.", 3)


def test_var_scope_names_the_text_of_a_block(llm):
    def program(s):
        s += "before "
        with s.var_scope("inner"):
            s += "<" + lang.gen("a", max_tokens=2) + ">"
        s += " after"

    state = run(llm, program)
    assert state["inner"] == "<" + state["a"] + ">"


def test_variables_can_be_set(llm):
    def program(s):
        s["mine"] = 7
        s.set_var("other", "x")
        s += "a" + s["other"]
        return s["mine"]

    state = run(llm, program)
    assert state.ret_value == 7 and state.text() == "ax"


@pytest.mark.parametrize(
    "method",
    [
        lang.token_length_normalized,
        lang.greedy_token_selection,
        lang.unconditional_likelihood_normalized,
    ],
)
def test_select_takes_the_best_choice_and_goes_on(llm, method):
    choices = ["alpha", "beta", "b", "gamma delta"]

    def program(s):
        s += "Which? " + lang.select("c", choices, choices_method=method)
        s += lang.gen("a", max_tokens=3)

    state = run(llm, program)
    meta = state.get_meta_info("c")
    assert [[text for _, _, text in tokens] for tokens in meta["input_token_logprobs"]] == [
        list(choice) for choice in choices
    ]
    assert all(logprob is not None for tokens in meta["input_token_logprobs"] for logprob, _, _ in tokens)
    assert state["c"] in choices
    assert state["a"] == written("Which? " + state["c"], 3)


def test_select_scores_are_those_of_the_prompt(llm):
    """The same log-probabilities as scoring the whole text with prompt_logprobs gives."""
    from jaxserve import SamplingParams

    state = run(llm, lambda s: s.__iadd__("Which? " + lang.select("c", ["alpha", "be"])))
    for choice, tokens in zip(["alpha", "be"], state.get_meta_info("c")["input_token_logprobs"]):
        params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0)
        scores = llm.generate("Which? " + choice, params)[0].prompt_logprobs[-len(choice) :]
        assert [logprob for logprob, _, _ in tokens] == pytest.approx([score.logprob for score in scores])


def test_choices_of_gen_are_a_select(llm):
    state = run(llm, lambda s: s.__iadd__("Which? " + lang.gen("c", choices=["yes", "no"])))
    assert state["c"] in ("yes", "no")
    assert "normalized_prompt_logprobs" in state.get_meta_info("c")


def test_separate_reasoning_cuts_thoughts_out():
    from jaxserve.lang.reasoning import split_reasoning

    assert split_reasoning("<think>\nhm\n</think>\n\nyes", "qwen3") == ("hm", "yes")
    assert split_reasoning("yes", "qwen3") == ("", "yes")
    assert split_reasoning("hm</think>yes", "deepseek-r1") == ("hm", "yes")
    assert split_reasoning("hm", "deepseek-r1") == ("hm", "")
    with pytest.raises(ValueError, match=r"model_type: got 'x'; allowed: .*qwen3"):
        lang.separate_reasoning(lang.gen("a"), "x")


def test_separate_reasoning_in_a_program(llm):
    """The thoughts are everything: this model never closes them."""

    def program(s):
        s += lang.user("Hi")
        s += lang.assistant(lang.separate_reasoning(lang.gen("a", max_tokens=4), model_type="deepseek-r1"))

    state = run(llm, program)
    assert state["a"] == ""
    assert state["a_reasoning_content"] == written("[user]Hi\n[assistant]", 4).strip()
    assert state.messages()[-1] == {"role": "assistant", "content": ""}


def test_images_are_a_clear_error(llm):
    for expr in (lang.image("cat.png"), lang.video("cat.mp4", 8)):
        state = run(llm, lambda s, expr=expr: s.__iadd__(lang.user(expr)))
        assert "no model here takes" in str(state.error())


def test_streaming_gives_pieces_of_text_and_of_variables():
    def program(s):
        s += "stream" + lang.gen("a", max_tokens=9) + "-" + lang.gen("b", max_tokens=9)

    with make_llm(runner_class=SlowRunner) as slow:
        state = run(slow, program, stream=True)
        pieces = list(state.text_iter("b"))
        assert len(pieces) > 1 and "".join(pieces) == state["b"]
        state = run(slow, program, stream=True)
        pieces = list(state.text_iter())
        assert len(pieces) > 3 and "".join(pieces) == state.text() == "stream" + state["a"] + "-" + state["b"]
        assert list(run(slow, program).text_iter("a")) == [state["a"]]


def test_streaming_with_asyncio(llm):
    def program(s):
        s += "stream" + lang.gen("a", max_tokens=9)

    async def read(**options):
        state = run(llm, program, **options)
        return [piece async for piece in state.text_async_iter("a", return_meta_data=True)]

    pieces = asyncio.run(read(stream=True))
    assert "".join(text for text, _ in pieces) == written("stream", 9)
    assert asyncio.run(read())[-1][1]["completion_tokens"] == 9


def test_an_error_reaches_every_waiter_and_stays(llm):
    waiting = threading.Barrier(4)
    seen = []

    def program(s):
        s += "x" + lang.gen("ok", max_tokens=2) + lang.gen("bad", temperature=-1) + lang.gen("later")

        def wait():
            waiting.wait()
            try:
                s["later"]
            except Exception as error:
                seen.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        waiting.wait()
        for thread in threads:
            thread.join()

    state = run(llm, program)
    assert len(seen) == 3 and len(set(map(id, seen))) == 1
    assert isinstance(seen[0], InvalidParameter) and seen[0].parameter == "temperature"
    assert state.error() is seen[0]
    assert state["ok"] == written("x", 2)  # what was made before it stays
    assert state.text() == "x" + state["ok"]
    with pytest.raises(InvalidParameter):
        state["later"]
    with pytest.raises(InvalidParameter):
        list(state.text_iter())


def test_the_error_of_a_branch_is_that_of_the_program(llm):
    def program(s):
        s += "x"
        branches = s.fork(2)
        branches[0] += lang.gen("a", max_tokens=2)
        branches[1] += lang.gen("a", top_p=7)
        branches.join()
        s += lang.gen("b", max_tokens=2)

    state = run(llm, program)
    assert isinstance(state.error(), InvalidParameter)
    with pytest.raises(InvalidParameter):
        state["a"]


def test_an_error_before_a_fork_reaches_the_branches(llm):
    def program(s):
        s += lang.gen("a", temperature=-1)
        return [branch["b"] for branch in s.fork(2) if branch.__iadd__("y" + lang.gen("b"))]

    with pytest.raises(InvalidParameter):
        run(llm, program)


def test_exceptions_of_the_function_are_raised_by_run(llm):
    def program(s):
        s += "x" + lang.gen("a", max_tokens=2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(llm, program)


def test_prompts_too_long_are_named(llm):
    state = run(llm, lambda s: s.__iadd__("x" * 2000 + lang.gen("a")))
    assert "prompt" in str(state.error()) and "2000 tokens" in str(state.error())


def test_a_program_that_is_given_up_stops_generating(llm):
    before = llm.stats().num_finished.get("abort", 0)

    def program(s):
        s += "endless" + lang.gen("a", max_tokens=900, ignore_eos=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llm, program)
    for _ in range(300):
        if llm.stats().num_finished.get("abort", 0) > before:
            return
        time.sleep(0.01)
    raise AssertionError("it goes on")


def test_the_end_of_the_engine_reaches_the_program():
    with make_llm(runner_class=SlowRunner) as slow:
        state = run(slow, lambda s: s.__iadd__("x" + lang.gen("a", max_tokens=900, ignore_eos=True)))
    assert state.error() is not None
    with pytest.raises(RuntimeError):
        state["a"]
    assert isinstance(run(slow, lambda s: s.__iadd__("x" + lang.gen("a"))).error(), RuntimeError)


def test_names_that_do_not_exist(llm):
    with pytest.raises(KeyError, match="no variable 'b'; there are: a"):
        run(llm, lambda s: s.__iadd__("x" + lang.gen("a", max_tokens=1)))["b"]


def test_nothing_can_be_appended_after_the_end(llm):
    state = run(llm, lambda s: s.__iadd__("x"))
    with pytest.raises(RuntimeError, match="has ended"):
        state += "y"


@pytest.mark.parametrize("thing", [5, object(), b"x"])
def test_only_text_and_expressions_can_be_appended(llm, thing):
    with pytest.raises(TypeError, match="takes text and expressions"):
        run(llm, lambda s: s.__iadd__(thing))


def test_none_is_refused_by_name(llm):
    with pytest.raises(ValueError, match="None"):
        run(llm, lambda s: s.__iadd__(None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lang.select("a", []), "choices"),
        (lambda: lang.select("a", ["x", ""]), "choices"),
        (lambda: lang.select("a", ["x"], temperature=0.5), "temperature"),
        (lambda: lang.select("a", ["x"], choices_method="mean"), "choices_method"),
        (lambda: lang.gen("a", regex="["), "regex"),
        (lambda: lang.gen("a", regex="x", dtype=int), "regex: got it together with dtype"),
        (lambda: lang.gen("a", dtype=dict), "dtype"),
        (lambda: lang.gen("a", stop_regex="x"), "stop_regex"),
    ],
)
def test_mistakes_are_named_where_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_arguments_by_position_name_and_bind(llm):
    @lang.function
    def program(s, a, b, c="C"):
        s += a + b + c

    assert program.run("1", "2", backend=llm).text() == "12C"
    assert program.run("1", c="3", b="2", backend=llm).text() == "123"
    assert program.bind(b="9").run("1", backend=llm).text() == "19C"
    assert program.bind(a="0").bind(b="9").run(backend=llm).text() == "09C"
    assert program("1", "2", backend=llm).text() == "12C"
    for arguments in ({"a": "1"}, {"a": "1", "b": "2", "d": "4"}):
        with pytest.raises(TypeError, match="argument"):
            program.run(backend=llm, **arguments)
    with pytest.raises(TypeError, match="no argument 'z'"):
        program.bind(z=1)


def test_default_backend(llm):
    program = lang.function(lambda s: s.__iadd__("x"))
    with pytest.raises(ValueError, match="set_default_backend"):
        program.run()
    lang.set_default_backend(llm)
    try:
        assert program.run().text() == "x"
        assert lang.flush_cache() is True
    finally:
        lang.set_default_backend(None)
    with pytest.raises(TypeError, match="allowed: an LLM"):
        program.run(backend=42)


def test_batches_keep_their_order_and_isolate_errors(llm):
    @lang.function
    def program(s, word, limit=3):
        s += "The same long beginning of every program: " + word
        s += lang.gen("a", max_tokens=limit)
        if word == "raise":
            raise RuntimeError("mine")

    batch = [{"word": f"w{index}", "limit": 1 + index % 5} for index in range(40)]
    batch[7] = {"word": "bad", "limit": -1}
    batch[9] = {"word": "raise"}
    states = program.run_batch(batch, backend=llm, seed=1, num_threads=8)
    assert len(states) == 40
    for index, (arguments, state) in enumerate(zip(batch, states)):
        if index == 7:
            assert isinstance(state.error(), InvalidParameter)
        elif index == 9:
            assert str(state.error()) == "mine"
        else:
            prompt = "The same long beginning of every program: " + arguments["word"]
            assert state["a"] == written(prompt, arguments["limit"])
    program._prefixes.clear()


def test_batches_of_tuples_and_as_a_generator(llm):
    @lang.function
    def program(s, a, b="!"):
        s += a + b + lang.gen("x", max_tokens=2)

    states = program.run_batch(
        [("1",), ("2", "?")], backend=llm, seed=1, generator_style=True, progress_bar=True, num_threads=1
    )
    assert not isinstance(states, list)
    assert [state["x"] for state in states] == [written("1!", 2), written("2?", 2)]
    assert program.run_batch([], backend=llm) == []
    with pytest.raises(TypeError):
        program.run_batch([("1", "2", "3")], backend=llm)


def test_a_batch_computes_the_common_beginning_once(llm):
    beginning = "All programs of this batch begin with these words, one after the other. "

    @lang.function
    def program(s, word):
        s += beginning + word + lang.gen("x", max_tokens=2)

    llm.flush_cache()
    before = llm.stats().num_computed_prefill_tokens
    program.run_batch([{"word": chr(97 + index)} for index in range(12)], backend=llm, seed=1)
    assert llm.stats().num_computed_prefill_tokens - before == len(beginning) + 12
    program._prefixes.clear()


def test_every_token_is_computed_once(llm):
    """A branching program computes what is its own and nothing twice, in the middle of pages too."""

    def program(s):
        s += "A beginning of some length, " + lang.gen("a", max_tokens=7) + " then"
        branches = s.fork(3)
        branches += lambda index: f" branch {index}:" + lang.gen("b", max_tokens=5)
        for branch in branches:
            branch += " more" + lang.gen("c", max_tokens=5)
        branches.join("concate_and_append")
        s += " end" + lang.gen("d", max_tokens=2) + lang.select("e", ["one", "two"])
        with s.copy() as copied:
            copied += " aside" + lang.gen("f", max_tokens=3)
        s += lang.gen("g", max_tokens=3)

    with PrefillMeter(llm) as meter:
        run(llm, program).sync()
    assert meter.num_requests > 10 and meter.ideal > 100
    assert meter.computed <= meter.ideal + 1


def test_backends_are_found_again(llm):
    from jaxserve.lang import as_backend

    assert as_backend(llm) is as_backend(llm)
    assert isinstance(as_backend(llm), LocalBackend)
