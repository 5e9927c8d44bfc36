"""Compiled programs against the interpreter, and their graphs."""

from __future__ import annotations

import threading
import time
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lang_fakes import make_llm, written
from random_programs import random_program

from benchmarks.prefill_meter import PrefillMeter
from jaxserve import lang
from jaxserve.sampling_params import InvalidParameter


@pytest.fixture(scope="module")
def llm():
    with make_llm() as engine:
        yield engine


def same(llm, program, *args, **options):
    """Run interpreted and compiled; both states, of which text and result are equal."""
    interpreted = program.run(*args, backend=llm, seed=1, **options)
    compiled = program.compile().run(*args, backend=llm, seed=1, **options)
    assert compiled.text() == interpreted.text()
    assert compiled.messages() == interpreted.messages()
    assert str(compiled.ret_value) == str(interpreted.ret_value)
    return interpreted, compiled


@lang.function
def everything(s, word, count=3):
    s += "A fairly long beginning that never changes at all. Hello " + word
    s += lang.gen("a", max_tokens=6)
    branches = s.fork(count)
    branches += lambda index: f" {index}:" + lang.gen("b", max_tokens=5)
    branches.join()
    s += s["b"][0] + s["b"][2].upper() + s["a"][1:3]
    for question in ("1?", "2?"):
        with s.copy() as copied:
            copied += question + lang.gen("q", max_tokens=4)
            s += lang.call(lambda text: text[::-1], copied["q"])
    s += lang.select("c", ["yes", "no", "maybe"])
    s["kept"] = s["a"]
    with s.user(), s.var_scope("scope"):
        s += "hm " + s["kept"]
    s += lang.assistant(lang.gen("d", max_tokens=3))
    parts = s.fork(2)
    parts += ["x", "y"]
    parts.join("concate_and_append")
    return {"d": s["d"], "all": [s["b"], (s["c"],)], "scope": s["scope"]}


def test_everything_is_the_same(llm):
    interpreted, compiled = same(llm, everything, "you")
    assert everything.compile().is_whole
    assert compiled["q"] == interpreted["q"] and compiled.ret_value == interpreted.ret_value
    assert compiled.get_meta_info("a")["completion_tokens"] == 6


def test_a_run_returns_before_anything_is_generated(llm):
    hold = threading.Event()
    llm.engine_thread._post(lambda: hold.wait(5))  # the engine does nothing until it is let go
    state = everything.compile().run("now", backend=llm, seed=1)
    assert not state._branch.variables["a"].done()
    hold.set()
    assert state["a"] == written("A fairly long beginning that never changes at all. Hello now", 6)


def test_reads_do_not_keep_independent_branches_apart(llm):
    """Read one by one, the interpreter runs the branches one after the other; the graph side by side."""

    @lang.function
    def program(s):
        s += "root"
        answers = []
        for index in range(6):
            with s.copy() as copied:
                copied += str(index) + lang.gen("a", max_tokens=8)
                answers.append(copied["a"])
        return answers

    def steps(run) -> int:
        before = llm.stats().num_steps
        state = run(backend=llm, seed=1)
        state.sync()
        assert state.ret_value == [written(f"root{index}", 8) for index in range(6)]
        return llm.stats().num_steps - before

    interpreted, compiled = steps(program.run), steps(program.compile().run)
    assert interpreted > 40 and compiled < 20


def test_the_constant_prefix_is_computed_once(llm):
    beginning = "A beginning of forty characters or more, indeed."

    @lang.function
    def program(s, word):
        s += beginning
        s += word + lang.gen("a", max_tokens=3)

    compiled = program.compile()
    with PrefillMeter(llm) as meter:
        for word in ("a", "b", "c"):
            assert compiled.run(word, backend=llm, seed=1)["a"] == written(beginning + word, 3)
    assert meter.computed == meter.ideal == len(beginning) + 3


def test_batches(llm):
    batch = [{"word": f"w{index % 5}", "count": 3 + index % 2} for index in range(30)]
    expected = everything.run_batch(batch, backend=llm, seed=1)
    compiled = everything.compile(backend=llm)
    states = compiled.run_batch(batch, seed=1, progress_bar=True)
    assert [state.text() for state in states] == [state.text() for state in expected]
    generated = compiled.run_batch(batch[:3], seed=1, generator_style=True)
    assert not isinstance(generated, list)
    assert [state.text() for state in generated] == [state.text() for state in expected[:3]]


def test_errors_stay_in_their_program(llm):
    @lang.function
    def program(s, limit):
        s += "x" + lang.gen("a", max_tokens=limit) + "y" + lang.gen("b", max_tokens=2)

    states = program.compile().run_batch([{"limit": 2}, {"limit": -2}, {"limit": 3}], backend=llm, seed=1)
    assert [type(state.error()) for state in states] == [type(None), InvalidParameter, type(None)]
    with pytest.raises(InvalidParameter):
        states[1]["b"]
    assert states[2]["a"] == written("x", 3)


def test_errors_of_calls_reach_who_needs_them(llm):
    def fail(text):
        raise LookupError("tool")

    @lang.function
    def program(s):
        s += "x" + lang.gen("a", max_tokens=2)
        unused = lang.call(fail, s["a"])
        s += "y" + lang.gen("b", max_tokens=2)
        return unused

    state = program.compile().run(backend=llm, seed=1)
    assert state.error() is None and state["b"]
    with pytest.raises(LookupError, match="tool"):
        _ = state.ret_value

    @lang.function
    def needing(s):
        s += "x" + lang.gen("a", max_tokens=2)
        s += lang.call(fail, s["a"]) + lang.gen("b")

    state = needing.compile().run(backend=llm, seed=1)
    assert isinstance(state.error(), LookupError)
    with pytest.raises(LookupError):
        state["b"]


