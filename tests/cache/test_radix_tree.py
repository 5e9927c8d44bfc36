"""The radix tree against a dictionary of every cached prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.cache.radix_tree import Handle, RadixTree

Prefix = tuple[str, tuple[int, ...]]  # (namespace, tokens of whole pages)

NAMESPACES = st.sampled_from(["", "salt"])
TOKENS = st.lists(st.integers(0, 1), max_size=18)


def array(tokens: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(tokens, np.int32)


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size)
        self.cached: dict[Prefix, int] = {}  # prefix -> page of its last page_size tokens
        self.locks: list[tuple[Handle, Prefix]] = []
        self.next_page = 1

    def longest(self, namespace: str, tokens: list[int]) -> int:
        length = 0
        while length + self.size <= len(tokens) and (namespace, tuple(tokens[: length + self.size])) in self.cached:
            length += self.size
        return length

    def protected(self) -> set[Prefix]:
        return {
            (namespace, tokens[:end])
            for _, (namespace, tokens) in self.locks
            for end in range(self.size, len(tokens) + 1, self.size)
        }

    def put(self, namespace: str, tokens: list[int], start: int) -> np.ndarray:
        """New page ids for tokens[start:]; those that are new to the tree are noted in the oracle."""
        pages = []
        for end in range(start + self.size, len(tokens) + 1, self.size):
            pages.append(self.next_page)
            self.cached.setdefault((namespace, tuple(tokens[:end])), self.next_page)
            self.next_page += 1
        return array(pages)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def match(self, namespace: str, tokens: list[int]) -> None:
        handle = self.tree.match(namespace, array(tokens))
        length = self.longest(namespace, tokens)
        expected = [self.cached[namespace, tuple(tokens[:end])] for end in range(self.size, length + 1, self.size)]
        assert (handle.num_tokens, handle.pages.tolist()) == (length, expected)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def insert(self, namespace: str, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // self.size * self.size]
        known = self.longest(namespace, tokens) // self.size
        pages = self.put(namespace, tokens, 0)
        end, count = self.tree.insert(self.tree.root(namespace), array(tokens), pages)
        assert (end.num_tokens, count) == (len(tokens), known)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def lock(self, namespace: str, tokens: list[int]) -> None:
        handle = self.tree.match(namespace, array(tokens))
        self.tree.lock(handle)
        self.locks.append((handle, (namespace, tuple(tokens[: handle.num_tokens]))))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locks:
            handle, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
            self.tree.unlock(handle)

    @rule(data=st.data(), tail=TOKENS)
    def extend(self, data: st.DataObject, tail: list[int]) -> None:
        """What a running request does with each chunk: insert behind its lock, and move the lock."""
        if not self.locks:
            return
        place = data.draw(st.integers(0, len(self.locks) - 1))
        handle, (namespace, before) = self.locks[place]
        tokens = [*before, *tail[: len(tail) // self.size * self.size]]
        known = self.longest(namespace, tokens) // self.size - len(before) // self.size
        pages = self.put(namespace, tokens, len(before))
        end, count = self.tree.insert(handle, array(tokens[len(before) :]), pages)
        assert (end.num_tokens, count) == (len(tokens), known)
        self.tree.lock(end)
        self.tree.unlock(handle)
        self.locks[place] = (end, (namespace, tuple(tokens)))

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        available = len(set(self.cached) - self.protected())
        pages = self.tree.evict(count).tolist()
        assert len(set(pages)) == len(pages) == min(count, available)
        gone = {prefix for prefix, page in self.cached.items() if page in pages}
        assert len(gone) == len(pages)
        assert not gone & self.protected()
        self.cached = {prefix: page for prefix, page in self.cached.items() if prefix not in gone}
        # Nothing that is left may continue a prefix that has gone.
        for namespace, tokens in self.cached:
            assert len(tokens) == self.size or (namespace, tokens[: -self.size]) in self.cached

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        assert sorted(self.tree.pages().tolist()) == sorted(self.cached.values())
        assert self.tree.num_pages == len(self.cached)
        assert self.tree.num_evictable == len(set(self.cached) - self.protected())


TreeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTree = TreeMachine.TestCase


def test_the_least_recently_used_prefix_goes_first():
    tree = RadixTree(2)
    for first in (1, 2, 3):
        tree.insert(tree.root(""), array([first, 0, first, 1]), array([10 * first, 10 * first + 1]))
    tree.match("", array([1, 0, 1, 1]))
    assert tree.evict(3).tolist() == [20, 21, 31]  # all of 2, then the tail of 3
    assert tree.match("", array([3, 0, 3, 1])).pages.tolist() == [30]
    assert tree.match("", array([1, 0, 1, 1])).pages.tolist() == [10, 11]


def test_a_prompt_in_chunks_stays_one_edge():
    """Otherwise a match of a long prompt would walk a node per chunk."""
    tree = RadixTree(4)
    handle = tree.root("")
    tree.lock(handle)
    tokens = np.arange(400, dtype=np.int32)
    for start in range(0, 400, 20):
        pages = np.arange(start // 4, start // 4 + 5, dtype=np.int32) + 1
        end, _ = tree.insert(handle, tokens[start : start + 20], pages)
        tree.lock(end)
        tree.unlock(handle)
        handle = end
    match = tree.match("", tokens)
    assert match.pages.tolist() == list(range(1, 101))
    assert match.node.parent is tree.root("").node


def test_a_lock_does_not_protect_what_grows_behind_it():
    tree = RadixTree(1)
    first, _ = tree.insert(tree.root(""), array([1, 2]), array([11, 12]))
    tree.lock(first)
    tree.lock(first)  # two requests stop here
    longer, _ = tree.insert(first, array([3]), array([13]))
    assert tree.num_evictable == 1
    tree.lock(longer)
    tree.unlock(first)
    assert tree.num_evictable == 0
    tree.unlock(longer)
    assert tree.evict(9).tolist() == [13]
    tree.check_integrity()


def test_empty_namespaces_are_forgotten():
    """Namespaces come from clients: lookups and short-lived prefixes must not fill the memory."""
    tree = RadixTree(1)
    for i in range(100):
        handle = tree.match(f"salt {i}", array([1, 2]))
        if i % 4 == 1:  # the others only look
            tree.lock(handle)
            tree.unlock(handle)
        elif i % 4 == 2:
            tree.insert(handle, array([1, 2]), array([2 * i + 1, 2 * i + 2]))
    assert tree.num_pages == 50
    tree.evict(50)
    assert not tree._roots


def test_misuse_is_loud():
    tree = RadixTree(2)
    handle, _ = tree.insert(tree.root(""), array([1, 2]), array([1]))
    with pytest.raises(RuntimeError, match="unlocked more often"):
        tree.unlock(handle)
    with pytest.raises(ValueError, match="3 tokens for 2 pages"):
        RadixTree(2).insert(RadixTree(2).root(""), array([1, 2, 3]), array([1, 2]))


def test_a_broken_tree_is_found():
    tree = RadixTree(2)
    handle, _ = tree.insert(tree.root(""), array([1, 2, 3, 4]), array([1, 2]))
    handle.node.pages = handle.node.pages[:1]
    with pytest.raises(RuntimeError, match="radix tree"):
        tree.check_integrity()
