"""Workers tell what they have cached, and requests follow."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import numpy as np
from cluster import Cluster, wait_for
from jaxserve.server.cached_pages import CachedPages, KVEvent

from jaxserve.cache.page_hashes import hash_pages, namespace_hash

PAGE = 16


def pages_of(ids: list[int], namespace: str = "") -> list[int]:
    return hash_pages(namespace_hash(namespace), np.array(ids, np.int32), PAGE)


def snapshot(pages: list[int]) -> dict[str, object]:
    return {"is_snapshot": True, "page_size": PAGE, "stored": pages}


def test_requests_follow_what_workers_tell(cluster: Cluster) -> None:
    first, second = cluster.start_workers(2)
    prompts = {name: list(range(start, start + 200)) for name, start in (("a", 0), ("b", 1000))}
    first.events = [snapshot(pages_of(prompts["b"]))]
    second.events = [snapshot(pages_of(prompts["a"]))]
    with cluster.router(prefix_source="events"):
        index = cluster.app.fleet.pages
        wait_for(lambda: index.num_pages(first.url) == index.num_pages(second.url) == 12)
        for _ in range(3):
            assert cluster.post(prompts["a"]).json()["worker"] == "w1"
            assert cluster.post(prompts["b"]).json()["worker"] == "w0"
        # Another key, another cache: what was told of no key is no match.
        second.events.append({"evicted": pages_of(prompts["a"])})
        first.events.append({"stored": pages_of(prompts["a"])})
        wait_for(lambda: index.num_pages(second.url) == 0)
        assert cluster.post(prompts["a"]).json()["worker"] == "w0"


def test_a_new_life_of_a_worker_begins_with_nothing(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    worker.events = [snapshot(pages_of(list(range(160))))]
    with cluster.router(prefix_source="events"):
        index = cluster.app.fleet.pages
        wait_for(lambda: index.num_pages(worker.url) == 10)
        cluster.run(worker.kill())
        worker.events = [snapshot([])]
        cluster.run(worker.start())
        wait_for(lambda: index.num_pages(worker.url) == 0)


def test_a_restarted_engine_voids_what_was_known() -> None:
    async def scenario() -> list[KVEvent]:
        cached = CachedPages()
        cached.change([1, 2, 3], [])
        stream = cached.events(PAGE)
        found = [await anext(stream)]
        cached.change([4], [1])
        cached.change([1], [4])  # in one event with the last: only the outcome counts
        found.append(await anext(stream))
        cached.clear()
        cached.change([9], [])
        found.append(await anext(stream))
        await stream.aclose()
        assert not cached._readers
        return [msgspec.json.decode(data[6:], type=KVEvent) for data in found]

    begin, change, again = asyncio.run(scenario())
    assert begin == KVEvent(stored=[1, 2, 3], is_snapshot=True, page_size=PAGE)
    assert set(change.stored) == {1} and set(change.evicted) == {4}
    assert again == KVEvent(stored=[9], is_snapshot=True, page_size=PAGE)


def test_texts_are_read_as_the_workers_read_them(cluster: Cluster, tmp_path_factory) -> None:
    """The real server over the toy engine says how it tokenises; the router must name the same pages."""
    from jaxserve.server.router.queries import PageReader
    from test_replicas import write_toy_tokenizer

    from jaxserve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(write_toy_tokenizer(tmp_path_factory.mktemp("toy"))))
    reader = PageReader(tokenizer, uses_keys=True)

    def read(path: str, body: dict[str, object], authorization: bytes = b"") -> list[int] | None:
        return asyncio.run(reader.pages_of(path, msgspec.json.encode(body), authorization, PAGE))

    text = "the old harbour and the rain " * 8
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert read("/v1/completions", {"prompt": text}) == pages_of(ids[:-1])
    assert read("/v1/completions", {"prompt": ids}) == pages_of(ids[:-1])
    assert read("/v1/completions", {"prompt": ids, "cache_salt": "s"}) == pages_of(ids[:-1], "/s")
    chat = read("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    assert chat is not None and len(chat) > 5
    longer = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    ]
    more = read("/v1/chat/completions", {"messages": longer})
    assert more[: len(chat) - 1] == chat[:-1]
    keyed = read("/v1/completions", {"prompt": ids}, b"Bearer secret")
    assert keyed is not None and not set(keyed) & set(pages_of(ids))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert read("/v1/chat/completions", {"messages": longer, "tools": [tool]}) is None
    assert read("/v1/completions", {"prompt": text, "no_such_field": 1}) is None
    assert read("/v1/embeddings", {"input": text}) is None


def test_a_server_without_events_says_so(cluster: Cluster) -> None:
    (worker,) = cluster.start_workers(1)
    with cluster.router(prefix_source="guess"):
        assert cluster.http.get("/kv_events").status_code == 404  # not passed on: it is for routers
        assert httpx.get(worker.url + "/ready").status_code == 200
