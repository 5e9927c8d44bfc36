"""KV events against the tree itself: whatever happened, what was told is what is there."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.cache.page_events import PageEvents
from jaxserve.cache.page_hashes import hash_pages, namespace_hash
from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.cache.radix_tree import RadixTree
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.simulator.drive import drive
from jaxserve.simulator.runner import SimulatedRunner
from jaxserve.simulator.stress import StressOptions, make_arrivals


def pages_in(tree: RadixTree) -> set[int]:
    """The hashes of all pages of a tree, from the root down."""
    found: set[int] = set()
    todo = [(node, namespace_hash(name)) for name, node in tree._roots.items()]
    while todo:
        node, parent = todo.pop()
        hashes = hash_pages(parent, node.tokens, tree.page_size)
        found.update(hashes)
        todo.extend((child, hashes[-1] if hashes else parent) for child in node.children.values())
    return found


@pytest.mark.parametrize("num_pages", [100, 420])
def test_a_busy_scheduler_tells_exactly_what_its_tree_holds(num_pages: int):
    options = StressOptions(num_requests=600, seed=3, num_pages=num_pages)
    geometry = CacheGeometry(
        num_pages=num_pages, page_size=4, max_num_rows=48, max_num_samples=48, max_step_tokens=256, max_model_len=192
    )
    scheduler = Scheduler(geometry)
    events = PageEvents()
    events.watch(scheduler.cache.tree, num_pages)
    known: set[int] = set()
    num_evicted = num_takes = 0

    def check(told: object = None) -> None:
        nonlocal num_evicted, num_takes
        stored, evicted = events.take()
        assert not known & set(stored) and known >= set(evicted)
        known.difference_update(evicted)
        known.update(stored)
        num_evicted += len(evicted)
        num_takes += 1
        if num_takes % 10 == 0:
            assert known == pages_in(scheduler.cache.tree)

    drive(scheduler, SimulatedRunner(geometry), make_arrivals(options), on_events=check, on_idle=check)
    assert known == pages_in(scheduler.cache.tree) and num_evicted > 100
    scheduler.flush_cache()
    check()
    assert not known


def test_hashes_name_whole_prefixes_and_namespaces():
    tokens = np.arange(12, dtype=np.int32)
    base = hash_pages(namespace_hash(""), tokens, 4)
    assert len(base) == 3 == len(set(base))
    assert hash_pages(base[0], tokens[4:], 4) == base[1:]
    changed = tokens.copy()
    changed[0] = 99
    assert not set(hash_pages(namespace_hash(""), changed, 4)) & set(base)
    assert not set(hash_pages(namespace_hash("salt"), tokens, 4)) & set(base)
    assert hash_pages(namespace_hash(""), tokens[:7], 4) == base[:1]


def test_a_page_counts_as_long_as_any_tree_has_it():
    events = PageEvents()
    caches = [PrefixCache(8, 4), PrefixCache(8, 4)]
    tokens = np.arange(4, dtype=np.int32)
    for cache in caches:
        events.watch(cache.tree, 8)
        handle = cache.match("", tokens, 4)
        cache.acquire(handle)
        pages = cache.allocate(1)
        end = cache.extend(handle, tokens, pages)
        cache.pool.release(pages)
        cache.tree.unlock(end)
    name = hash_pages(namespace_hash(""), tokens, 4)
    assert events.take() == (name, [])
    caches[0].flush()
    assert events.take() == ([], [])
    caches[1].flush()
    assert events.take() == ([], name)