def test_calls_run_side_by_side(llm):
    meeting = threading.Barrier(3, timeout=10)

    def tool(text):
        meeting.wait()  # all three must be in here at once
        return text.upper()

    @lang.function
    def program(s):
        s += "x" + lang.gen("a", max_tokens=2)
        return [lang.call(tool, s["a"]) for _ in range(3)]

    compiled = program.compile()
    assert compiled.run(backend=llm, seed=1).ret_value == [written("x", 2).upper()] * 3


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda s: len(s["a"]) and None, "the length of a"),
        (lambda s: int(s["a"]) if False else bool(s["a"]) and None, "the truth of a"),
        (lambda s: f"{s['a']}" and None, "an f-string of a"),
        (lambda s: s["a"] == "x" and None, "a comparison of a"),
        (lambda s: "x" in s["a"] and None, "a search of a"),
        (lambda s: ", ".join([s["a"]]) and None, "TypeError"),
        (lambda s: s.text() and None, "text()"),
        (lambda s: s.get_meta_info("a") and None, "get_meta_info()"),
    ],
)
def test_what_needs_a_value_is_interpreted_from_there(llm, use, reason):
    @lang.function
    def program(s):
        s += "start" + lang.gen("a", max_tokens=4)
        use(s)
        s += " end" + lang.gen("b", max_tokens=2)

    compiled = program.compile()
    assert not compiled.is_whole and reason in compiled.graph.stopped
    assert "open from here" in repr(compiled)
    same(llm, program)
    assert [state.text() for state in compiled.run_batch([{}, {}], backend=llm, seed=1)] == [
        program.run(backend=llm, seed=1).text()
    ] * 2


def test_conditions_on_arguments_are_traced_for_each_run(llm):
    @lang.function
    def program(s, kind):
        if kind == "loud":
            s += "LOUD" + lang.gen("a", max_tokens=2)
        else:
            s += "quiet" + lang.gen("a", max_tokens=3)

    compiled = program.compile()
    assert "a comparison of kind" in compiled.graph.stopped
    assert compiled.run("loud", backend=llm, seed=1).text() == "LOUD" + written("LOUD", 2)
    assert compiled.run("soft", backend=llm, seed=1).text() == "quiet" + written("quiet", 3)


def test_a_program_that_catches_everything_cannot_hide_that_it_needs_a_value(llm):
    @lang.function
    def program(s):
        s += "x" + lang.gen("a", max_tokens=2)
        try:
            s += str(len(s["a"]))
        except Exception:
            s += "?"

    assert same(llm, program)[1].text().endswith("2")


def test_exceptions_of_the_function_are_raised(llm):
    @lang.function
    def program(s, word):
        s += word
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        program.compile().run("x", backend=llm)


def test_call_calls_at_once_in_the_interpreter(llm):
    assert lang.call(max, 1, 2) == 2

    @lang.function
    def program(s):
        s += "x" + lang.gen("a", max_tokens=3)
        return lang.call(len, s["a"])

    assert program.run(backend=llm, seed=1).ret_value == len(written("x", 3))


def test_tracing_calls_no_tools():
    calls = []

    @lang.function
    def program(s, word):
        s += lang.call(lambda: calls.append(1) or "tool") + lang.gen("a")

    graph = program.trace(word="x")
    assert not calls and graph.counts()["call"] == 1


def test_the_graph_prints():
    text = repr(everything.compile())
    assert text.splitlines()[0] == "everything(word, count)"
    for line in (
        "%0 text 'A fairly long beginning that never changes at all. Hello '",
        "%1 argument word",
        "gen a(max_tokens=6)",
        "fork 3",
        "join gather_variable of branches 1, 2, 3",
        "call upper(b)",
        "select c ['yes', 'no', 'maybe']",
    ):
        assert line in text
    numbers = [node.number for node in everything.compile().graph.nodes()]
    assert numbers == list(range(len(numbers)))
    for node in everything.compile().graph.nodes():
        assert all(other < node.number for other in node.inputs)


def test_trace_with_known_arguments():
    graph = everything.trace(word="you", count=4)
    assert "Hello you" in repr(graph) and "fork 4" in repr(graph)
    with pytest.raises(TypeError, match="no argument"):
        everything.trace(nobody=1)


def test_the_graph_draws_itself():
    for program in (everything.compile(), everything.trace(word="<&>")):
        picture = ElementTree.fromstring(program._repr_svg_())
        boxes = picture.findall(".//{http://www.w3.org/2000/svg}rect")
        graph = program.graph if hasattr(program, "graph") else program
        assert len(boxes) == len(graph.nodes()) > 20
        width, height = float(picture.get("width")), float(picture.get("height"))
        places = {(box.get("x"), box.get("y")) for box in boxes}
        assert len(places) > 15
        assert all(float(x) + 190 <= width and float(y) + 26 <= height for x, y in places)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_programs_are_the_same(llm, seed):
    program = random_program(seed, may_fail=False)
    same(llm, program, "word")


def test_nothing_is_held_in_the_end(llm):
    for _ in range(300):
        if not llm.stats().num_running + llm.stats().num_waiting:
            break
        time.sleep(0.01)
    llm.flush_cache()
    assert llm.stats().num_pages_held == 0
    llm.engine_thread.call(lambda engine: engine.scheduler.check_integrity())
