"""The engine is killed while many clients wait: each is told at once, and service comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
from jaxserve.server.settings import ServerSettings
from live import engine_command, serving, wait_for

CLIENTS = 32
PATHS = {
    "/v1/completions": {"prompt": "Go on", "max_tokens": 480, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Go on"}], "ignore_eos": True},
    "/v1/responses": {"input": "Go on", "ignore_eos": True},
    "/generate": {"text": "Go on", "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}},
}


def test_every_client_is_answered_within_seconds(toy_tokenizer: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    options = ServerSettings(
        engine_command=engine_command(toy_tokenizer, step=0.02, starts=starts), restart_delay_s=0.1
    )
    with serving(options) as live:
        live.wait_ready()
        ended: dict[int, tuple[float, int, bytes]] = {}

        def ask(number: int) -> None:
            path = list(PATHS)[number % len(PATHS)]
            body = {**PATHS[path], "stream": number % 2 == 0}
            with httpx.stream("POST", live.url + path, json=body, timeout=60) as response:
                data = b"".join(response.iter_bytes())
            ended[number] = (time.monotonic(), response.status_code, data)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        wait_for(lambda: live.state.client.num_in_flight == CLIENTS)
        time.sleep(0.5)
        pid = int(starts.read_text().split()[-1])
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        for thread in threads:
            thread.join(60)
        assert len(ended) == CLIENTS
        for when, status, data in ended.values():
            assert when - killed < 5
            if status == 200:  # a stream that had begun
                assert b"engine_unavailable" in data and b"[DONE]" not in data
            else:
                assert status == 503 and b"the engine was lost" in data
        live.wait_ready()
        assert live.complete(prompt="a", max_tokens=2)["choices"]
        assert live.state.client.num_in_flight == 0
        assert live.metric("jaxserve_engine_restarts_total") == 1
