"""Whole steps on a tiny model: against a float64 recomputation, and against themselves in other company."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import msgspec
import numpy as np
import pytest
from jaxserve.models.contract import RuntimeOptions
from jaxserve.pallas_kernels.backend import cpu_ffi_available
from tiny_runner_model import EOS, VOCAB, build_model, build_runner, full_logits

from jaxserve.runner.buckets import StepShapes, sample_ladder, token_ladder
from jaxserve.runner.runner import ModelRunner, page_arrays
from jaxserve.runner.step import StepPrograms, split_model
from jaxserve.runner.warmup import CompileGuard
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import PageCopy, RowReset, RowWork, SampleWork, StepDecision, StepResult

GREEDY = SamplingParams(temperature=0.0, logprobs=20)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_runner()


@dataclasses.dataclass
class Generation:
    """One request as a scheduler would drive it."""

    place: int
    tokens: list[int]
    pages: np.ndarray
    params: SamplingParams
    request: int
    seed: int = 0
    num_prompt: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    def work(self, start: int, stop: int, *, last: bool = False) -> RowWork:
        ids = np.array([-1] if last else self.tokens[start:stop], np.int32)
        return RowWork(self.request, self.place, start, ids, self.pages)

    def sample(self, token_index: int, ahead: int = 0) -> SampleWork:
        position = len(self.tokens) + ahead
        return SampleWork(
            self.request, self.place, token_index, position, self.seed, position - self.num_prompt, self.params
        )

    def reset(self) -> tuple[RowReset, ...]:
        if not self.params.has_penalties:
            return ()
        ids = np.array(self.tokens, np.int32)
        return (RowReset(self.place, ids[: self.num_prompt], ids[self.num_prompt :]),)


_requests = itertools.count(1)


def request(place: int, prompt: Sequence[int], params: SamplingParams = GREEDY, seed: int = 0) -> Generation:
    pages = np.arange(1 + 15 * place, 16 + 15 * place, dtype=np.int32)
    return Generation(place, list(prompt), pages, params, next(_requests), seed)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, VOCAB, length).tolist()


def run(runner: ModelRunner, batch: list[Generation], steps: int, chunk: int = 16) -> list[list[StepResult]]:
    """Prefill one after the other in chunks, then decode all together, reading each step one step late."""
    results: list[list[StepResult]] = [[] for _ in batch]
    for index, one in enumerate(batch):
        for start in range(0, len(one.tokens), chunk):
            stop = min(start + chunk, len(one.tokens))
            is_last = stop == len(one.tokens)
            samples = (one.sample(stop - start - 1),) if is_last else ()
            resets = one.reset() if is_last else ()
            handle = runner.dispatch(StepDecision(0, (one.work(start, stop),), 0, samples, resets=resets))
            result = runner.collect(handle)
        results[index].append(result)
        one.tokens.append(int(result.token_ids[0]))
    flying = None
    for step in range(steps):
        ahead = 0 if flying is None else 1
        rows = tuple(one.work(len(one.tokens) - 1 + ahead, 0, last=True) for one in batch)
        samples = tuple(one.sample(index, ahead) for index, one in enumerate(batch))
        handle = runner.dispatch(StepDecision(step, rows, len(rows), samples))
        if flying is not None:
            take(runner.collect(flying), batch, results)
        flying = handle
    if flying is not None:
        take(runner.collect(flying), batch, results)
    return results


def take(result: StepResult, batch: list[Generation], results: list[list[StepResult]]) -> None:
    for index, one in enumerate(batch):
        one.tokens.append(int(result.token_ids[index]))
        part = {
            field.name: value[index : index + 1]
            for field in dataclasses.fields(result)
            if isinstance(value := getattr(result, field.name), np.ndarray)
        }
        results[index].append(StepResult(result.step_id, **part))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_batched_decode_equals_recomputation(runner: ModelRunner, chunk: int) -> None:
    batch = [request(place, prompt_of(length, place)) for place, length in ((2, 9), (0, 1), (3, 30))]
    results = run(runner, batch, steps=6, chunk=chunk)
    for one, found in zip(batch, results):
        exact = log_softmax(full_logits(build_model(), one.tokens))
        for index, result in enumerate(found):
            row = exact[one.num_prompt + index - 1]
            token = one.tokens[one.num_prompt + index]
            assert token == row.argmax()
            assert result.logprobs[0] == pytest.approx(row[token], abs=1e-4)
            assert result.ranks[0] == 1
            np.testing.assert_allclose(result.top_logprobs[0], np.sort(row)[::-1][:20], atol=1e-4)
            np.testing.assert_allclose(row[result.top_ids[0]], result.top_logprobs[0], atol=1e-4)


def test_prompt_scores_do_not_disturb_the_last_token(runner: ModelRunner) -> None:
    one = request(1, prompt_of(8, 4))
    scores = tuple(
        msgspec.structs.replace(one.sample(i), position=i + 1, forced_token=one.tokens[i + 1], is_score=True)
        for i in range(7)
    )
    first = StepDecision(0, (one.work(0, 8),), 0, (*scores, one.sample(7)))
    again = StepDecision(1, (one.work(8, 9, last=True),), 1, (one.sample(0, ahead=1),))
    handles = [runner.dispatch(first), runner.dispatch(again)]
    scored, decoded = (runner.collect(handle) for handle in handles)
    exact = log_softmax(full_logits(build_model(), [*one.tokens, int(scored.token_ids[-1])]))
    np.testing.assert_array_equal(scored.token_ids[:7], one.tokens[1:])
    np.testing.assert_allclose(scored.logprobs[:7], exact[np.arange(7), one.tokens[1:]], atol=1e-4)
    assert scored.token_ids[7] == exact[7].argmax()
    assert decoded.token_ids[0] == exact[8].argmax()


def test_forced_tokens_are_taken_and_continue(runner: ModelRunner) -> None:
    one = request(1, prompt_of(5, 6))
    forced = msgspec.structs.replace(one.sample(4), forced_token=77)
    first = runner.dispatch(StepDecision(0, (one.work(0, 5),), 0, (forced,)))
    second = runner.dispatch(StepDecision(1, (one.work(5, 6, last=True),), 1, (one.sample(0, ahead=1),)))
    exact = log_softmax(full_logits(build_model(), [*one.tokens, 77]))
    result = runner.collect(first)
    assert result.token_ids[0] == 77
    assert result.logprobs[0] == pytest.approx(exact[4, 77], abs=1e-4)
    assert result.ranks[0] == 1 + (exact[4] > exact[4, 77]).sum()
    assert runner.collect(second).token_ids[0] == exact[5].argmax()


RANDOM = SamplingParams(temperature=1.1, top_k=60, top_p=0.95)
BUSY = SamplingParams(temperature=0.9, presence_penalty=1.0, logit_bias={9: 3.0}, min_tokens=4, logprobs=2)


@pytest.mark.parametrize("params", [RANDOM, SamplingParams(temperature=0.0)], ids=["random", "greedy"])
def test_a_request_draws_the_same_tokens_in_any_company(runner: ModelRunner, params: SamplingParams) -> None:
    prompt, seed = prompt_of(7, 1), 2**63 + 12345

    def tokens(place: int, others: list[SamplingParams], chunk: int) -> list[int]:
        mine = request(place, prompt, params, seed)
        free = [p for p in range(4) if p != place]
        batch = [request(p, prompt_of(3 + p, p), other, seed=p) for p, other in zip(free, others)]
        batch.insert(len(batch) // 2, mine)
        run(runner, batch, steps=8, chunk=chunk)
        return mine.tokens

    alone = tokens(0, [], 16)
    assert tokens(3, [GREEDY, GREEDY], 4) == alone
    assert tokens(1, [RANDOM, GREEDY, RANDOM], 16) == alone
    assert tokens(2, [BUSY], 16) == alone  # the neighbour forces the program with penalties
    assert tokens(2, [BUSY, RANDOM, BUSY], 2) == alone
    other_seed = request(0, prompt, params, seed + 1)
    run(runner, [other_seed], steps=8)
    assert (other_seed.tokens == alone) == params.is_greedy


def test_penalties_bias_and_min_tokens_over_a_generation(runner: ModelRunner) -> None:
    params = SamplingParams(
        temperature=0.0, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2,
        logit_bias={EOS: 50.0, 20: 2.0}, min_tokens=3, logprobs=0,
    )  # fmt: skip
    one = request(2, prompt_of(10, 9), params)
    # A request that had the row before must leave nothing behind.
    run(runner, [request(2, prompt_of(4, 8), changed(params, logit_bias={33: 90.0}))], steps=3)
    results = run(runner, [one], steps=5)
    for index, result in enumerate(results[0]):
        seen = one.tokens[: 10 + index]
        logits = full_logits(build_model(), seen)[-1]
        raw = log_softmax(logits)
        for token in set(seen):
            logits[token] = logits[token] / 1.2 if logits[token] > 0 else logits[token] * 1.2
        for token in set(seen[10:]):
            logits[token] -= 0.6 + 0.4 * seen[10:].count(token)
        logits[EOS] += 50
        logits[20] += 2
        if index < 3:
            logits[EOS] = -np.inf
        token = one.tokens[10 + index]
        assert token == logits.argmax()
        assert result.logprobs[0] == pytest.approx(raw[token], abs=1e-4)  # of the raw logits
    assert EOS not in one.tokens[10:13] and one.tokens[13] == EOS


def changed(params: SamplingParams, **changes: object) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | changes)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=1.5, repetition_penalty=1.3)
    whole = request(0, prompt_of(6, 2), params, seed=5)
    run(runner, [whole], steps=9)
    part = request(0, prompt_of(6, 2), params, seed=5)
    run(runner, [part], steps=3)
    run(runner, [request(0, prompt_of(9, 3), params, seed=6)], steps=2)  # its row and pages go to another
    resumed = Generation(1, list(part.tokens), np.arange(20, 35, dtype=np.int32), params, part.request, seed=5)
    resumed.num_prompt = 6
    run(runner, [resumed], steps=5)
    assert resumed.tokens == whole.tokens


def test_forks_sample_from_the_parents_token_and_copy_its_page(runner: ModelRunner) -> None:
    prompt = prompt_of(6, 12)  # the second page is half full: each child writes its own copy
    parent, child = request(0, prompt, RANDOM, seed=1), request(1, prompt, RANDOM, seed=2)
    expected = []
    for seed in (1, 2):
        alone = request(2, prompt, RANDOM, seed=seed)
        run(runner, [alone], steps=5)
        expected.append(alone.tokens)
    child.pages = child.pages.copy()
    child.pages[0] = parent.pages[0]
    samples = (parent.sample(5), child.sample(5))
    result = runner.collect(runner.dispatch(StepDecision(0, (parent.work(0, 6),), 0, samples)))
    parent.tokens.append(int(result.token_ids[0]))
    child.tokens.append(int(result.token_ids[1]))
    copies = (PageCopy(int(parent.pages[1]), int(child.pages[1])),)
    for step in range(5):
        rows = tuple(one.work(len(one.tokens) - 1, 0, last=True) for one in (parent, child))
        decision = StepDecision(step, rows, 2, (parent.sample(0), child.sample(1)), copies=copies)
        take(runner.collect(runner.dispatch(decision)), [parent, child], [[], []])
        copies = ()
    assert [parent.tokens, child.tokens] == expected


def test_copies_happen_in_their_order_and_in_any_number(runner: ModelRunner) -> None:
    prompt = prompt_of(8, 13)
    one = request(0, prompt)
    run(runner, [one], steps=0)
    chain = [int(one.pages[0]), *range(20, 60), *range(20, 60)]  # longer than one call takes; pages written twice
    copies = tuple(PageCopy(a, b) for a, b in itertools.pairwise(chain) if a != b)
    assert len(copies) > 64
    moved = request(1, one.tokens)
    moved.pages = np.array([59, *one.pages[1:]], np.int32)
    decision = StepDecision(0, (moved.work(8, 9),), 1, (moved.sample(0),), copies=copies)
    result = runner.collect(runner.dispatch(decision))
    assert result.token_ids[0] == full_logits(build_model(), one.tokens)[-1].argmax()
    with pytest.raises(ValueError, match="allowed: 0 to 63"):
        runner.dispatch(dataclasses.replace(decision, copies=(PageCopy(1, 64),)))


def test_no_option_compiles_anything(runner: ModelRunner) -> None:
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    options: list[dict] = [
        {}, {"temperature": 0.0}, {"temperature": 1e-7}, {"top_k": -1}, {"top_k": 1}, {"top_k": 10**6},
        {"top_p": 1e-6}, {"top_p": 0.5}, {"min_p": 0.3}, {"presence_penalty": -2.0}, {"frequency_penalty": 2.0},
        {"repetition_penalty": 3.0}, {"logit_bias": {1: 4.0}}, {"allowed_token_ids": (3, 4)}, {"min_tokens": 9},
        {"stop_token_ids": (9,), "min_tokens": 2}, {"seed": 3}, {"logprobs": 0}, {"logprobs": 20},
        {"bad_word_ids": ((3,), (4, 5), (4, 5, 6))}, {"logprobs": 1, "logprob_token_ids": tuple(range(128))},
    ]  # fmt: skip
    for count in (1, 2, 3, 4):
        for index in range(len(options)):
            batch = [
                request(place, prompt_of(1 + (index + 5 * place) % 20, index),
                        SamplingParams(**options[(index + place) % len(options)]), seed=index)
                for place in range(count)
            ]  # fmt: skip
            run(runner, batch, steps=2, chunk=1 + index % 16)
    assert runner.compiles_after_warmup == 0
    # The guard counts dispatch and collect; nothing else compiled either.
    assert not events


def test_the_guard_sees_a_compilation() -> None:
    guard, other = CompileGuard(), CompileGuard()
    with other.watch():
        with guard.watch():
            jax.jit(lambda x: x * 3 + 41.5)(np.zeros(17, np.float32))
        assert (guard.count, other.count) == (1, 0)
    jax.jit(lambda x: x * 5 + 41.5)(np.zeros(17, np.float32))
    assert (guard.count, other.count) == (1, 0)


@pytest.mark.parametrize(("is_warm", "level"), [(True, "ERROR"), (False, "INFO")])
def test_a_compilation_is_an_error_only_after_warm_up(
    is_warm: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = CompileGuard(is_warm=is_warm)
    with caplog.at_level("INFO"), guard.watch():
        jax.jit(lambda x: x * 3.5 + float(is_warm))(1.0)
    assert {record.levelname for record in caplog.records if "a program was compiled" in record.message} == {level}


def test_pages_stay_in_place(runner: ModelRunner) -> None:
    state = runner._steps.state
    before = [layer.unsafe_buffer_pointer() for layer in state.pages]
    run(runner, [request(0, prompt_of(9))], steps=3)
    assert [layer.unsafe_buffer_pointer() for layer in state.pages] == before
    pool = sum(layer.nbytes for layer in state.pages)
    for key, program in runner._steps.programs.items():
        if key[0] in ("forward", "copy"):
            assert program.memory_analysis().alias_size_in_bytes >= pool


@pytest.mark.parametrize(("attention", "page_dtype"), [("xla", "float32"), ("cpu_ffi", "int8")])
def test_temporaries_do_not_grow_with_the_pool(attention: str, page_dtype: str) -> None:
    if attention == "cpu_ffi" and not cpu_ffi_available()[0]:
        pytest.skip(f"cpu_ffi: {cpu_ffi_available()[1]}")
    model = build_model(options=RuntimeOptions(page_size=4, attention=attention, page_dtype=page_dtype))
    shapes = build_shapes(64)
    keys = (("forward", 4), ("forward", 16), ("copy",))
    found = {}
    for num_pages in (64, 6400):
        programs = StepPrograms(
            model=split_model(model), shapes=dataclasses.replace(shapes, num_pages=num_pages),
            pages=page_arrays(model, model.options, num_pages), hidden_size=32, attention=attention, branch=True,
        )  # fmt: skip
        for key in keys:
            memory = programs.program(key).lower().compile().memory_analysis()
            found[key, num_pages] = memory.temp_size_in_bytes
    for key in keys:
        assert found[key, 6400] == found[key, 64]


def build_shapes(num_pages: int) -> StepShapes:
    return StepShapes(
        max_num_rows=4, pages_per_row=16, page_size=4, num_pages=num_pages, vocab_size=VOCAB,
        token_buckets=token_ladder(16), sample_buckets=sample_ladder(4, 16),
    )  # fmt: skip


def test_a_step_without_samples_can_be_collected(runner: ModelRunner) -> None:
    one = request(0, prompt_of(6))
    result = runner.collect(runner.dispatch(StepDecision(7, (one.work(0, 6),), 0, ())))
    assert result.step_id == 7 and len(result.token_ids) == 0 and result.logprobs is None


def test_a_refused_decision_changes_nothing(runner: ModelRunner) -> None:
    one = request(0, prompt_of(6, 1))
    run(runner, [one], steps=1)
    bad = StepDecision(0, (one.work(7, 8, last=True),), 1, (msgspec.structs.replace(one.sample(0), token_index=3),))
    with pytest.raises(ValueError, match="token_index"):
        runner.dispatch(bad)
    good = dataclasses.replace(bad, samples=(one.sample(0),))
    result = runner.collect(runner.dispatch(good))
    assert result.token_ids[0] == full_logits(build_model(), one.tokens)[-1].argmax()


def test_geometry(runner: ModelRunner) -> None:
    geometry = runner.geometry
    assert (geometry.num_pages, geometry.page_size, geometry.max_model_len) == (64, 4, 64)
    assert (geometry.max_num_rows, geometry.max_step_tokens, geometry.max_num_samples) == (4, 16, 20)
    with pytest.raises(ValueError, match="max_model_len: got 65; allowed: up to 64"):
        build_runner(max_model_len=65, warmup=False)
