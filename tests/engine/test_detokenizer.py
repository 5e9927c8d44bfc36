"""Text streams against the plain decoding of all bytes, cut by brute force."""

from __future__ import annotations

import codecs
import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.detokenizer import Detokenizer


@dataclasses.dataclass
class ListTokenizer:
    """Token i is the i-th byte string."""

    tokens: list[bytes]
    special_ids: tuple[int, ...] = ()
    strip_leading_space: bool = False

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def pieces(tokens: list[bytes], **options) -> tuple[list[str], str | None, int]:
    """All pieces of text of the tokens, the stop string found, and how many tokens were read."""
    tokenizer = ListTokenizer(tokens, options.pop("special_ids", ()), options.pop("strip_leading_space", False))
    stream = Detokenizer(tokenizer).stream(options.pop("prompt", [0]), **options)
    out = []
    for index in range(len(tokens)):
        out.append(stream.push([index]))
        if stream.stop is not None:
            return out, stream.stop, index + 1
    out.append(stream.finish())
    return out, stream.stop, len(tokens)


def first_stop(text: str, stops: tuple[str, ...], first_end: int = 0) -> tuple[int, str] | None:
    """(end, stop) of the stop string that is complete first, at `first_end` or later; longest on a tie."""
    for end in range(max(first_end, 1), len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


BYTES = st.lists(
    st.sampled_from(
        [b"a", b"b", b" ", "é".encode(), "🍵".encode(), "日".encode(), b"\xf0\x9f", b"\x8d", b"\xff", b"\xc3"]
    ),
    max_size=24,
).map(b"".join)
CUTS = st.lists(st.integers(0, 200), max_size=40)
STOPS = st.lists(st.text("abé🍵 \ufffd", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


@given(BYTES, CUTS)
@settings(max_examples=400, deadline=None)
def test_pieces_join_to_the_plain_decoding(data, cuts):
    out, stop, _ = pieces(split(data, cuts))
    assert "".join(out) == data.decode("utf-8", "replace")
    assert stop is None


@given(BYTES, CUTS, STOPS, st.booleans())
@settings(max_examples=800, deadline=None)
def test_stop_strings_cut_where_brute_force_cuts(data, cuts, stops, include):
    out, stop, _ = pieces(split(data, cuts), stop=stops, include_stop=include)
    whole = data.decode("utf-8", "replace")
    expected = first_stop(whole, stops)
    if expected is None:
        assert ("".join(out), stop) == (whole, None)
        return
    end, found = expected
    assert stop == found
    assert "".join(out) == whole[: end if include else end - len(found)]


@given(BYTES, CUTS, STOPS)
@settings(max_examples=400, deadline=None)
def test_only_a_possible_start_of_a_stop_is_held_back(data, cuts, stops):
    """Each piece goes out as soon as it can: what is held is the longest possible start, no more."""
    tokens = split(data, cuts)
    out, stop, num_read = pieces(tokens, stop=stops)
    read = tokens[: num_read - 1] if stop else tokens
    for k in range(len(read) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = "".join(decoder.decode(token) for token in read[:k])
        starts = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
        assert "".join(out[:k]) == text[: len(text) - max(starts, default=0)]


@given(BYTES, CUTS, STOPS, st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_stop_strings_wait_for_min_tokens(data, cuts, stops, min_tokens):
    tokens = split(data, cuts)
    out, stop, num_read = pieces(tokens, stop=stops, min_tokens=min_tokens)
    whole = data.decode("utf-8", "replace")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    # Characters that were complete before the token with which min_tokens is reached cannot end a stop string.
    early = len("".join(decoder.decode(token) for token in tokens[: max(min_tokens - 1, 0)]))
    if min_tokens > len(tokens):
        # The last, incomplete character is flushed at the end, still under min_tokens.
        early = len(whole)
    expected = first_stop(whole, stops, early + 1)
    if expected is None:
        assert ("".join(out), stop) == (whole, None)
    else:
        end, found = expected
        assert ("".join(out), stop) == (whole[: end - len(found)], found)
    if stop is not None:
        assert num_read >= min_tokens


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "found"),
    [
        ([b"one ", b"two th", b"ree"], ("o th",), "one tw", "o th"),
        ([b"abcdef"], ("cd", "ef"), "ab", "cd"),  # both in one token
        ([b"xabc"], ("bc", "abc"), "x", "abc"),  # same end: the longest
        ([b"a", b"b", b"x"], ("abc",), "abx", None),  # held back, then ruled out
        ([b"12", b"3"], ("34",), "123", None),  # held back at the end
        ([b"aab"], ("ab",), "a", "ab"),
        (["né".encode()[:2], "né".encode()[2:], b"e"], ("ée",), "n", "ée"),
    ],
)
def test_stop_cases(tokens, stop, text, found):
    out, seen, _ = pieces(tokens, stop=stop)
    assert ("".join(out), seen) == (text, found)


def test_nothing_comes_after_a_stop():
    tokenizer = ListTokenizer([b"a", b"STOP", b"b"])
    stream = Detokenizer(tokenizer).stream([0], stop=("STOP",))
    assert [stream.push([0]), stream.push([1]), stream.push([2]), stream.finish()] == ["a", "", "", ""]


def test_special_tokens_are_skipped_or_shown():
    tokens = [b"<s>", b"hi", b"</s>"]
    assert "".join(pieces(tokens, special_ids=(0, 2))[0]) == "hi"
    assert "".join(pieces(tokens, special_ids=(0, 2), skip_special_tokens=False)[0]) == "<s>hi</s>"


def test_a_character_survives_a_skipped_special_token_between_its_bytes():
    tea = "🍵".encode()
    assert "".join(pieces([tea[:2], b"<s>", tea[2:]], special_ids=(1,))[0]) == "🍵"


@pytest.mark.parametrize(("prompt", "text"), [([2], "a b"), ([2, 0], " a b")])
def test_leading_space_is_stripped_only_at_the_start_of_the_sequence(prompt, text):
    tokens = [b" a", b" b", b"<s>"]
    stream = Detokenizer(ListTokenizer(tokens, (2,), strip_leading_space=True)).stream(prompt)
    assert stream.push([0]) + stream.push([1]) + stream.finish() == text


def test_ids_past_the_vocabulary_have_no_text():
    stream = Detokenizer(ListTokenizer([b"a"])).stream([0])
    assert stream.push([0, 77]) + stream.finish() == "a"


def test_prompt_never_reappears():
    """The continuation of a prompt that ends inside a character holds the bytes of the output alone."""
    tea = "🍵".encode()
    stream = Detokenizer(ListTokenizer([b"Green tea ", tea[:2], tea[2:], b"!"])).stream([0, 1])
    text = stream.push([2]) + stream.push([3]) + stream.finish()
    assert text == (tea[2:] + b"!").decode("utf-8", "replace")
