"""Pool and tree together: requests that match, compute, fork and leave, against a brute-force account of pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.cache.radix_tree import Handle

NUM_PAGES = 24


@dataclasses.dataclass(eq=False)
class Holder:
    """What a request has: tokens whose pages are all computed, and a lock."""

    tokens: np.ndarray
    pages: list[int]
    handle: Handle


class CacheMachine(RuleBasedStateMachine):
    """Page contents are tracked: a matched page must hold the tokens it is matched for."""

    @initialize(page_size=st.integers(1, 3), enabled=st.sampled_from([True, True, True, False]))
    def start(self, page_size: int, enabled: bool) -> None:
        self.size = page_size
        self.cache = PrefixCache(NUM_PAGES, page_size, enabled=enabled)
        self.holders: list[Holder] = []
        self.content: dict[int, tuple[int, ...]] = {}  # page -> the whole prefix that ends in it

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18), reuses=st.booleans())
    def admit(self, tokens: list[int], reuses: bool) -> None:
        ids = np.array(tokens[: len(tokens) // self.size * self.size], np.int32)
        handle = self.cache.match("", ids, len(ids) if reuses else 0)
        self.cache.acquire(handle)
        for i, page in enumerate(handle.pages.tolist()):
            assert self.content[page] == tuple(ids[: (i + 1) * self.size].tolist())
        need = len(ids) // self.size - len(handle.pages)
        available = self.cache.num_available
        pages = self.cache.allocate(need)
        assert (pages is None) == (need > available)
        if pages is None:
            self.cache.pool.release(handle.pages)
            self.cache.tree.unlock(handle)
            return
        holder = Holder(ids, handle.pages.tolist() + pages.tolist(), handle)
        for i, page in enumerate(holder.pages):
            self.content[page] = tuple(ids[: (i + 1) * self.size].tolist())
        self.holders.append(holder)

    def choose(self, data: st.DataObject) -> Holder | None:
        return data.draw(st.sampled_from(self.holders)) if self.holders else None

    def rest(self, holder: Holder) -> tuple[np.ndarray, np.ndarray]:
        start = holder.handle.num_tokens
        return holder.tokens[start:], np.array(holder.pages[start // self.size :], np.int32)

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        holder = self.choose(data)
        if holder is None or not self.cache.enabled:
            return
        tokens, pages = self.rest(holder)
        if len(pages):
            holder.handle = self.cache.extend(holder.handle, tokens, pages) or holder.handle

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = self.choose(data)
        if holder is None:
            return
        self.cache.tree.lock(holder.handle)
        self.cache.pool.share(np.array(holder.pages, np.int32))
        self.holders.append(Holder(holder.tokens, list(holder.pages), holder.handle))

    @rule(data=st.data(), deposits=st.booleans())
    def leave(self, data: st.DataObject, deposits: bool) -> None:
        holder = self.choose(data)
        if holder is None:
            return
        self.holders.remove(holder)
        tokens, pages = self.rest(holder)
        if deposits and self.cache.enabled and len(pages):
            self.cache.deposit(holder.handle, tokens, pages)
        self.cache.pool.release(np.array(holder.pages, np.int32))
        self.cache.tree.unlock(holder.handle)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        in_use = {page for holder in self.holders for page in holder.pages}
        assert self.cache.pool.num_free == NUM_PAGES - 1 - len(in_use)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        held: dict[int, int] = {}
        for holder in self.holders:
            for page in holder.pages:
                held[page] = held.get(page, 0) + 1
        self.cache.check_integrity(held)
        # Everything that no request uses can be had: the scheduler admits and preempts by this number.
        assert self.cache.num_available == NUM_PAGES - 1 - len(held)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPrefixCache = CacheMachine.TestCase


def test_a_wrong_count_is_found():
    cache = PrefixCache(8, 2)
    pages = cache.allocate(2)
    cache.check_integrity(dict.fromkeys(pages.tolist(), 1))
    with pytest.raises(RuntimeError, match="wrong reference counts"):
        cache.check_integrity({})


def test_a_match_is_whole_pages_within_the_limit():
    cache = PrefixCache(8, 4)
    tokens = np.arange(12, dtype=np.int32)
    root = cache.match("", tokens, 0)
    cache.acquire(root)
    pages = cache.allocate(3)
    cache.deposit(root, tokens, pages)
    cache.pool.release(pages)
    cache.tree.unlock(root)
    lengths = [cache.match("", tokens, limit).num_tokens for limit in (3, 4, 7, 8, 11, 12, 99)]
    assert lengths == [0, 4, 4, 8, 8, 12, 12]
