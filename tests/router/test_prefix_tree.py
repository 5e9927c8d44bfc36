"""The approximate tree against a list of everything that was sent."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.routing.prefix_tree import PrefixTree

KEYS = st.binary(max_size=12).map(lambda key: bytes(byte % 3 for byte in key))
STEPS = st.lists(st.tuples(st.sampled_from("xyz"), KEYS, st.booleans()), max_size=60)


def common(left: bytes, right: bytes) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def matched(tree: PrefixTree, key: bytes) -> dict[str, int]:
    found: dict[str, int] = {}
    lengths = []
    for length, workers, _ in tree.match(key):
        lengths.append(length)
        for worker in workers:
            found.setdefault(worker, length)
    assert lengths == sorted(lengths, reverse=True)
    return found


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_without_a_limit_it_knows_all_that_was_sent(steps):
    tree, sent = PrefixTree(1 << 20), {}
    for worker, key, is_removal in steps:
        if is_removal and len(key) < 3:
            tree.remove_worker(worker)
            sent.pop(worker, None)
            assert tree.size(worker) == 0
            continue
        expected = {name: max(common(key, old) for old in keys) for name, keys in sent.items()}
        assert matched(tree, key) == {name: length for name, length in expected.items() if length}
        tree.insert(key, worker)
        sent.setdefault(worker, []).append(key)
    for name, keys in sent.items():
        # Bytes are counted once however many requests share them.
        assert tree.size(name) == len({key[:n] for key in keys for n in range(1, len(key) + 1)})


@given(STEPS, st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_it_never_exceeds_its_limit_nor_knows_what_was_not_sent(steps, capacity):
    tree, sent = PrefixTree(capacity), {}
    for worker, key, _ in steps:
        tree.insert(key, worker)
        sent.setdefault(worker, []).append(key)
        assert all(tree.size(name) <= capacity for name in sent)
        found = matched(tree, key)
        assert found.get(worker, 0) == min(len(key), capacity)  # the newest is never forgotten
        for name, length in found.items():
            assert length <= max(common(key, old) for old in sent[name])


def test_the_least_recently_used_is_forgotten_first():
    tree = PrefixTree(30)
    for name in (b"a", b"b", b"c"):
        tree.insert(name * 10, "w")
    tree.insert(b"a" * 10, "w")  # used again
    tree.insert(b"d" * 10, "w")
    assert {name: bool(matched(tree, name * 10)) for name in (b"a", b"b", b"c", b"d")} == {
        b"a": True, b"b": False, b"c": True, b"d": True,
    }  # fmt: skip


def test_one_worker_s_limit_does_not_touch_another():
    tree = PrefixTree(20)
    tree.insert(b"p" * 20, "a")
    tree.insert(b"p" * 20, "b")
    tree.insert(b"q" * 20, "a")
    assert matched(tree, b"p" * 20) == {"b": 20}


def test_memory_is_bounded_under_endless_traffic():
    source = random.Random(1)
    tree = PrefixTree(2000)
    for number in range(20000):
        tree.insert(b"system prompt" + b"%d" % source.randrange(40) * 8 + b"%d" % number, source.choice("ab"))
    assert sum(map(len, tree._outermost.values())) < 2000
    nodes, todo = 0, [tree._root]
    while todo:
        node = todo.pop()
        nodes += 1
        todo.extend(node.children.values())
    assert nodes < 2000
