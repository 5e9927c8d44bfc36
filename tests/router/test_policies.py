"""Policies without sockets: who gets what, and why."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.routing.loads import LoadTable, load_score
from jaxserve.routing.page_index import EXPECTED_S, PageIndex
from jaxserve.routing.policy import (
    POLICY_NAMES,
    Balance,
    CacheAware,
    ConsistentHash,
    GuessedPrefixes,
    Query,
    RoundRobin,
    ToldPrefixes,
    make_policy,
)


def table(**scores: int) -> LoadTable:
    loads = LoadTable()
    for name, score in scores.items():
        loads.set(name, score)
    return loads


def prefixed(group: int, tail: str = "") -> Query:
    return Query(f"group {group} ".encode() * 20 + tail.encode())


def test_the_load_table_agrees_with_a_plain_dict():
    source = random.Random(3)
    loads, plain = LoadTable(), {}
    for _ in range(3000):
        worker, score = f"w{source.randrange(12)}", source.randrange(6)
        if source.random() < 0.2:
            loads.remove(worker)
            plain.pop(worker, None)
        else:
            loads.set(worker, score)
            plain[worker] = score
        assert loads.names == sorted(plain)
        if not plain:
            assert loads.least() is None
            continue
        assert loads.lowest == min(plain.values()) and loads.highest == max(plain.values())
        excluded = set(source.sample(sorted(plain), source.randrange(len(plain) + 1)))
        allowed = {w: s for w, s in plain.items() if w not in excluded}
        least = loads.least(excluded)
        assert (least is None) == (not allowed)
        if allowed:
            assert plain[least] == min(allowed.values())
            near = loads.nearly_least(2, 100, excluded)
            assert set(near) == {w for w, s in allowed.items() if s <= min(allowed.values()) + 2}


def test_waiting_requests_weigh_four_times():
    assert load_score(3, 2) == 11


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_keeps_to_the_table_and_the_exclusions(name: str):
    policy = make_policy(name)
    assert policy.name == name
    source = random.Random(1)
    loads = table(a=0, b=3, c=1)
    assert policy.choose(prefixed(1), LoadTable()) is None
    for turn in range(200):
        excluded = set(source.sample("abc", source.randrange(4)))
        query = Query(f"prompt {source.randrange(9)} ".encode() * 10, session=f"s{turn % 5}")
        worker = policy.choose(query, loads, excluded)
        assert worker is None if len(excluded) == 3 else worker in set("abc") - excluded
        if worker is not None:
            policy.note_sent(query, worker)
        if turn == 100:
            loads.remove("b")
            policy.remove_worker("b")
            loads.set("b", 0)


def test_round_robin_goes_round_also_when_workers_come_and_go():
    policy, loads = RoundRobin(), table(a=0, b=0, c=0)
    assert [policy.choose(Query(), loads) for _ in range(4)] == ["a", "b", "c", "a"]
    loads.remove("b")
    assert [policy.choose(Query(), loads) for _ in range(3)] == ["c", "a", "c"]


def test_power_of_two_is_nearly_even_where_random_is_not():
    spread = {}
    for name in ("power_of_two", "random"):
        policy, loads = make_policy(name), table(**{f"w{n:02d}": 0 for n in range(32)})
        for _ in range(3200):
            worker = policy.choose(Query(), loads)
            loads.set(worker, loads.score(worker) + 1)
        spread[name] = loads.highest - loads.lowest
    assert spread["power_of_two"] <= 6 < 20 <= spread["random"]


def test_a_session_stays_and_only_those_of_a_lost_worker_move():
    policy, loads = ConsistentHash(), table(**{f"w{n}": 0 for n in range(8)})
    queries = [Query(session=f"session {n}") for n in range(400)]
    before = [policy.choose(query, loads) for query in queries]
    assert before == [policy.choose(query, loads) for query in queries]
    assert len(set(before)) == 8
    loads.remove("w3")
    after = [policy.choose(query, loads) for query in queries]
    assert all(a == b for a, b in zip(after, before) if b != "w3") and "w3" not in after
    loads.set("w3", 0)
    assert [policy.choose(query, loads) for query in queries] == before


def cache_aware(**balance: float) -> CacheAware:
    return CacheAware(GuessedPrefixes(1 << 20), Balance(**balance))


def send(policy: CacheAware, query: Query, loads: LoadTable) -> str:
    worker = policy.choose(query, loads)
    policy.note_sent(query, worker)
    return worker


def test_a_prefix_stays_where_it_is_and_new_ones_are_spread():
    policy, loads = cache_aware(), table(a=0, b=0, c=0, d=0)
    homes = {group: send(policy, prefixed(group), loads) for group in range(12)}
    assert sorted(homes.values()) == sorted("abcd" * 3)
    for turn in range(5):
        for group in range(12):
            assert send(policy, prefixed(group, f"turn {turn}"), loads) == homes[group]


def test_the_longest_match_wins():
    policy, loads = cache_aware(), table(a=0, b=0)
    short, long = Query(b"x" * 100), Query(b"x" * 100 + b"y" * 100)
    policy.note_sent(short, "a")
    policy.note_sent(long, "b")
    assert policy.choose(Query(b"x" * 100 + b"y" * 90 + b"z" * 10), loads) == "b"
    assert policy.choose(long, loads, {"b"}) == "a"
    assert policy.choose(Query(b"x" * 100 + b"z" * 20), table(a=1, b=0)) == "b"  # both have it: the less busy
    assert policy.choose(Query(b"x" * 100 + b"z" * 20), table(a=0, b=1)) == "a"


def test_a_common_beginning_that_is_short_draws_nothing_to_one_worker():
    policy, loads = cache_aware(), table(a=0, b=0)
    counts = {"a": 0, "b": 0}
    for number in range(40):
        counts[send(policy, Query(b"You are a helpful assistant." + b"%d " % number * 200), loads)] += 1
    assert counts == {"a": 20, "b": 20}


def test_an_overloaded_worker_is_left_and_its_prefix_spreads():
    policy = cache_aware(absolute=4, relative=1.5)
    query = prefixed(1)
    assert send(policy, query, table(a=0, b=9)) == "a"
    assert policy.choose(query, table(a=4, b=0)) == "a"  # not more than 4 above
    assert policy.choose(query, table(a=14, b=10)) == "a"  # not more than 1.5 times
    assert send(policy, query, table(a=20, b=10)) == "b"
    assert policy.choose(query, table(a=3, b=5)) == "a"  # now both have it
    assert policy.choose(query, table(a=5, b=3)) == "b"


def test_a_prefix_in_great_demand_spreads_before_its_worker_is_overloaded():
    policy, loads = cache_aware(), table(a=0, b=0, c=0, d=0)
    for number in range(1200):  # a tenth of all requests each, two fifths for one
        group = 0 if number % 5 < 2 else number % 6 + 1
        worker = policy.choose(prefixed(group, str(number)), loads)
        policy.note_sent(prefixed(group, str(number)), worker)
    shares = [(share, demand) for share, _, demand in policy.index.match(prefixed(0))]
    assert 0.3 < shares[0][1] < 0.5
    assert policy.choose(prefixed(0), table(a=9, b=9, c=9, d=9)) is not None
    home = policy.choose(prefixed(0), loads)
    busy = table(**{name: 5 * (name == home) for name in "abcd"})
    assert policy.choose(prefixed(0), busy) != home
    cold = policy.choose(prefixed(3), loads)
    busy = table(**{name: 5 * (name == cold) for name in "abcd"})
    assert policy.choose(prefixed(3), busy) == cold


def test_that_another_worker_is_overloaded_changes_nothing():
    policy = cache_aware(absolute=4)
    assert send(policy, prefixed(1), table(a=0, b=0, c=99)) == "a"
    assert policy.choose(prefixed(1), table(a=2, b=0, c=99)) == "a"


def test_a_worker_that_lost_its_cache_is_no_home_any_more():
    policy, loads = cache_aware(), table(a=0, b=1)
    assert send(policy, prefixed(1), loads) == "a"
    policy.remove_worker("a")
    assert policy.choose(prefixed(1), table(a=1, b=0)) == "b"


@pytest.mark.parametrize(
    "bad", [{"min_share": 1.5}, {"absolute": -1}, {"relative": 0.5}, {"slack": -1}], ids=lambda bad: next(iter(bad))
)
def test_bad_limits_are_refused(bad: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Balance(**bad)
    with pytest.raises(ValueError, match="round_robin"):
        make_policy("best")


# ---------------------------------------------------------------------- KV events


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_page_index_agrees_with_plain_sets():
    source = np.random.default_rng(5)
    index, plain = PageIndex(Clock()), {name: set() for name in "abc"}
    for _ in range(2000):
        worker = "abc"[source.integers(3)]
        pages = source.integers(0, 12, source.integers(1, 6)).tolist()
        match source.integers(8):
            case 0:
                index.remove_worker(worker)
                plain[worker] = set()
            case 1 | 2 | 3:
                index.evicted(worker, pages)
                plain[worker] -= set(pages)
            case _:
                index.stored(worker, pages)
                plain[worker] |= set(pages)
        asked = source.integers(0, 12, source.integers(1, 5)).tolist()
        expected = {}
        for name, own in plain.items():
            count = next((n for n, page in enumerate(asked) if page not in own), len(asked))
            if count:
                expected[name] = count
        found = [(count, name) for count, names, _ in index.match(asked) for name in names]
        assert {name: count for count, name in found} == expected
        assert [count for count, _ in found] == sorted((count for count, _ in found), reverse=True)
        assert {name: index.num_pages(name) for name in plain} == {name: len(own) for name, own in plain.items()}


def test_what_was_sent_counts_until_the_worker_tells_or_time_is_up():
    clock = Clock()
    index = PageIndex(clock)
    index.expect("a", [1, 2, 3])
    index.stored("a", [1])
    assert [(count, list(names)) for count, names, _ in index.match([1, 2, 3])] == [(3, ["a"])]
    clock.now = EXPECTED_S + 1
    assert [(count, list(names)) for count, names, _ in index.match([1, 2, 3])] == [(1, ["a"])]
    assert index.num_pages("a") == 1


def test_told_prefixes_follow_the_worker_not_the_guess():
    pages = PageIndex(Clock())
    policy = CacheAware(ToldPrefixes(pages, GuessedPrefixes(1 << 20)))
    query = Query(b"token bytes" * 20, pages=[11, 12, 13, 14])
    assert send(policy, query, table(a=0, b=1)) == "a"
    pages.stored("a", query.pages)
    assert policy.choose(query, table(a=1, b=0)) == "a"
    pages.evicted("a", [12, 13, 14])  # a quarter is left: too little to go there
    assert policy.choose(query, table(a=1, b=0)) == "b"
    text = Query(b"a text whose tokens nobody knows " * 5)
    assert send(policy, text, table(a=1, b=0)) == "b"
    assert policy.choose(text, table(a=0, b=1)) == "b"
