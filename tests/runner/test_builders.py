"""The builders against slow loops over the decision."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runner.batch_builder import BatchBuilder, StepBuffer
from jaxserve.runner.buckets import StepShapes, sample_ladder, token_ladder
from jaxserve.runner.sample_builder import SampleBuilder, StagedSamples, unpack
from jaxserve.runner.sampling import AFTER_ANY, AFTER_NONE
from jaxserve.sampling_params import MAX_BAD_WORDS, SamplingParams
from jaxserve.scheduler.decision import RowReset, RowWork, SampleWork, StepConstraints, StepDecision

EOS = 5
SHAPES = StepShapes(
    max_num_rows=5,
    pages_per_row=6,
    page_size=4,
    num_pages=40,
    vocab_size=70,
    token_buckets=token_ladder(40),
    sample_buckets=sample_ladder(5, 40),
)


def test_ladders() -> None:
    assert token_ladder(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert token_ladder(1) == (1,)
    assert token_ladder(20) == (1, 2, 4, 8, 16, 20)
    assert sample_ladder(32, 256) == (1, 4, 8, 16, 32, 64)
    assert sample_ladder(1, 1) == (1, 2)
    assert [SHAPES.token_bucket(n) for n in (1, 3, 17, 40)] == [1, 4, 24, 40]
    with pytest.raises(ValueError, match="got 41; allowed: at most 40"):
        SHAPES.token_bucket(41)


@st.composite
def decisions(draw: st.DrawFn) -> StepDecision:
    num_rows = draw(st.integers(1, SHAPES.max_num_rows))
    places = draw(st.permutations(range(SHAPES.max_num_rows)))
    num_decodes = draw(st.integers(0, num_rows))
    free = draw(st.permutations(range(1, SHAPES.num_pages)))
    rows = []
    for index in range(num_rows):
        count = 1 if index < num_decodes else draw(st.integers(1, 8))
        start = draw(st.integers(0, 24 - count))
        needed = -(-(start + count) // 4) + draw(st.integers(0, 2))
        pages, free = np.array(free[:needed], np.int32), free[needed:]
        low = -1 if index < num_decodes else 0
        tokens = np.array([draw(st.integers(low, 69)) for _ in range(count)], np.int32)
        rows.append(RowWork(index, places[index], start, tokens, pages, draw(st.integers(0, 2))))
    total = sum(row.num_tokens for row in rows)
    picked = draw(st.lists(st.integers(0, total - 1), max_size=SHAPES.max_num_samples))
    samples = tuple(SampleWork(0, 0, index, 0, 0, 0, SamplingParams()) for index in picked)
    return StepDecision(0, tuple(rows), num_decodes, samples)


@settings(max_examples=80, deadline=None)
@given(st.lists(decisions(), min_size=1, max_size=4))
def test_packed_steps_equal_a_loop(steps: list[StepDecision]) -> None:
    builder = BatchBuilder(SHAPES)
    buffer = StepBuffer(builder.layout)  # reused: what an earlier step left must not show
    for step in steps:
        packed, bucket = builder.build(step, buffer)
        part = builder.layout.split(packed, bucket)
        assert bucket in SHAPES.token_buckets and bucket >= step.num_tokens
        expected = loop_over_rows(step, bucket)
        assert part.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(part[name], values, err_msg=name)


def loop_over_rows(step: StepDecision, bucket: int) -> dict[str, list]:
    out: dict[str, list] = {
        "token_ids": [], "positions": [], "row_of_token": [], "write_slot": [], "query_start": [0],
        "seq_len": [], "page_table": [], "table_row": [], "pooling": [], "num_rows": [len(step.rows)],
        "sample_index": [],
    }  # fmt: skip
    for index, row in enumerate(step.rows):
        for offset, token in enumerate(row.token_ids):
            position = row.start + offset
            out["token_ids"].append(token)
            out["positions"].append(position)
            out["row_of_token"].append(index)
            out["write_slot"].append(int(row.pages[position // 4]) * 4 + position % 4)
        used = -(-(row.start + row.num_tokens) // 4)
        out["query_start"].append(len(out["token_ids"]))
        out["seq_len"].append(row.start + row.num_tokens)
        out["page_table"].append([*row.pages[:used].tolist(), *[0] * (6 - used)])
        out["table_row"].append(row.row)
        out["pooling"].append(row.pooling)
    for _ in range(5 - len(step.rows)):
        out["query_start"].append(len(out["token_ids"]))
        out["seq_len"].append(0)
        out["page_table"].append([0] * 6)
        out["table_row"].append(0)
        out["pooling"].append(0)
    padding = bucket - len(out["token_ids"])
    for name, value in (("token_ids", 0), ("positions", 0), ("row_of_token", 5), ("write_slot", 160)):
        out[name] += [value] * padding
    picked = [sample.token_index for sample in step.samples]
    out["sample_index"] = picked + [0] * (SHAPES.max_num_samples - len(picked))
    return out


def row(start: int = 0, tokens: tuple[int, ...] = (1,), pages: tuple[int, ...] = (1,), place: int = 0) -> RowWork:
    return RowWork(0, place, start, np.array(tokens, np.int32), np.array(pages, np.int32))


@pytest.mark.parametrize(
    ("rows", "num_decodes", "sample", "message"),
    [
        ([], 0, None, "rows of one step: got 0"),
        ([row()] * 6, 0, None, "rows of one step: got 6; allowed: 1 to 5"),
        ([row(tokens=())], 0, None, "at least one token"),
        ([row(start=-1)], 0, None, "start of 0 or more"),
        ([row(place=5)], 0, None, "allowed: 0 to 4"),
        ([row(start=24, pages=(1,) * 7)], 0, None, "tokens of one row: got 25; allowed: at most 24"),
        ([row(start=4, pages=(1,))], 0, None, "got 1; allowed: 2 or more"),
        ([row(pages=(40,))], 0, None, "pages: got 40 to 40; allowed: 0 to 39"),
        ([row(start=4, pages=(-1, 3))], 0, None, "pages: got -1 to 3"),
        ([row(pages=(0,))], 0, None, "pages written: got 0"),
        ([row(tokens=(70,))], 1, None, "token_ids: got 70 to 70; allowed: -1 to 69"),
        ([row(tokens=(-2,))], 1, None, "token_ids: got -2"),
        ([row(tokens=(-1,))], 0, None, "only they may be LAST_TOKEN"),
        ([row(tokens=(1, 1))], 1, None, "one token each"),
        ([row()], 1, 1, "token_index: got 0 to 1; allowed: 0 to 0"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(rows, num_decodes, sample, message) -> None:
    samples = () if sample is None else (SampleWork(0, 0, sample, 0, 0, 0, SamplingParams()),)
    builder = BatchBuilder(SHAPES)
    with pytest.raises(ValueError, match=message):
        builder.build(StepDecision(0, tuple(rows), num_decodes, samples), StepBuffer(builder.layout))


def sample(request: int, place: int, params: SamplingParams, **more: int) -> SampleWork:
    wanted = {"token_index": 0, "position": 9, "seed": 2**64 - 2, "num_outputs": 0} | more
    return SampleWork(request, place, params=params, **wanted)


def stage(builder: SampleBuilder, *samples: SampleWork):
    biases = builder.adopt(samples)
    staged = builder.build(samples)
    return biases, staged, unpack(staged.packed, staged.bucket)


def needs(staged: StagedSamples) -> set[str]:
    """Programs that the staged samples ask for beside the argmax."""
    asked = {
        "random": staged.is_random, "adjust": staged.mask is not None, "count": staged.counts_tokens,
        "logprobs": staged.logprob_ids is not None,
    }  # fmt: skip
    return {name for name, is_asked in asked.items() if is_asked}


def test_options_reach_their_columns() -> None:
    builder = SampleBuilder(SHAPES, frozenset({EOS}))
    full = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.25,
        repetition_penalty=1.5, logit_bias={3: 2.0, 69: -100.0},
    )  # fmt: skip
    biases, staged, inputs = stage(builder, sample(1, 3, full), sample(2, 0, SamplingParams(temperature=0.0)))
    assert staged.bucket == 4 and needs(staged) == {"random", "adjust", "count"}
    assert np.asarray(inputs.row).tolist() == [3, 0, 5, 5]
    assert np.asarray(inputs.count_row).tolist() == [3, 5, 5, 5]
    assert np.asarray(inputs.bias_row).tolist() == [3, 5, 5, 5]
    assert np.asarray(inputs.seed).tolist()[0] == [2**32 - 1, 2**32 - 2]
    assert np.asarray(inputs.is_greedy).tolist() == [0, 1, 1, 1]
    assert np.asarray(inputs.top_k).tolist() == [7, 0, 0, 0]
    np.testing.assert_allclose(inputs.inverse_temperature, [2, 1, 1, 1])
    np.testing.assert_allclose(inputs.top_p, [0.9, 1, 1, 1])
    np.testing.assert_allclose(inputs.log_min_p, [np.log(0.1), -np.inf, -np.inf, -np.inf], rtol=1e-6)
    np.testing.assert_allclose(inputs.presence, [0.5, 0, 0, 0])
    np.testing.assert_allclose(inputs.frequency, [-0.25, 0, 0, 0])
    np.testing.assert_allclose(inputs.repetition, [1.5, 1, 1, 1])
    ((place, bias),) = biases
    assert place == 3 and (bias[3], bias[69], np.count_nonzero(bias)) == (2.0, -100.0, 2)
    assert (staged.mask == -1).all()


def test_a_row_given_to_another_request_forgets_the_first() -> None:
    builder = SampleBuilder(SHAPES, frozenset({EOS}))
    busy = SamplingParams(temperature=0.5, top_k=7, logprobs=3, allowed_token_ids=(1,), presence_penalty=1.0)
    _, staged, _ = stage(builder, sample(1, 2, busy))
    assert needs(staged) == {"random", "adjust", "count", "logprobs"}
    _, staged, inputs = stage(builder, sample(2, 2, SamplingParams(temperature=0.0)))
    assert needs(staged) == set()
    assert (int(inputs.top_k[0]), int(inputs.count_row[0])) == (0, 5)


def test_scores_ask_for_logprobs_and_leave_the_table_alone() -> None:
    builder = SampleBuilder(SHAPES, frozenset({EOS}))
    work = SampleWork(1, 0, 0, 3, 0, 0, SamplingParams(), forced_token=17, is_score=True)
    _, staged, inputs = stage(builder, work)
    assert needs(staged) == {"logprobs"}
    assert (int(inputs.row[0]), int(inputs.forced[0])) == (5, 17)


def allowed_tokens(staged, index: int = 0) -> set[int]:
    words = staged.mask.reshape(staged.bucket, -1)[index].view(np.uint32)
    return {token for token in range(SHAPES.vocab_size) if int(words[token // 32]) >> (token % 32) & 1}


def test_masks() -> None:
    everything = set(range(70))
    for params, num_outputs, expected in (
        (SamplingParams(allowed_token_ids=(0, 31, 32, 69)), 0, {0, 31, 32, 69}),
        (SamplingParams(min_tokens=3), 2, everything - {EOS}),
        (SamplingParams(min_tokens=3, ignore_eos=True), 2, everything),
        (SamplingParams(min_tokens=3, stop_token_ids=(9,)), 2, everything - {EOS, 9}),
        (SamplingParams(min_tokens=3, allowed_token_ids=(4, EOS)), 0, {4}),
        (SamplingParams(min_tokens=3, allowed_token_ids=(4, EOS)), 3, {4, EOS}),
        (SamplingParams(min_tokens=3, allowed_token_ids=(EOS,)), 0, {EOS}),
    ):
        builder = SampleBuilder(SHAPES, frozenset({EOS}))
        _, staged, _ = stage(builder, sample(1, 0, params, num_outputs=num_outputs))
        assert needs(staged) == {"random", "adjust"}
        assert allowed_tokens(staged) == expected, params
    _, staged, _ = stage(builder, sample(7, 0, SamplingParams(min_tokens=3), num_outputs=3))
    assert needs(staged) == {"random"}  # enough tokens: nothing to hold back


def packed(tokens: set[int]) -> np.ndarray:
    """[mask words] int32 with the bits of `tokens`."""
    words = np.zeros(3, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


TOKENS = st.sets(st.sampled_from([0, EOS, 31, 32, 69]))


@given(
    rows=st.lists(st.tuples(st.booleans(), st.booleans(), TOKENS, st.one_of(st.none(), TOKENS.filter(bool))),
                  min_size=1, max_size=4),
    grammar_on=st.lists(st.booleans(), min_size=4, max_size=4),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_grammars_beside_what_a_row_holds_back(rows, grammar_on) -> None:
    """Set by set: what the grammar allows, without end-of-sequence tokens where the request ignores or holds them back,
    unless nothing would be left."""
    builder = SampleBuilder(SHAPES, frozenset({EOS}))
    samples, expected, indices, masks = [], [], [], []
    for place, (ignores_eos, holds, grammar, listed) in enumerate(rows):
        params = SamplingParams(
            temperature=0, ignore_eos=ignores_eos, min_tokens=2 if holds else 0,
            allowed_token_ids=None if listed is None else tuple(sorted(listed)),
        )  # fmt: skip
        samples.append(sample(place, place, params))
        own = set(range(70)) if listed is None else listed
        if holds and not ignores_eos:
            own = own - {EOS} or own
        if grammar and grammar_on[place]:
            indices.append(place)
            masks.append(packed(grammar))
            both = own & grammar - ({EOS} if ignores_eos else set())
            own = both or grammar
        expected.append(own)
    _, staged, _ = stage(builder, *samples)
    mask = np.array(masks, np.int32).reshape(len(masks), 3)
    found = builder.constrain(staged, tuple(samples), StepConstraints(np.array(indices, np.int64), mask, {}))
    if found.mask is None:
        assert not indices and expected == [set(range(70))] * len(rows)
        return
    assert [allowed_tokens(found, place) for place in range(len(rows))] == expected
    assert all(allowed_tokens(found, place) == set(range(70)) for place in range(len(rows), found.bucket))


def test_counts_row() -> None:
    builder = SampleBuilder(SHAPES, frozenset())
    counts = builder.counts_row(RowReset(0, np.array([3, 3, 8], np.int32), np.array([8, 8, 9], np.int32)))
    expected = np.zeros(70, np.int16)
    expected[[3, 8, 9]] = [-32768, -32766, 1]
    np.testing.assert_array_equal(counts, expected)


def test_bad_samples_are_refused() -> None:
    builder = SampleBuilder(SHAPES, frozenset())
    with pytest.raises(ValueError, match="row of a sample: got 5; allowed: 0 to 4"):
        builder.adopt((sample(1, 5, SamplingParams()),))
    with pytest.raises(ValueError, match="allowed_token_ids: got 70"):
        builder.adopt((sample(1, 0, SamplingParams(allowed_token_ids=(70,))),))
    work = SampleWork(1, 0, 0, 3, 0, 0, SamplingParams(), forced_token=70)
    builder.adopt((work,))
    with pytest.raises(ValueError, match="forced_token: got 70; allowed: up to 69"):
        builder.build((work,))


def forbidden(builder: SampleBuilder, work: SampleWork) -> set[tuple[int, int]]:
    """(last token, token not allowed behind it) of a single staged sample."""
    builder.adopt((work,))
    staged = builder.build((work,))
    pairs = staged.forbidden.reshape(staged.bucket, MAX_BAD_WORDS, 2)
    assert (pairs[1:] == AFTER_NONE).all()
    return {(int(a), int(b)) for a, b in pairs[0] if a != AFTER_NONE}


def test_bad_words_are_forbidden_where_the_output_leads_to_them() -> None:
    params = SamplingParams(bad_word_ids=((9,), (1, 2), (1, 3, 4), (7, 1, 3, 5)))

    def at(*outputs: int, behind: bool = False) -> set[tuple[int, int]]:
        count = len(outputs) + behind
        work = sample(1, 0, params, num_outputs=count, recent_ids=outputs, is_behind=behind)
        return forbidden(SampleBuilder(SHAPES, frozenset({EOS})), work)

    assert at() == set()
    assert at(1) == {(AFTER_ANY, 2)}
    assert at(1, 3) == {(AFTER_ANY, 4)}
    assert at(7, 1, 3) == {(AFTER_ANY, 4), (AFTER_ANY, 5)}
    # The newest token is on the device alone: what it would have to be is left to the device.
    assert at(behind=True) == {(1, 2)}
    assert at(1, behind=True) == {(1, 2), (3, 4)}
    assert at(7, 1, behind=True) == {(1, 2), (3, 4), (3, 5)}


def test_single_bad_words_are_cut_out_of_the_mask() -> None:
    builder = SampleBuilder(SHAPES, frozenset({EOS}))
    work = sample(1, 0, SamplingParams(bad_word_ids=((9,), (3,))))
    _, staged, _ = stage(builder, work)
    assert allowed_tokens(staged) == set(range(SHAPES.vocab_size)) - {3, 9}
    work = sample(2, 0, SamplingParams(bad_word_ids=((9,),), allowed_token_ids=(9, 10)))
    _, staged, _ = stage(builder, work)
    assert allowed_tokens(staged) == {10}
