"""What SGLang's frontend asks of a server, over plain HTTP: python examples/sglang_client.py [URL]

The same calls that `sglang.RuntimeEndpoint` makes for gen(), select() and streams. The package itself imports torch
(since 0.4.4), which nothing here needs; where it is installed, its programs run against this server as they are:

    import sglang
    sglang.set_default_backend(sglang.RuntimeEndpoint("http://127.0.0.1:8000"))
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx


class Endpoint:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self.model = self._get("/get_model_info")["model_path"]

    def _get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def _generate(self, **fields: Any) -> Any:
        answer = self._http.post("/generate", json=fields)
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        return answer.json()

    def gen(self, text: str, **params: Any) -> str:
        return self._generate(text=text, sampling_params=params)["text"]

    def stream(self, text: str, **params: Any) -> Iterator[str]:
        """Pieces: each event holds all of the text so far."""
        seen = 0
        body = {"text": text, "sampling_params": params, "stream": True}
        with self._http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    whole = json.loads(line.removeprefix("data: "))["text"]
                    yield whole[seen:]
                    seen = len(whole)

    def select(self, text: str, choices: list[str]) -> str:
        """The choice with the best mean log-probability of its tokens."""
        silent = {"max_new_tokens": 0, "temperature": 0}
        prompt = self._generate(text=text, sampling_params=silent)["meta_info"]["prompt_tokens"]
        answers = self._generate(
            text=[text + choice for choice in choices],
            sampling_params=silent,
            return_logprob=True,
            return_text_in_logprobs=True,
            logprob_start_len=max(prompt - 2, 0),
        )
        means = []
        for answer in answers:
            values = [value for value, _, _ in answer["meta_info"]["input_token_logprobs"] if value is not None]
            means.append(sum(values) / len(values))
        return choices[means.index(max(means))]

    def flush_cache(self) -> None:
        self._http.post("/flush_cache").raise_for_status()


def main(url: str) -> None:
    endpoint = Endpoint(url)
    print("model:   ", endpoint.model)
    print("gen:     ", endpoint.gen("The capital of France is", max_new_tokens=12, temperature=0))
    print(
        "regex:   ", endpoint.gen("The year of the moon landing is ", max_new_tokens=8, temperature=0, regex="[0-9]{4}")
    )
    print("streamed: ", end="")
    for piece in endpoint.stream("Once upon a time", max_new_tokens=16, temperature=0):
        print(piece, end="", flush=True)
    print("\nselect:  ", endpoint.select("The capital of France is", [" Paris", " London", " Madrid"]))
    endpoint.flush_cache()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
