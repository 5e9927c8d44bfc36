"""Chat in a terminal and one-shot answers, from an engine in this process or from a server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

Messages = list[dict[str, Any]]

HELP = """/clear        forget the conversation
/system TEXT  set the system message (and forget the conversation)
/exit         leave, as does Ctrl-D; Ctrl-C stops an answer"""


class ChatPiece(NamedTuple):
    """Text as it comes; the counts are totals so far."""

    text: str
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


Backend = Callable[[Messages], Iterator[ChatPiece]]


@contextmanager
def local_backend(config: EngineConfig, params: SamplingParams) -> Iterator[Backend]:
    """Loads the model here. Raises what loading raises."""
    with _open_llm(config) as llm:

        def answer(messages: Messages) -> Iterator[ChatPiece]:
            for piece in llm.stream(llm.chat_tokens(messages), params):
                yield ChatPiece(piece.text, piece.num_output_tokens, piece.num_cached_tokens)

        yield answer


@contextmanager
def http_backend(url: str, *, api_key: str | None, options: dict[str, Any]) -> Iterator[Backend]:
    """Chat completions of the first model at `url`; options go into every request.

    Raises ValueError for a url that is none, ConnectionError if nobody answers or the answer is an error.
    """
    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        client = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(600.0, connect=10.0))
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"url: got {url!r}; allowed: http://HOST:PORT ({error})") from error
    with client, _connection_errors(base):
        response = client.get("/v1/models")
        _check(response)
        model = response.json()["data"][0]["id"]

        def answer(messages: Messages) -> Iterator[ChatPiece]:
            body = {"model": model, "messages": messages, "stream": True, **options}
            body["stream_options"] = {"include_usage": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                _check(response)
                yield from _read_events(response.iter_lines())

        yield answer


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise ConnectionError(f"{response.url}: status {response.status_code}: {response.text[:300]}")


@contextmanager
def _connection_errors(base: str) -> Iterator[None]:
    try:
        yield
    except httpx.UnsupportedProtocol as error:
        raise ValueError(f"url: got {base!r}; allowed: http://HOST:PORT or https://...") from error
    except httpx.HTTPError as error:
        raise ConnectionError(f"{base}: {error or type(error).__name__}") from error
    except (KeyError, IndexError, json.JSONDecodeError) as error:
        raise ConnectionError(f"{base}: not an answer of an OpenAI-compatible server") from error


def _read_events(lines: Iterator[str]) -> Iterator[ChatPiece]:
    num_tokens = 0
    for line in lines:
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        event = json.loads(payload)
        if event.get("error"):
            raise ConnectionError(f"the server reports: {event['error']}")
        cached = 0
        if usage := event.get("usage"):
            num_tokens = usage.get("completion_tokens", num_tokens)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text = ""
        if event.get("choices"):
            text = event["choices"][0].get("delta", {}).get("content") or ""
            num_tokens += bool(text)
        yield ChatPiece(text, num_tokens, cached)


def answer_once(config: EngineConfig, prompt: str, params: SamplingParams, *, is_raw: bool) -> Iterator[str]:
    """Pieces of the answer to one prompt; is_raw: continue the text itself, without the chat template."""
    with _open_llm(config) as llm:
        tokens = llm.encode(prompt) if is_raw else llm.chat_tokens([{"role": "user", "content": prompt}])
        for piece in llm.stream(tokens, params):
            yield piece.text


def _open_llm(config: EngineConfig) -> Any:
    # Imports jax, which chatting with a server does not need.
    from jaxserve.llm import LLM

    options = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "model"}
    return LLM(config.model, **options)


def run_chat(backend: Backend, *, system: str | None = None) -> None:
    """Read, answer, repeat, until the end of input or /exit. Prompts are shown only if a person is typing."""
    is_terminal = sys.stdin.isatty()
    messages = _begin(system)
    if is_terminal:
        print("Type a message, or /help.")
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if not text:
            continue
        command, _, rest = text.partition(" ")
        if command == "/exit":
            return
        if command == "/clear":
            messages = _begin(system)
        elif command == "/system":
            system = rest or None
            messages = _begin(system)
        elif command.startswith("/"):
            print(HELP)
        else:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _show_answer(backend(messages), is_terminal)})


def _begin(system: str | None) -> Messages:
    return [{"role": "system", "content": system}] if system else []


def _show_answer(pieces: Iterator[ChatPiece], is_terminal: bool) -> str:
    """Print an answer as it comes and return it. Ctrl-C ends it; what has come so far counts."""
    said: list[str] = []
    start = first = time.perf_counter()
    last = ChatPiece("")
    num_first = 0
    try:
        for piece in pieces:
            if not said:
                first, num_first = time.perf_counter(), piece.num_output_tokens
            said.append(piece.text)
            last = last._replace(
                num_output_tokens=piece.num_output_tokens,
                num_cached_tokens=max(piece.num_cached_tokens, last.num_cached_tokens),
            )
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]  # generators: ends the request, too
    print()
    if is_terminal:
        print(_describe(last, num_first, first - start, time.perf_counter() - first))
    return "".join(said)


def _describe(last: ChatPiece, num_first: int, to_first: float, rest: float) -> str:
    rate = f", {(last.num_output_tokens - num_first) / rest:.1f} tok/s" if rest > 0 else ""
    figures = f"{last.num_output_tokens} tokens{rate}, first after {to_first:.2f} s, {last.num_cached_tokens} cached"
    return f"\x1b[2m[{figures}]\x1b[0m"
