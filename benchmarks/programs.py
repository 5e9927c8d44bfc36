"""Programs: prompt tokens computed over the ideal, and how fast they are against plain calls and uncompiled.

    python benchmarks/programs.py [--programs judge,tree] [--size 6] [--rounds 3] [--counts-only] [--json out.json]

The programs of examples/programs, each over a small batch of inputs, greedy. Variants run in turn:

    calls        what a client without programs does: one request at a time, prompts in full, nothing reused
    interpreted  run_batch()
    compiled     compile().run_batch()

`computed / ideal` counts prompt tokens of a whole batch from an empty cache; the ideal is an oracle by brute force
(prefill_meter.py): every token that was not generated, once.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import alternating
from prefill_meter import PrefillMeter

from jaxserve import LLM, SamplingParams
from jaxserve.lang.backends.base import Backend, Selection
from jaxserve.lang.backends.local import LocalBackend
from jaxserve.lang.choices import decide
from jaxserve.outputs import GenerationOutput

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "programs"))

import character
import chat
import essay_judge
import extraction
import few_shot
import react
import self_consistency
import tree_of_thought


class OneAtATime(Backend):
    """Every generation and every score is a call of its own, and the next one starts when it has been answered."""

    def __init__(self, llm: LLM) -> None:
        self._local = LocalBackend(llm)
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def open_role(self, roles: tuple[str, ...]) -> str:
        return self._local.open_role(roles)

    def close_role(self, roles: tuple[str, ...]) -> str:
        return self._local.close_role(roles)

    def _queue(self, start: Callable[[], None]) -> None:
        self._waiting.append(start)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._waiting.popleft()()

    def generate(self, stream: Any, context: Any, turn: Any, options: Any, on_piece: Any, done: Any) -> None:
        def answered(result: Any) -> None:
            self._next()
            done(result)

        fresh = self._local.open_stream("")
        self._queue(lambda: self._local.generate(fresh, context, turn, options, on_piece, answered))

    def select(self, stream: Any, context: Any, choices: tuple[str, ...], method: Any, done: Any) -> None:
        """One call for each choice, which scores the whole of it."""
        encode = self._local.encode
        extended = [context.add_text(choice) for choice in choices]
        tokens = [each.token_ids(encode) for each in extended]
        before = context.token_ids(encode)
        scores: list[Any] = [None] * len(choices)

        def ask(index: int) -> None:
            # A choice may take the context's last token into its first one.
            pairs = enumerate(zip(before, tokens[index]))
            start = next((place for place, (mine, theirs) in pairs if mine != theirs), len(before))
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, prompt_logprobs_start=start)

            def answered(output: Any, pin: Any) -> None:
                self._next()
                if not isinstance(output, GenerationOutput):
                    done(output)
                    return
                found = output.prompt_logprobs[start:]
                scores[index] = [(score.logprob, score.token_id, None) for score in found]
                if None not in scores:
                    decision = decide(method, choices, scores, None)
                    done(Selection(decision, extended[choices.index(decision.decision)]))

            fresh = self._local.open_stream("")
            self._queue(lambda: self._local._request(fresh, tokens[index], params, answered))

        for index in range(len(choices)):
            ask(index)


def workloads(size: int, max_tokens: int) -> dict[str, tuple[Any, list[dict[str, Any]]]]:
    """name -> (program, arguments of each of `size` runs)."""
    essays = [f"Essay {index}. {essay_judge.ESSAY}" for index in range(size)]
    questions = [
        f"{index + 2} boxes hold 12 eggs each. {index + 3} eggs break. How many are left?" for index in range(size)
    ]
    people = ["Anna", "Ben", "Clara", "David", "Eva", "Felix", "Greta", "Hans", "Ida", "Jonas", "Klara", "Leo"]
    reviews = [f"{name} says: {few_shot.REVIEWS[index % 5]}" for index, name in enumerate(people)]
    cities = ["Italy", "France", "Spain", "Egypt", "Austria", "Hungary", "Poland", "Portugal"]
    names = ["Harry Potter", "Ron Weasley", "Hermione Granger", "Draco Malfoy", "Luna Lovegood", "Cho Chang"]
    tokens = {"max_tokens": max_tokens}
    return {
        "judge": (essay_judge.judge_essay, [{"essay": essay, **tokens} for essay in essays]),
        "tree": (tree_of_thought.tree_of_thought, [{"question": question, **tokens} for question in questions]),
        "self-consistency": (self_consistency.answer_often, [{"question": q, **tokens} for q in questions]),
        "react": (react.react, [{"question": question} for question in questions]),
        "few-shot": (few_shot.classify, [{"review": review} for review in reviews[: 2 * size]]),
        "character": (character.fields, [{"name": names[index % len(names)]} for index in range(size)]),
        "chat": (
            chat.conversation,
            [
                {"questions": (f"What is the capital of {cities[index % len(cities)]}?", *chat.QUESTIONS[1:]), **tokens}
                for index in range(size)
            ],
        ),
        "extraction": (
            extraction.extract,
            [{"document": f"Report {index}. {extraction.DOCUMENT}"} for index in range(size)],
        ),
    }


def run(program: Any, batch: list[dict[str, Any]], how: str, reusing: LLM, calls: Backend) -> list[str]:
    """The texts of all programs of a batch."""
    if how == "calls":
        states = program.run_batch(batch, backend=calls, temperature=0, num_threads=1)
    elif how == "interpreted":
        states = program.run_batch(batch, backend=reusing, temperature=0)
    else:
        states = program.compile().run_batch(batch, backend=reusing, temperature=0)
    for state in states:
        if state.error() is not None:
            raise state.error()
        _ = state.ret_value
    return [state.text() for state in states]


def main() -> None:
    parser = alternating.make_parser(__doc__)
    parser.add_argument("--programs", help="names, with commas between; default: all")
    parser.add_argument("--size", type=int, default=6, help="programs in a batch")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-num-rows", type=int, default=64)
    parser.add_argument("--counts-only", action="store_true", help="no times: prompt tokens alone")
    options = parser.parse_args()
    work = workloads(options.size, options.max_tokens)
    names = options.programs.split(",") if options.programs else list(work)
    if unknown := set(names) - set(work):
        parser.error(f"--programs: {', '.join(sorted(unknown))}; there are {', '.join(work)}")
    common = {"dtype": options.dtype, "max_num_rows": options.max_num_rows, "max_model_len": 2048, "num_pages": 2048}
    reusing = LLM(options.model, progress=False, **common)
    settings = {"model": options.model, "dtype": options.dtype, "size": options.size, "max tokens": options.max_tokens}

    counts: alternating.Rounds = {}
    for name in names:
        program, batch = work[name]
        figures: alternating.Figures = {}
        for how in ("interpreted", "compiled"):
            program._prefixes.clear()
            with PrefillMeter(reusing) as meter:
                run(program, batch, how, reusing, reusing)
            figures |= {f"{how} computed": meter.computed, f"{how} ideal": meter.ideal, f"{how} ratio": meter.ratio}
        counts[name] = [figures]
    alternating.show("prompt tokens of a batch", counts, json_file=_stem(options.json, "counts"), **settings)
    if options.counts_only:
        return

    plain = LLM(options.model, prefix_cache=False, progress=False, **common)
    calls = OneAtATime(plain)
    for name in names:
        program, batch = work[name]

        def measure(how: str, number: int, program: Any = program, batch: Any = batch) -> alternating.Figures:
            reusing.flush_cache()
            start = time.perf_counter()
            run(program, batch, how, reusing, calls)
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "programs/s": len(batch) / seconds}

        measure("interpreted", -1)
        rounds = alternating.run_rounds(["calls", "interpreted", "compiled"], options.rounds, measure)
        notes = [
            f"{mine} : {base} = {alternating.median_ratio(rounds, mine, base, 'programs/s'):.2f}"
            for mine, base in (("interpreted", "calls"), ("compiled", "calls"), ("compiled", "interpreted"))
        ]
        alternating.show(
            f"{name}: {len(batch)} programs", rounds, notes=notes, json_file=_stem(options.json, name), **settings
        )


def _stem(path: Path | None, name: str) -> Path | None:
    return None if path is None else path.with_stem(f"{path.stem}-{name}")


if __name__ == "__main__":
    main()
