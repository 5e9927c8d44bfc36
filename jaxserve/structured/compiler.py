"""Grammars to matchers, and the vocabulary they are matched against. No jax.

llguidance's constructors never raise: an error is a state of what they return. Limits bound the work of a compilation
and of each token; a grammar that needs more is refused, or ends its own request.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import llguidance

from jaxserve.structured.grammar import Grammar, GrammarError

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_BYTES = 16 << 20  # of grammar text
_MAX_MESSAGE = 500
_STACK_BYTES = 64 << 20  # the compiler recurses; check_process.py admits only what needs a quarter of this

# Lexer states cost 1 to 2 kB each; the rest are the package's defaults, which stop a step after some 20 ms.
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class Vocabulary(Protocol):
    """What the matcher must know of a tokenizer."""

    vocab_size: int
    special_ids: Collection[int]
    eos_token_ids: Sequence[int] | frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


class _Words:
    """A tokenizer as llguidance reads it: the bytes of every token, and the tokens of a text inside a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._takes_options = hasattr(tokenizer, "encode_inside")
        self.eos_token_id = min(tokenizer.eos_token_ids)
        special = {token for token in tokenizer.special_ids if token < vocab_size}
        self.special_token_ids = sorted(special)
        words = map(tokenizer.token_bytes, range(min(tokenizer.vocab_size, vocab_size)))
        # The package marks control tokens with the byte FF, which no text in UTF-8 holds.
        self.tokens = [b"" if i not in special and b"\xff" in word else word for i, word in enumerate(words)]

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")
        return self._tokenizer.encode_inside(text) if self._takes_options else self._tokenizer.encode(text)


def make_vocabulary(tokenizer: Any, vocab_size: int) -> llguidance.LLTokenizer:
    """vocab_size: of the model's logits, which may be padded, or fewer than the tokenizer's. Takes a second per 100,000
    tokens and holds the GIL."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Words(tokenizer, vocab_size)),
        n_vocab=vocab_size,
        eos_token=sorted(token for token in tokenizer.eos_token_ids if token < vocab_size),
    )


def compile_grammar(vocabulary: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """Raises GrammarError with the compiler's words, which name an unsupported keyword."""
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    for warning in matcher.get_grammar_warnings():
        # A schema inside a grammar may ask for unknown keywords to be left out of account.
        if "nimplemented" in warning:
            raise GrammarError(first_line(warning))
    return matcher


def first_line(message: str) -> str:
    """An error of the package in one line."""
    text = " ".join(message.split("<state>")[0].split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."


class GrammarCompiler:
    """Compiles in one thread of its own and remembers the last results, bounded in number and bytes.

    A result is a matcher at the start of its grammar: copy it, never feed it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._results: collections.OrderedDict[str, concurrent.futures.Future[llguidance.LLMatcher]] = (
            collections.OrderedDict()
        )
        self._num_bytes = 0
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    @property
    def vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size)
        return self._vocabulary

    @property
    def num_cached(self) -> int:
        return len(self._results)

    def submit(self, grammar: Grammar) -> concurrent.futures.Future[llguidance.LLMatcher]:
        """Its result is a matcher, or a GrammarError."""
        text = grammar.text
        known = self._results.get(text)
        if known is not None:
            self._results.move_to_end(text)
            return known
        vocabulary = self.vocabulary
        future = self._threads().submit(compile_grammar, vocabulary, text)
        self._results[text] = future
        self._num_bytes += len(text)
        while len(self._results) > MAX_CACHED_GRAMMARS or self._num_bytes > MAX_CACHED_BYTES:
            old, _ = self._results.popitem(last=False)
            self._num_bytes -= len(old)
        return future

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._pool is None:
            # The size is read when a thread is started, and is one for the whole process.
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar")
                self._pool.submit(int).result()
            finally:
                threading.stack_size(before)
        return self._pool
