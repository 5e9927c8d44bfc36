"""Ray Serve on a local cluster with real small engines: `make ray-test`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from small_model import write_small_model  # noqa: E402

PORT = 18432
METRICS_PORT = 18433


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    from jaxserve.server.ray_config import ModelDeployment, RayConfig
    from jaxserve.server.ray_serve import deploy
    from ray import serve

    folder = write_small_model(tmp_path_factory.mktemp("model"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    engine = {"num_pages": 200, "page_size": 16, "max_num_rows": 1, "max_step_tokens": 16, "max_model_len": 512}
    models = [
        ModelDeployment(model=str(folder), name="small", replicas=2, engine=engine, num_cpus=0.1),
        ModelDeployment(model=str(folder), name="other", replicas=1, engine=engine, num_cpus=0.1),
    ]
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "JAX_PLATFORMS": "cpu"}
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, _metrics_export_port=METRICS_PORT,
        runtime_env={"env_vars": environment},
    )  # fmt: skip
    try:
        deploy(RayConfig(models=models, port=PORT), blocking=False)
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http:
            yield http
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(http: httpx.Client, ids: list[int], model: str = "small", max_tokens: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def replica_pids(name: str) -> set[int]:
    """Of the actors of one deployment; Ray titles its processes."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            title = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
        except OSError:
            continue
        if title.startswith(f"ray::ServeReplica:jaxserve:engine-{name}".encode()):
            found.add(int(folder.name))
    return found


def replicas_running() -> int:
    from ray import serve

    deployment = serve.status().applications["jaxserve"].deployments["engine-small"]
    return deployment.replica_states.get("RUNNING", 0)


def test_models_answer_whole_and_streamed(served: httpx.Client) -> None:
    assert [card["id"] for card in served.get("/v1/models").json()["data"]] == ["small", "other"]
    for model in ("small", "other"):
        answer = ask(served, list(range(10, 60)), model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    body = {"model": "small", "prompt": list(range(10, 60)), "max_tokens": 5, "ignore_eos": True, "stream": True}
    with served.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [block.removeprefix("data: ") for block in stream.read().decode().split("\n\n") if block]
    assert events[-1] == "[DONE]" and len(events) >= 5
    assert served.post("/v1/completions", json={"model": "none", "prompt": "a"}).status_code == 404
    wrong = served.post("/v1/completions", json={"model": "small", "prompt": "w1", "no_such": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "no_such"


def test_prefixes_keep_to_their_replica_and_the_metrics_show_it(served: httpx.Client) -> None:
    homes: dict[int, set[str]] = {}
    hits = []
    for turn in range(4):
        for group in range(6):
            prefix = list(range(100 + 300 * group, 100 + 300 * group + 256))
            answer = ask(served, [*prefix, 3000 + turn])
            homes.setdefault(group, set()).add(answer.headers["x-jaxserve-worker"])
            if turn:
                hits.append(cached(answer) / 256)
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len(set.union(*homes.values())) == 2  # both replicas are used
    assert sum(hits) / len(hits) > 0.9
    end = time.monotonic() + 30
    while time.monotonic() < end:
        text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics").text
        found = {}
        for line in text.splitlines():
            for field in ("prompt_tokens", "cached_prompt_tokens"):
                if line.startswith(f"ray_jaxserve_{field}{{") and 'model="small"' in line:
                    found.setdefault(field, []).append(float(line.rpartition(" ")[2]))
        if len(found.get("cached_prompt_tokens", ())) == 2 and sum(found["cached_prompt_tokens"]) >= 18 * 256:
            break
        time.sleep(1)
    assert sum(found["cached_prompt_tokens"]) / sum(found["prompt_tokens"]) > 0.5, found
    print("prefix affinity in Ray's metrics:", json.dumps(found))


def test_a_conversation_continues_at_the_replica_that_stores_it(served: httpx.Client) -> None:
    homes = set()
    for number in range(6):
        body = {"model": "small", "input": f"w{40 * number} w7 " * 40, "max_output_tokens": 4}
        answer = served.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        home = answer.headers["x-jaxserve-worker"]
        homes.add(home)
        for turn in range(3):
            body = {"model": "small", "input": f"w{turn}", "max_output_tokens": 4}
            answer = served.post("/v1/responses", json={**body, "previous_response_id": answer.json()["id"]})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-jaxserve-worker"] == home
        name = answer.json()["id"]
        assert served.get(f"/v1/responses/{name}").json()["id"] == name
        assert served.delete(f"/v1/responses/{name}").status_code == 200
        assert served.get(f"/v1/responses/{name}").status_code == 404
    assert len(homes) == 2
    lost = {"model": "small", "input": "w1", "previous_response_id": "resp_nowhere"}
    assert served.post("/v1/responses", json=lost).json()["error"]["code"] == "response_not_found"


def test_a_killed_replica_is_replaced_and_requests_go_on(served: httpx.Client) -> None:
    before = replica_pids("small")
    assert len(before) == 2
    stop = threading.Event()
    codes: list[int] = []

    def client(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            codes.append(ask(served, [500 + number] * 64 + [turn % 4000]).status_code)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in clients:
        thread.start()
    try:
        time.sleep(2)
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        end = time.monotonic() + 400
        while time.monotonic() < end:
            now = replica_pids("small")
            if len(now) == 2 and killed not in now and replicas_running() == 2:
                break
            time.sleep(1)
        time.sleep(2)
    finally:
        stop.set()
        for thread in clients:
            thread.join(120)
    assert len(replica_pids("small")) == 2 and replicas_running() == 2
    assert codes.count(200) == len(codes) > 10, {code: codes.count(code) for code in set(codes)}
    print(f"{len(codes)} requests while a replica was lost and replaced, all answered")
