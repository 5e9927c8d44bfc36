"""Programs on an LLM in this process, beside its scheduler. No jax.

Every request of a branch names the one before it as its base, whose pages the engine has kept; so a continuation
computes its own tokens only, and branches share the pages of what they forked from. Answers come in the engine's
thread, and what they start is scheduled with the next step: a program costs no round trip.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.lang.backends.base import (
    Backend,
    Generation,
    OnGeneration,
    OnPiece,
    OnSelection,
    Selection,
    Stream,
    Turn,
    finish_meta,
)
from jaxserve.lang.backends.scoring import Scorer
from jaxserve.lang.chat import ChatFormat
from jaxserve.lang.choices import ChoicesSamplingMethod, Scored, decide
from jaxserve.lang.context import Context, Part, common_prefix
from jaxserve.lang.options import GenOptions
from jaxserve.messages import FINISH_ABORT, AddRequest, ProgramPart, RequestOutput, TokenLogprob
from jaxserve.outputs import Gatherer, GenerationOutput, RequestFailed
from jaxserve.sampling_params import SamplingParams

_NOTHING_SAMPLED = (0,)  # one score that nobody reads: the engine computes the prompt and samples nothing
PREFIX_LEASE_S = 600.0


class Pin:
    """Kept pages of one request, used by one branch or several; released when the last of them lets go."""

    def __init__(self, request_id: str, release: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._release = release
        self._users = 1
        self._lock = threading.Lock()  # branches share and drop from several threads

    def share(self) -> Pin:
        with self._lock:
            self._users += 1
        return self

    def drop(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._release(self.request_id)


class LocalStream(Stream):
    """pin: the pages that its next request goes on from. request: the id of the generation that is under way."""

    __slots__ = ("_is_closed", "_lock", "pin", "prepared", "request")

    def __init__(self, program: str, pin: Pin | None) -> None:
        super().__init__(program)
        self.pin = pin
        self.request: str | None = None
        self.prepared: Context | None = None  # computed whole already
        self._is_closed = False
        self._lock = threading.Lock()  # answers move it in the engine's thread, programs close it in theirs

    @property
    def base(self) -> str:
        return "" if self.pin is None else self.pin.request_id

    def move(self, pin: Pin | None) -> None:
        """The branch now goes on from the pages of another request."""
        with self._lock:
            if self._is_closed:
                old = pin
            else:
                old, self.pin = self.pin, pin
        if old is not None:
            old.drop()

    def close(self) -> None:
        self.move(None)
        with self._lock:
            self._is_closed = True


class _Prefix:
    """A prefix kept for later programs."""

    def __init__(self, pin: Pin) -> None:
        self.pin = pin

    def __del__(self) -> None:
        self.pin.drop()


class LocalBackend(Backend):
    """llm is an LLM; as_backend(llm) gives the one backend of each."""

    def __init__(self, llm: Any) -> None:
        self._thread = llm.engine_thread
        self._tokenizer = llm.tokenizer
        self._ids = itertools.count()
        self._scorer = Scorer(min(16, llm.config.max_step_tokens), self._submit, self.text_of)
        self._chat = ChatFormat(lambda messages, generate: self._render(messages, generate))

    # Text and tokens

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)[0]

    def open_role(self, roles: tuple[str, ...]) -> str:
        return self._chat.open(roles)

    def close_role(self, roles: tuple[str, ...]) -> str:
        return self._chat.close(roles)

    def encode(self, parts: Sequence[Part], is_first: bool) -> list[int]:
        return self._tokenizer.encode_parts(parts, is_first=is_first)

    def text_of(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    # What programs ask for

    def open_stream(self, program: str) -> LocalStream:
        return LocalStream(program, None)

    def fork_stream(self, stream: Stream) -> LocalStream:
        assert isinstance(stream, LocalStream)
        return LocalStream(stream.program, None if stream.pin is None else stream.pin.share())

    def close_stream(self, stream: Stream) -> None:
        assert isinstance(stream, LocalStream)
        stream.close()
        if stream.request is not None:
            self._thread.abort(stream.request)  # the program has failed; nobody reads what it was making

    def generate(
        self,
        stream: Stream,
        context: Context,
        turn: Turn,
        options: GenOptions,
        on_piece: OnPiece | None,
        done: OnGeneration,
    ) -> None:
        assert isinstance(stream, LocalStream)
        prompt = context.token_ids(self.encode)

        def finish(output: GenerationOutput | BaseException, pin: Pin) -> None:
            stream.request = None
            if isinstance(output, BaseException):
                done(output)
                return
            stream.move(pin)
            try:
                generation = self._generation(context, output, options)
            except Exception as error:
                done(error)
            else:
                done(generation)

        params = options.sampling_params()
        interval = 0 if on_piece is None else 1
        stream.request = self._request(stream, prompt, params, finish, on_piece=on_piece, interval=interval).request_id

    def select(
        self,
        stream: Stream,
        context: Context,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        done: OnSelection,
    ) -> None:
        assert isinstance(stream, LocalStream)
        prompt = context.token_ids(self.encode)
        extended = [context.add_text(choice) for choice in choices]
        tokens = [each.token_ids(self.encode) for each in extended]
        start = min([common_prefix(prompt, each) for each in tokens])
        if start < 1:
            done(ValueError("select: got nothing before the choices; allowed: some text that they follow"))
            return

        def finish(
            scores: list[list[Scored]] | BaseException,
            alone: list[list[Scored]] | None,
            pins: list[Pin],
        ) -> None:
            result: Selection | BaseException
            if isinstance(scores, BaseException):
                result = scores
            else:
                try:
                    decision = decide(method, choices, scores, alone)
                    best = choices.index(decision.decision)
                except Exception as error:
                    result = error
                else:
                    result = Selection(decision, extended[best])
                    stream.move(pins[best].share())
            for pin in pins:
                pin.drop()
            done(result)

        self._scorer.score(stream, prompt[:start], [each[start:] for each in tokens], self._alone(method), finish)

    def _alone(self, method: ChoicesSamplingMethod) -> list[int] | None:
        """What stands before a choice that is scored alone: the begin token, if the model has one; None: not wanted."""
        return self._tokenizer.encode("") if method.requires_unconditional_logprobs else None

    def go_on_from(self, stream: Stream, other: Stream) -> None:
        assert isinstance(stream, LocalStream) and isinstance(other, LocalStream)
        if other.pin is not None:
            stream.move(other.pin.share())

    def prepare_fork(self, stream: Stream, context: Context, count: int) -> None:
        assert isinstance(stream, LocalStream)
        if stream.prepared is context or not context.runs or (count == 1 and not context.ends_in_text):
            return
        stream.prepared = context
        old, stream.pin = stream.pin, None
        # The pages it goes on from are needed until it has been computed.
        try:
            stream.pin = self._compute(stream, old, context.token_ids(self.encode))
        finally:
            if stream.pin is None and old is not None:
                old.drop()

    def cache_prefix(self, context: Context) -> object | None:
        if not context.runs:
            return None
        stream = LocalStream("", None)
        return _Prefix(self._compute(stream, None, context.token_ids(self.encode), lease_s=PREFIX_LEASE_S))

    def start_from(self, stream: Stream, prefix: object | None) -> None:
        assert isinstance(stream, LocalStream)
        if isinstance(prefix, _Prefix):
            stream.move(prefix.pin.share())

    def flush_cache(self) -> bool:
        self._thread.call(lambda engine: engine.flush_cache())
        return True

    # Requests

    def _compute(self, stream: LocalStream, base: Pin | None, prompt: list[int], lease_s: float = 60.0) -> Pin:
        """Compute a prompt and keep it; then drop its base. What goes wrong (a prompt too long) is told to those who
        go on from it."""
        params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0, prompt_logprobs_start=len(prompt))

        def finish(output: GenerationOutput | BaseException, pin: Pin) -> None:
            if base is not None:
                base.drop()

        return self._request(
            stream,
            prompt,
            params,
            finish,
            base="" if base is None else base.request_id,
            next_ids=_NOTHING_SAMPLED,
            lease_s=lease_s,
        )

    def _request(
        self,
        stream: LocalStream,
        prompt: list[int],
        params: SamplingParams,
        finish: Callable[[GenerationOutput | BaseException, Pin], None],
        *,
        on_piece: OnPiece | None = None,
        interval: int = 0,
        **part: Any,
    ) -> Pin:
        gatherer = Gatherer(None, prompt, params.n)

        def take(output: RequestOutput | BaseException, pin: Pin) -> None:
            nonlocal finish
            if isinstance(output, BaseException):
                finish, failed = _ignore, finish
                failed(output, pin)
                return
            try:
                if on_piece is not None and output.index == 0 and output.text:
                    on_piece(output.text)
                if not gatherer.take(output):
                    return
                if output.finish_reason == FINISH_ABORT:
                    raise RequestFailed(output.error or "the request was aborted")
                result: GenerationOutput | BaseException = gatherer.result
            except Exception as error:
                result = error
            finish, last = _ignore, finish
            last(result, pin)

        return self._submit(stream, prompt, params, take, interval=interval, **part)

    def _submit(
        self,
        stream: LocalStream,
        prompt: list[int],
        params: SamplingParams,
        take: Callable[[RequestOutput | BaseException, Pin], None],
        *,
        interval: int = 0,
        base: str | None = None,
        **part: Any,
    ) -> Pin:
        """Send one request; its pages are kept until the pin is dropped."""
        request_id = f"program-{id(self):x}-{next(self._ids)}"
        place = ProgramPart(program=stream.program, base=stream.base if base is None else base, keep=True, **part)
        message = AddRequest(request_id=request_id, prompt=prompt, params=params, stream_interval=interval, part=place)
        pin = Pin(request_id, self._thread.release_kept)
        self._thread.submit(message, lambda output: take(output, pin))
        return pin

    def _generation(self, context: Context, output: GenerationOutput, options: GenOptions) -> Generation:
        first = output.outputs[0]
        kept = self._tokens_of(first.text, first.token_ids)
        text = b"".join(map(self._tokenizer.token_bytes, kept)).decode("utf-8", errors="replace")
        after = context.add_tokens(text, kept).add_text(first.text[len(text) :])
        return Generation(
            [each.text for each in output.outputs],
            after,
            [self._meta(output, index, options) for index in range(len(output.outputs))],
        )

    def _tokens_of(self, text: str, token_ids: list[int]) -> list[int]:
        """The leading tokens that spell the beginning of `text`, in whole characters: what a stop string or an end
        token cut off is left out."""
        data = text.encode("utf-8", errors="replace")
        position = whole = count = 0
        for index, token in enumerate(token_ids):
            piece = self._tokenizer.token_bytes(token)
            if token in self._tokenizer.special_ids or data[position : position + len(piece)] != piece:
                break
            position += len(piece)
            if position == len(data) or (data[position] & 0xC0) != 0x80:
                whole, count = position, index + 1
        return token_ids[:count] if whole else []

    def _meta(self, output: GenerationOutput, index: int, options: GenOptions) -> dict[str, Any]:
        completion = output.outputs[index]
        meta: dict[str, Any] = {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "finish_reason": finish_meta(completion.finish_reason, completion.stop_reason, len(completion.token_ids)),
        }
        if completion.logprobs is not None:
            with_text = bool(options.return_text_in_logprobs)
            meta["output_token_logprobs"] = [self._scored(score, with_text) for score in completion.logprobs]
            meta["output_top_logprobs"] = [self._top(score, with_text) for score in completion.logprobs]
        if output.prompt_logprobs is not None:
            start = max(options.logprob_start_len or 0, 0)
            scores = output.prompt_logprobs[start:]
            ids = output.prompt_token_ids[start:]
            with_text = bool(options.return_text_in_logprobs)
            meta["input_token_logprobs"] = [
                (None, token, self.text_of(token) if with_text else None) if score is None
                else self._scored(score, with_text)
                for token, score in zip(ids, scores, strict=True)
            ]  # fmt: skip
        return meta

    def _scored(self, score: TokenLogprob, with_text: bool) -> Scored:
        return score.logprob, score.token_id, self.text_of(score.token_id) if with_text else None

    def _top(self, score: TokenLogprob, with_text: bool) -> list[Scored]:
        return [(logprob, token, self.text_of(token) if with_text else None) for token, logprob in score.top]


def _ignore(output: object, pin: Pin) -> None:
    """An answer after the last one: what is still in flight of a failed request."""
