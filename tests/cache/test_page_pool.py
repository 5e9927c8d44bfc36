"""The page pool against a dictionary of reference counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxserve.cache.page_pool import OutOfPages, PagePool

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.counts: dict[int, int] = {}

    def choose(self, data: st.DataObject, pages: list[int]) -> np.ndarray:
        chosen = data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []
        return np.array(chosen, np.int32)

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        if count > NUM_PAGES - 1 - len(self.counts):
            with pytest.raises(OutOfPages, match=f"{count} pages asked for"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count).tolist()
        assert len(set(pages)) == count and 0 not in pages
        assert not set(pages) & set(self.counts)
        self.counts.update(dict.fromkeys(pages, 1))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = self.choose(data, sorted(self.counts))
        self.pool.share(pages)
        for page in pages.tolist():
            self.counts[page] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.choose(data, sorted(self.counts))
        self.pool.release(pages)
        for page in pages.tolist():
            self.counts[page] -= 1
            if not self.counts[page]:
                del self.counts[page]

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.choose(data, [page for page, count in sorted(self.counts.items()) if count == 1])
        self.pool.free(pages)
        for page in pages.tolist():
            del self.counts[page]

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_PAGES - 1 - len(self.counts)
        assert {p: int(c) for p, c in enumerate(self.pool.references) if c} == self.counts


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_page_cannot_be_released_twice():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(pages)
    assert pool.num_free == 3


def test_a_lost_page_is_found():
    pool = PagePool(4)
    pool.references[pool.allocate(1)] = 0
    with pytest.raises(RuntimeError, match="page pool"):
        pool.check_integrity()


def test_a_pool_needs_a_page_beside_the_dummy():
    with pytest.raises(ValueError, match="num_pages: got 1"):
        PagePool(1)
