"""A radix tree over token sequences, page by page. No jax.

An edge is a run of whole pages: int32 tokens [n * page_size] with their pages [n]. A key is (namespace, tokens);
namespaces never share anything. The idea is SGLang's RadixAttention (Zheng et al., 2023, arXiv:2312.07104).

Contract: match() and insert() return a Handle, which names the lower end of a node. Its pages may be used only while
the handle is locked; lock() protects the path to it from eviction, and nothing below it: an edge is split where a match
or an insertion ends inside it. Each lock() needs one unlock() of the same handle.
"""

from __future__ import annotations

import heapq
from typing import Protocol

import msgspec
import numpy as np

_EMPTY = np.empty(0, np.int32)


class Node:
    """One edge and its lower end. `end` is the number of tokens from the root to that end."""

    __slots__ = ("children", "end", "last_use", "locks", "namespace", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: np.ndarray, pages: np.ndarray, end: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_use = 0
        self.namespace = ""  # of a root


class Handle(msgspec.Struct, frozen=True, gc=False):
    """A position: the end of `node`, `num_tokens` from the root of its namespace.

    pages  int32 [num_tokens / page_size] for a match; for an insertion the pages of the inserted part only
    """

    node: Node
    num_tokens: int
    pages: np.ndarray


class TreeListener(Protocol):
    """Hears of pages that enter and leave a tree."""

    def stored(self, parent: int | str, tokens: np.ndarray, pages: np.ndarray) -> None:
        """`pages` of int32 `tokens` now follow page `parent`, or begin the namespace `parent`."""
        ...

    def evicted(self, pages: np.ndarray) -> None:
        """`pages` are given up."""
        ...


class RadixTree:
    """page_size in tokens. The tree owns the pages it keeps until evict() hands them back."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.listener: TreeListener | None = None
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._num_pages = 0
        self._num_locked = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (last use, tie breaker, leaf); may be stale
        self._ties = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages on no locked path. (An unlocked node never has a locked descendant.)"""
        return self._num_pages - self._num_locked

    def root(self, namespace: str) -> Handle:
        """The empty prefix of a namespace. Locking it is allowed and keeps the namespace."""
        node = self._roots.get(namespace)
        if node is None:
            # Stored when it is locked or inserted into: namespaces come from clients, most lookups find nothing.
            node = Node(None, _EMPTY, _EMPTY, 0)
            node.namespace = namespace
        return Handle(node, 0, _EMPTY)

    def match(self, namespace: str, tokens: np.ndarray) -> Handle:
        """The longest cached prefix of int32 `tokens` in whole pages; its pages are in the handle."""
        node = self._roots.get(namespace)
        if node is None:
            return self.root(namespace)
        self._clock += 1
        node, position, pages = self._descend(node, 0, tokens)
        if position < node.end:
            node = self._split(node, position)
        return Handle(node, position, _joined(pages))

    def insert(self, start: Handle, tokens: np.ndarray, pages: np.ndarray) -> tuple[Handle, int]:
        """Continue from `start` (locked, or the root) with int32 tokens [n * page_size] and their pages [n].

        Returns the handle of the end and how many of the leading pages the tree already had: those stay the
        caller's, the rest pages[count:] belong to the tree from now on.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens for {len(pages)} pages of {self.page_size}")
        self._clock += 1
        self._keep_root(start.node)
        node, position, found = self._descend(start.node, start.num_tokens, tokens)
        matched = position - start.num_tokens
        count = sum(map(len, found))
        if position < node.end:
            node = self._split(node, position)
        if matched < len(tokens):
            node = self._append(node, tokens[matched:], pages[count:], own_locks=node is start.node)
        return Handle(node, start.num_tokens + len(tokens), pages), count

    def extend(self, start: Handle, tokens: np.ndarray, pages: np.ndarray) -> Handle | None:
        """As insert(), with the caller's lock moved from `start` to the end; None, and nothing changes, if the tree
        has the first of these pages already."""
        before = start.node
        if self._key(tokens) in before.children:
            return None
        self._clock += 1
        before.last_use = self._clock
        node = self._append(before, tokens, pages, own_locks=1)
        if node is not before:
            node.locks = 1
            self._num_locked += len(pages)
        return Handle(node, start.num_tokens + len(tokens), pages)

    def lock(self, handle: Handle) -> None:
        node: Node | None = handle.node
        self._keep_root(handle.node)
        while node is not None:
            if node.locks == 0:
                self._num_locked += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, handle: Handle) -> None:
        # A node split since lock() has left a parent with the same count, so the path still carries our lock.
        node: Node | None = handle.node
        while node is not None:
            node.locks -= 1
            if node.locks == 0:
                self._num_locked -= len(node.pages)
                self._push_leaf(node)
            if node.locks < 0:
                raise RuntimeError("radix tree: a handle was unlocked more often than locked")
            self._forget_empty_root(node)
            node = node.parent

    def evict(self, count: int) -> np.ndarray:
        """Give up at least min(count, num_evictable) pages, least recently used leaves first, tails before heads."""
        given: list[np.ndarray] = []
        missing = count
        while missing > 0 and self._leaves:
            stamp, _, leaf = heapq.heappop(self._leaves)
            if leaf.children or leaf.locks or leaf.parent is None or not len(leaf.pages):
                continue
            if stamp != leaf.last_use:
                self._push_leaf(leaf)
                continue
            keep = max(0, len(leaf.pages) - missing)
            given.append(leaf.pages[keep:])
            if self.listener is not None:
                self.listener.evicted(leaf.pages[keep:])
            missing -= len(leaf.pages) - keep
            self._num_pages -= len(leaf.pages) - keep
            if keep:
                leaf.end -= (len(leaf.pages) - keep) * self.page_size
                leaf.pages = leaf.pages[:keep]
                leaf.tokens = leaf.tokens[: keep * self.page_size]
                self._push_leaf(leaf)
            else:
                self._remove(leaf)
        return _joined(given)

    def pages(self) -> np.ndarray:
        """All pages of the tree, in no order."""
        return _joined([node.pages for node in self._nodes()])

    def check_integrity(self) -> None:
        """Raise RuntimeError if counts, edges or locks contradict each other."""
        total = locked = 0
        for node in self._nodes():
            total += len(node.pages)
            locked += len(node.pages) if node.locks else 0
            parent = node.parent
            if parent is None:
                continue
            size = len(node.tokens)
            wrong = (
                size == 0
                or size != len(node.pages) * self.page_size
                or node.end != parent.end + size
                or parent.children.get(self._key(node.tokens)) is not node
                or node.locks > parent.locks
            )
            if wrong:
                raise RuntimeError(f"radix tree: bad node of {size} tokens ending at {node.end}, {node.locks} locks")
        if total != self._num_pages or locked != self._num_locked:
            raise RuntimeError(
                f"radix tree: counted {total} pages, {locked} locked; recorded {self._num_pages}, {self._num_locked}"
            )

    def _key(self, tokens: np.ndarray) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _nodes(self) -> list[Node]:
        found = list(self._roots.values())
        for node in found:  # grows while it is walked
            found.extend(node.children.values())
        return found

    def _descend(self, node: Node, position: int, tokens: np.ndarray) -> tuple[Node, int, list[np.ndarray]]:
        """Follow `tokens` from `position` (the end of node) as far as whole pages agree.

        Returns the node reached, the position there and the pages passed.
        """
        size = self.page_size
        pages: list[np.ndarray] = []
        done = 0
        node.last_use = self._clock
        while len(tokens) - done >= size:
            child = node.children.get(self._key(tokens[done:]))
            if child is None:
                break
            node = child
            node.last_use = self._clock
            limit = min(len(node.tokens), (len(tokens) - done) // size * size)
            differs = node.tokens[:limit] != tokens[done : done + limit]
            first = int(differs.argmax())
            same = first // size * size if differs[first] else limit
            pages.append(node.pages[: same // size])
            position += same
            done += same
            if same < len(node.tokens):
                break
        return node, position, pages

    def _append(self, node: Node, tokens: np.ndarray, pages: np.ndarray, *, own_locks: int) -> Node:
        """Put copies of new tokens and pages behind a node, of whose locks own_locks are the caller's."""
        if self.listener is not None:
            self.listener.stored(int(node.pages[-1]) if len(node.pages) else node.namespace, tokens, pages)
        self._num_pages += len(pages)
        # A leaf that nobody else has locked grows in place: a prompt that arrives in chunks stays one edge.
        if not node.children and node.locks == own_locks and node.parent is not None:
            node.tokens = np.concatenate((node.tokens, tokens))
            node.pages = np.concatenate((node.pages, pages))
            node.end += len(tokens)
            if node.locks:
                self._num_locked += len(pages)
            return node
        child = Node(node, tokens.copy(), pages.copy(), node.end + len(tokens))
        child.last_use = self._clock
        node.children[self._key(tokens)] = child
        self._push_leaf(child)
        return child

    def _split(self, node: Node, position: int) -> Node:
        """Cut the edge at `position`; returns the new upper node. The old object stays the lower one."""
        parent = node.parent
        assert parent is not None
        cut = position - parent.end
        upper = Node(parent, node.tokens[:cut], node.pages[: cut // self.page_size], position)
        upper.locks = node.locks
        upper.last_use = node.last_use
        parent.children[self._key(upper.tokens)] = upper
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[cut // self.page_size :]
        node.parent = upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _push_leaf(self, node: Node) -> None:
        if not node.children and not node.locks and node.parent is not None:
            self._ties += 1
            heapq.heappush(self._leaves, (node.last_use, self._ties, node))
            if len(self._leaves) > 64 + 4 * self._num_pages:
                self._compact()

    def _compact(self) -> None:
        """Drop stale heap entries, so that the heap is bounded by the tree."""
        live = {id(n): n for _, _, n in self._leaves if not n.children and not n.locks and n.parent is not None}
        self._leaves = [(n.last_use, i, n) for i, n in enumerate(live.values())]
        self._ties = len(self._leaves)
        heapq.heapify(self._leaves)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._key(leaf.tokens)]
        leaf.parent = None
        leaf.pages = _EMPTY
        self._push_leaf(parent)
        self._forget_empty_root(parent)

    def _keep_root(self, node: Node) -> None:
        if node.parent is None and self._roots.setdefault(node.namespace, node) is not node:
            raise RuntimeError("radix tree: a handle of an empty namespace is used after the namespace was filled")

    def _forget_empty_root(self, node: Node) -> None:
        """Namespaces come from clients (cache salts): an empty one must not stay in memory."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _EMPTY
