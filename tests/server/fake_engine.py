"""An engine process without a model: speaks jaxserve.messages over the socket and writes the toy model's text.

Words in a prompt make it misbehave: CRASH-NOW, FAIL-NOW, HANG-NOW, BREAK-THIS. WRITE[text]WRITE makes it write that
text. Grammars are left out of account.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import zmq
from toy_model import CONTEXT, PAGE, toy_words

from jaxserve.cache.page_hashes import hash_pages, namespace_hash
from jaxserve.detokenizer import Detokenizer, TextStream
from jaxserve.engine_link import check_address, open_socket, parse_config
from jaxserve.messages import (
    AbortRequest,
    AddEmbedding,
    AddRequest,
    CacheEvents,
    EngineFailed,
    EngineReady,
    EngineStats,
    Heartbeat,
    ModelInfo,
    OutputBatch,
    RequestOutput,
    Shutdown,
    TokenLogprob,
    decode_to_engine,
    encode,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer, load_tokenizer

HEARTBEAT_S = 0.2
EMBEDDING_SIZE = 16


@dataclasses.dataclass
class Writer:
    """One continuation."""

    message: AddRequest
    index: int
    tokens: Iterator[int]
    stream: TextStream
    num_cached: int
    num_output: int = 0
    pending_text: str = ""
    pending: list[int] = dataclasses.field(default_factory=list)
    was_sent: bool = False
    ends_at: float = math.inf


class FakeEngine:
    def __init__(self, socket: zmq.Socket, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        self.socket = socket
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer)
        self.options = options
        self.max_waiting = parse_config(options.config).max_waiting
        self.kv_events = parse_config(options.config).kv_events
        self.eos = tokenizer.eos_token_ids[0]
        self.running: list[Writer] = []
        self.seen: dict[str, list[list[int]]] = {}
        self.finished: dict[str, int] = {}
        self.num_steps = self.num_prompt = self.num_cached = self.num_output = 0
        self.next_beat = 0.0
        self.is_stopping = False

    def model(self) -> ModelInfo:
        return ModelInfo(
            name="toy",
            tokenizer_path=self.options.tokenizer,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=CONTEXT,
            eos_token_ids=[self.eos],
            max_num_rows=self.options.rows,
            dtype="float32",
            num_pages=1024,
            page_size=PAGE,
            embedding_size=EMBEDDING_SIZE,
        )

    def run(self) -> None:
        self.socket.send(encode(EngineReady(self.model())))
        while (self.running or not self.is_stopping) and os.getppid() == int(self.options.parent):
            self.socket.poll(0 if self.running else int(HEARTBEAT_S * 1000))
            self.receive()
            outputs = [output for writer in self.running[: self.options.rows] for output in self.step(writer)]
            if self.running:
                self.num_steps += 1
            self.running = [writer for writer in self.running if writer.num_output >= 0]
            if outputs:
                self.socket.send(encode(OutputBatch(outputs)))
            if time.monotonic() >= self.next_beat:
                self.beat()
            if self.running:
                time.sleep(self.options.step)

    def beat(self) -> None:
        self.next_beat = time.monotonic() + HEARTBEAT_S
        num_running = min(len(self.running), self.options.rows)
        stats = EngineStats(
            num_running=num_running,
            num_waiting=len(self.running) - num_running,
            num_pages=1024,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached,
            num_output_tokens=self.num_output,
            num_finished=dict(self.finished),
        )
        self.socket.send(encode(Heartbeat(stats)))

    def receive(self) -> None:
        while True:
            try:
                message = decode_to_engine(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, AddRequest):
                self.add(message)
            elif isinstance(message, AddEmbedding):
                self.embed(message)
            elif isinstance(message, AbortRequest):
                self.abort(message.request_id)
            elif isinstance(message, Shutdown):
                self.is_stopping = True

    def add(self, message: AddRequest) -> None:
        assert message.prompt and all(0 <= token < self.tokenizer.vocab_size for token in message.prompt)
        assert len(message.prompt) < CONTEXT
        text = self.tokenizer.decode(message.prompt)
        self.misbehave(text, message)
        num_waiting = max(0, len(self.running) - self.options.rows)
        if self.max_waiting and num_waiting >= self.max_waiting:
            self.refuse(message, "max_waiting: full", "max_waiting")
            return
        num_cached = self.look_up(message)
        self.num_prompt += len(message.prompt)
        self.num_cached += num_cached
        if self.kv_events:
            pages = hash_pages(namespace_hash(message.namespace), np.array(message.prompt, np.int32), PAGE)
            self.socket.send(encode(CacheEvents(pages, [])))
        params = message.params
        for index in range(params.n):
            key = f"{text}|{'greedy' if params.is_greedy else (params.seed, index)}"
            if "WRITE[" in text:
                key = text[text.rindex("WRITE[") : text.rindex("]WRITE")]
            stream = self.detokenizer.stream(
                message.prompt,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
            ends_at = time.monotonic() + (message.deadline_s or math.inf)
            tokens = self.tokens(key, params)
            self.running.append(Writer(message, index, tokens, stream, num_cached, ends_at=ends_at))

    def embed(self, message: AddEmbedding) -> None:
        """A bag of tokens: texts with the same tokens have the same vector."""
        vector = [0.0] * EMBEDDING_SIZE
        for token in message.prompt:
            vector[token % EMBEDDING_SIZE] += 1.0
        vector = vector[: message.dimensions or EMBEDDING_SIZE]
        length = sum(value * value for value in vector) ** 0.5 if message.normalize else 1.0
        vector = [value / (length or 1.0) for value in vector]
        output = RequestOutput(
            request_id=message.request_id, finish_reason="stop", embedding=vector,
            num_prompt_tokens=len(message.prompt),
        )  # fmt: skip
        self.socket.send(encode(OutputBatch([output])))

    def misbehave(self, text: str, message: AddRequest) -> None:
        if "CRASH-NOW" in text:
            os._exit(9)
        if "FAIL-NOW" in text:
            self.socket.send(encode(EngineFailed("RuntimeError: the device is gone")))
            sys.exit(1)
        if "HANG-NOW" in text:
            time.sleep(3600)
        if "BREAK-THIS" in text:
            self.refuse(message, "TypeError: an internal matter", None)

    def refuse(self, message: AddRequest, error: str, parameter: str | None) -> None:
        outputs = [
            RequestOutput(
                request_id=message.request_id, index=k, finish_reason="error", error=error, parameter=parameter
            )
            for k in range(message.params.n)
        ]
        self.socket.send(encode(OutputBatch(outputs)))

    def look_up(self, message: AddRequest) -> int:
        """Whole pages shared with an earlier prompt of the namespace; the last token is always computed."""
        seen = self.seen.setdefault(message.namespace, [])
        best = max((shared_length(old, message.prompt) for old in seen), default=0)
        seen.append(message.prompt)
        return min(best, len(message.prompt) - 1) // PAGE * PAGE

    def tokens(self, key: str, params: SamplingParams) -> Iterator[int]:
        if params.logit_bias and max(params.logit_bias.values()) >= 100:
            while True:
                yield max(params.logit_bias, key=params.logit_bias.__getitem__)
        if key.startswith("WRITE["):
            yield from self.tokenizer.encode(key.removeprefix("WRITE["), add_special_tokens=False)
            while True:
                yield self.eos
        for word in toy_words(key):
            if word is None:
                yield self.eos
            else:
                yield from self.tokenizer.encode(word, add_special_tokens=False)

    def abort(self, request_id: str) -> None:
        for writer in self.running:
            if writer.message.request_id == request_id:
                writer.num_output = -1
                self.finished["abort"] = self.finished.get("abort", 0) + 1
                output = RequestOutput(request_id=request_id, index=writer.index, finish_reason="abort")
                self.socket.send(encode(OutputBatch([output])))
        self.running = [writer for writer in self.running if writer.num_output >= 0]

    def step(self, writer: Writer) -> list[RequestOutput]:
        params, message = writer.message.params, writer.message
        if time.monotonic() >= writer.ends_at:
            writer.num_output = -1
            error = {"error": "deadline_s: not done in time", "parameter": "deadline_s"}
            return [RequestOutput(request_id=message.request_id, index=writer.index, finish_reason="abort", **error)]
        limit = CONTEXT - len(message.prompt)
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        token = next(writer.tokens)
        while token == self.eos and (params.ignore_eos or writer.num_output < params.min_tokens):
            token = next(writer.tokens)
        writer.num_output += 1
        self.num_output += 1
        writer.pending.append(token)
        reason, stop_reason = None, None
        if token == self.eos or (token in params.stop_token_ids and writer.num_output > params.min_tokens):
            reason, stop_reason = "stop", None if token == self.eos else token
            if params.include_stop_str_in_output:
                writer.pending_text += writer.stream.push([token])
        else:
            writer.pending_text += writer.stream.push([token])
            if writer.num_output >= limit:
                reason = "length"
        if writer.stream.stop is None and reason is not None:
            writer.pending_text += writer.stream.finish()
        if writer.stream.stop is not None:
            reason, stop_reason = "stop", writer.stream.stop
        interval = message.stream_interval
        is_due = interval and (not writer.was_sent or len(writer.pending) >= interval)
        if reason is None and not is_due:
            return []
        return [self.output(writer, reason, stop_reason)]

    def output(self, writer: Writer, reason: str | None, stop_reason: int | str | None) -> RequestOutput:
        params, message = writer.message.params, writer.message
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not writer.was_sent:
            first = max(1, params.prompt_logprobs_start)
            scores = [self.score(token, params.prompt_logprobs, params) for token in message.prompt[first:]]
            prompt_logprobs = [*[None] * (len(message.prompt) - len(scores)), *scores]
        output = RequestOutput(
            request_id=message.request_id,
            index=writer.index,
            text=writer.pending_text,
            token_ids=writer.pending,
            logprobs=None
            if params.logprobs is None
            else [self.score(t, params.logprobs, params) for t in writer.pending],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(message.prompt),
            num_cached_tokens=writer.num_cached,
            num_output_tokens=writer.num_output,
        )
        writer.pending, writer.pending_text, writer.was_sent = [], "", True
        if reason is not None:
            writer.num_output = -1
            self.finished[reason] = self.finished.get(reason, 0) + 1
        return output

    def score(self, token: int, num_top: int, params: SamplingParams) -> TokenLogprob:
        """The second best of its rivals, which are neighbours in the vocabulary: many are halves of characters."""
        first = (token * 7) % (self.tokenizer.vocab_size - 32)
        rivals = [t for t in range(first, first + 32) if t != token]
        top = [(t, -0.25 - place / 8) for place, t in enumerate([rivals[0], token, *rivals[1:]])]
        named = [(t, -3.0 - t) for t in params.logprob_token_ids]
        return TokenLogprob(token, -0.375, 2, top[:num_top], named)


def shared_length(left: list[int], right: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--step", type=float, default=0.001)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--starts", default="", help="a file that gets one line for each start")
    for name in ("--config", "--socket", "--parent"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    check_address(options.socket)
    assert int(options.parent) == os.getppid()
    json.loads(options.config)
    if options.starts:
        with open(options.starts, "a") as file:
            file.write(f"{os.getpid()}\n")
    with zmq.Context() as context, open_socket(context, options.socket, bind=False) as socket:
        time.sleep(options.load)
        if options.fail:
            socket.send(encode(EngineFailed(options.fail)))
            return 1
        FakeEngine(socket, load_tokenizer(options.tokenizer), options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
