"""GET /kv_events: what the engine has cached, for routers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
from jaxserve.server.settings import ServerSettings
from live import Live, engine_command, refused, serving
from toy_model import PAGE

from jaxserve.cache.page_hashes import hash_pages, namespace_hash


def test_a_stream_begins_with_all_and_goes_on_with_changes(toy_tokenizer: Path) -> None:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer))
    with serving(settings, kv_events=True) as live:
        live.wait_ready()
        first, second = list(range(40)), list(range(100, 140))
        live.complete(prompt=first, max_tokens=1)
        with httpx.stream("GET", live.url + "/kv_events", timeout=10) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            begin = next(events)
            assert begin["is_snapshot"] and begin["page_size"] == PAGE
            assert set(begin["stored"]) == set(pages(first))
            live.complete(prompt=second, max_tokens=1, cache_salt="s")
            change = next(events)
            assert set(change["stored"]) == set(pages(second, "/s")) and "is_snapshot" not in change


def test_without_the_option_it_is_not_there(live: Live) -> None:
    assert "--kv-events" in refused(live.http.get("/kv_events"), 404)["message"]


def test_where_there_are_keys_only_the_admin_key_opens_it(toy_tokenizer: Path) -> None:
    settings = ServerSettings(engine_command=engine_command(toy_tokenizer), api_keys=("k",), admin_api_key="a")
    with serving(settings, kv_events=True) as live:
        live.wait_ready()
        for key, status in (("k", 403), ("no", 401), ("a", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.stream("GET", live.url + "/kv_events", timeout=10, headers=headers) as answer:
                assert answer.status_code == status, key


def pages(ids: list[int], namespace: str = "") -> list[int]:
    return hash_pages(namespace_hash(namespace), np.array(ids, np.int32), PAGE)
