"""jaxserve.LLM: a model in this process, for notebooks and scripts.

    from jaxserve import LLM, SamplingParams
    llm = LLM()                                      # the default model; LLM("path/or/name") for another
    llm.generate("The tallest mountain in Wales is")[0].text
    for piece in llm.stream("Once upon a time"):
        print(piece, end="")
    await llm.async_generate("Many of these at once share one batch")

The engine runs in a thread of its own. All methods may be called from several threads and tasks at once; what they
ask for is computed together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from jaxserve.config import DEFAULT_MODEL, EngineConfig
from jaxserve.encoder_engine import EncoderEngine
from jaxserve.engine import Engine, EngineCrash
from jaxserve.engine_process import build_engine
from jaxserve.engine_thread import EngineThread
from jaxserve.messages import AddEmbedding, AddRequest, EngineStats, RequestOutput
from jaxserve.outputs import Gatherer, GenerationOutput, Piece, RequestRefused, raise_for_error
from jaxserve.progress import GenerationProgress, LoadingProgress
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from jaxserve.trace import StepTrace

DEFAULT_PARAMS = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=256)

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Conversation = Sequence[dict[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None

_SIGNAL_POLL_S = 0.2
_PROGRESS_INTERVAL = 16  # tokens between two outputs of a request whose progress is shown


class LLM:
    """A model, its tokenizer and an engine.

    model           name known to the resolver, Hugging Face id, folder or GGUF file; None: the default model
    default_params  SamplingParams of calls that bring none; None: DEFAULT_PARAMS, with what the model's files say of
                    temperature and the like (generation_config.json)
    progress        show bars for loading, and for generations that take long
    options         fields of EngineConfig, for instance dtype="float32", max_model_len=4096, deterministic=True

    Raises ValueError naming the option for a bad one, and what the loader raises for a bad checkpoint. Use close()
    or a with block to free the memory early.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        default_params: SamplingParams | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        unknown = options.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            allowed = ", ".join(sorted(EngineConfig.__dataclass_fields__.keys() - {"model"}))
            raise ValueError(f"{min(unknown)}: not an option of LLM; allowed: {allowed}")
        config = EngineConfig(model=model or DEFAULT_MODEL, **options)
        with LoadingProgress(is_shown=progress) as bar:
            engine = build_engine(config, bar)
        self._start(engine, default_params, progress)

    @classmethod
    def from_engine(
        cls,
        engine: Engine | EncoderEngine,
        *,
        default_params: SamplingParams | None = None,
        progress: bool = False,
    ) -> LLM:
        """An LLM around an engine that exists already, which it owns from here on."""
        llm = cls.__new__(cls)
        llm._start(engine, default_params, progress)
        return llm

    def _start(self, engine: Engine | EncoderEngine, default_params: SamplingParams | None, progress: bool) -> None:
        self.config = engine.config
        self.model = engine.model
        self.tokenizer = cast(Tokenizer, engine.tokenizer)  # an Engine asks less of it than LLM
        self.default_params = default_params or msgspec.structs.replace(DEFAULT_PARAMS, **engine.model.defaults)
        self._progress = progress
        self._trace = engine.trace
        self._ids = itertools.count()
        self._thread = EngineThread(engine)
        # Also runs at the end of the interpreter, before the device's own threads are torn down.
        self._finalizer = weakref.finalize(self, self._thread.close)

    # Whole generations

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[GenerationOutput]:
        """Continue one prompt or several (text, or lists of token ids); one result per prompt, in their order.

        params is one for all, or a list with one for each prompt. progress shows a bar if it takes long; use_tqdm
        is another name for it. Raises RequestRefused (a ValueError) naming the parameter if a prompt or an option
        cannot be served, after aborting the rest; RequestFailed or EngineCrash (RuntimeErrors) if the engine
        fails. Ctrl-C aborts what is in flight; the LLM can be used again.
        """
        jobs = self._jobs(_as_list(prompts), params)
        shown = next(flag for flag in (progress, use_tqdm, self._progress) if flag is not None)
        gatherers = [Gatherer(prompt, ids, params.n) for prompt, ids, params in jobs]
        answers: queue.SimpleQueue[RequestOutput | EngineCrash] = queue.SimpleQueue()
        numbers: dict[str, int] = {}
        with GenerationProgress(len(jobs), is_shown=shown) as bar, self._aborting(numbers):
            for number, (_, ids, job_params) in enumerate(jobs):
                message = self._message(ids, job_params, interval=_PROGRESS_INTERVAL if shown else 0)
                numbers[message.request_id] = number
                self._thread.submit(message, answers.put)
            while numbers:
                output = _next(answers)
                number = numbers[output.request_id]
                try:
                    is_done = gatherers[number].take(output)
                except RequestRefused as refusal:
                    if len(jobs) > 1:
                        refusal.add_note(f"in prompt {number} of {len(jobs)}")
                    raise
                bar.advance(len(output.token_ids), is_done=is_done)
                if is_done:
                    del numbers[output.request_id]
        return [gatherer.result for gatherer in gatherers]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        **template: Any,
    ) -> list[GenerationOutput]:
        """Answer one conversation or several: lists of {"role": ..., "content": ...}. See generate().

        template: options of chat_tokens().
        """
        conversations = [messages] if not messages or isinstance(messages[0], dict) else list(messages)
        prompts = [self.chat_tokens(conversation, **template) for conversation in conversations]
        return self.generate(prompts, params, progress=progress, use_tqdm=use_tqdm)

    async def async_generate(self, prompt: Prompt, params: SamplingParams | None = None) -> GenerationOutput:
        """Continue one prompt; await many at once to share the batch. Cancelling the task aborts the request."""
        ((text, ids, params),) = self._jobs([prompt], params)
        gatherer = Gatherer(text, ids, params.n)
        async with contextlib.aclosing(self._async_outputs(ids, params, interval=0)) as outputs:
            async for output in outputs:
                gatherer.take(output)
        return gatherer.result

    # Streams

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, interval: int = 1) -> Iterator[Piece]:
        """Pieces of the continuation as they come, every `interval` tokens. Leaving the loop aborts the request.

        With n > 1 the pieces of all continuations come mixed; their `index` tells them apart.
        """
        ((_, ids, params),) = self._jobs([prompt], params)
        return self._stream(ids, params, interval)

    def _stream(self, ids: list[int], params: SamplingParams, interval: int) -> Iterator[Piece]:
        answers: queue.SimpleQueue[RequestOutput | EngineCrash] = queue.SimpleQueue()
        message = self._message(ids, params, interval=interval)
        unfinished = {message.request_id: params.n}
        with self._aborting(unfinished):
            self._thread.submit(message, answers.put)
            while unfinished:
                output = _next(answers)
                _count_down(unfinished, output)
                yield Piece.of(output)

    async def async_stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, interval: int = 1
    ) -> AsyncIterator[Piece]:
        """stream() for asyncio."""
        ((_, ids, params),) = self._jobs([prompt], params)
        async with contextlib.aclosing(self._async_outputs(ids, params, interval=interval)) as outputs:
            async for output in outputs:
                yield Piece.of(output)

    async def _async_outputs(
        self, ids: list[int], params: SamplingParams, *, interval: int
    ) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[RequestOutput | EngineCrash] = asyncio.Queue()
        message = self._message(ids, params, interval=interval)
        unfinished = {message.request_id: params.n}
        with self._aborting(unfinished):
            self._thread.submit(message, lambda output: loop.call_soon_threadsafe(answers.put_nowait, output))
            while unfinished:
                output = await answers.get()
                if isinstance(output, EngineCrash):
                    raise output
                _count_down(unfinished, output)
                yield output

    # Embeddings

    def embed(
        self,
        texts: Prompts,
        *,
        pooling: str = "",
        normalize: bool = True,
        dimensions: int = 0,
    ) -> np.ndarray:
        """Vectors of one text or several (text, or lists of token ids): float32 [texts, dimensions].

        pooling: "last" token, "mean" of all tokens, "cls" (encoders); "": what the model was made for. dimensions: the
        first so many values, 0 for all. Raises what generate() raises.
        """
        answers: queue.SimpleQueue[RequestOutput | EngineCrash] = queue.SimpleQueue()
        numbers: dict[str, int] = {}
        prompts = _as_list(texts)
        vectors: list[list[float]] = [[]] * len(prompts)
        with self._aborting(numbers):
            for number, prompt in enumerate(prompts):
                ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt, number)
                message = AddEmbedding(
                    request_id=f"llm-{next(self._ids)}", prompt=ids, pooling=pooling, normalize=normalize,
                    dimensions=dimensions,
                )  # fmt: skip
                numbers[message.request_id] = number
                self._thread.submit(message, answers.put)
            while numbers:
                output = _next(answers)
                number = numbers.pop(output.request_id)
                try:
                    raise_for_error(output)
                except RequestRefused as refusal:
                    if len(prompts) > 1:
                        refusal.add_note(f"in text {number} of {len(prompts)}")
                    raise
                if output.embedding is None:
                    raise EngineCrash(f"text {number} was ended ({output.finish_reason}) without an embedding")
                vectors[number] = output.embedding
        return np.asarray(vectors, np.float32)

    # Tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, as generate() makes them."""
        return list(self.tokenizer.encode(text))

    def chat_tokens(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The prompt of a conversation, by the model's chat template; for generate() and stream().

        continue_final_message: the answer goes on where the last message ends (no new turn is opened).
        """
        return list(
            self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
            )
        )

    # The engine

    def stats(self) -> EngineStats:
        """Gauges now and counters since the start."""
        return self._thread.call(lambda engine: engine.stats())

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        self._thread.call(lambda engine: engine.flush_cache())

    @property
    def engine_thread(self) -> EngineThread:
        """The engine itself, for front ends that send their own messages (jaxserve.lang)."""
        return self._thread

    @property
    def trace(self) -> StepTrace:
        """Times of the last steps; jaxserve.trace.summarize() makes figures of them."""
        return self._trace

    def close(self) -> None:
        """Abort what runs and release the device. Twice does no harm."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self.model
        what = f"LLM({model.name!r}, {model.dtype}, context {model.max_model_len}"
        try:
            stats = self.stats()
        except EngineCrash as crash:
            return f"{what}; {crash})"
        if not model.num_pages:
            return f"{what}, embeddings of {model.embedding_size} values; {stats.num_waiting} waiting)"
        cached = stats.num_pages_cached * model.page_size
        return (
            f"{what}, cache of {stats.num_pages} pages of {model.page_size} tokens ({cached} tokens kept); "
            f"{stats.num_running} running, {stats.num_waiting} waiting)"
        )

    def _jobs(self, prompts: list[Prompt], params: Params) -> list[tuple[str | None, list[int], SamplingParams]]:
        """(text, token ids, params) of each prompt."""
        if params is None:
            params = self.default_params
        if isinstance(params, SamplingParams):
            each: Iterable[SamplingParams] = itertools.repeat(params, len(prompts))
        elif len(params) == len(prompts):
            each = params
        else:
            raise ValueError(f"params: got {len(params)}; allowed: one, or one for each of {len(prompts)} prompts")
        jobs = []
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            if not isinstance(own, SamplingParams):
                raise TypeError(f"params[{number}]: got {type(own).__name__}; allowed: SamplingParams")
            if isinstance(prompt, str):
                jobs.append((prompt, self.encode(prompt), own))
            else:
                jobs.append((None, _token_ids(prompt, number), own))
        return jobs

    def _message(self, ids: list[int], params: SamplingParams, *, interval: int) -> AddRequest:
        request_id = f"llm-{next(self._ids)}"
        return AddRequest(request_id=request_id, prompt=ids, params=params, stream_interval=interval)

    @contextlib.contextmanager
    def _aborting(self, unfinished: dict[str, Any]) -> Iterator[None]:
        """Abort the requests still in `unfinished` when the block ends, by an exception or otherwise."""
        try:
            yield
        finally:
            for request_id in unfinished:
                self._thread.abort(request_id)


def _next(answers: queue.SimpleQueue[RequestOutput | EngineCrash]) -> RequestOutput:
    """The next answer. Wakes up now and then: Python handles Ctrl-C only between two instructions of this thread,
    and the signal may have interrupted another one."""
    while True:
        try:
            answer = answers.get(timeout=_SIGNAL_POLL_S)
        except queue.Empty:
            continue
        if isinstance(answer, EngineCrash):
            raise answer
        return answer


def _count_down(unfinished: dict[str, int], output: RequestOutput) -> None:
    """Forget a request with the last output of its last continuation; nothing is left to abort then."""
    if output.finish_reason is not None:
        unfinished[output.request_id] -= 1
        if not unfinished[output.request_id]:
            del unfinished[output.request_id]


def _as_list(prompts: Prompts) -> list[Prompt]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and not isinstance(prompts[0], str) and not _is_sequence(prompts[0]):
        return [prompts]  # the token ids of one prompt
    return prompts


def _is_sequence(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _token_ids(prompt: object, number: int) -> list[int]:
    """Plain ints from a sequence of ints, numpy ones included. Raises TypeError naming the prompt."""
    ids = []
    for place, token in enumerate(prompt if _is_sequence(prompt) else [prompt]):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"prompts[{number}][{place}]: got {token!r}; allowed: text, or a list of token ids")
        ids.append(token.__index__())
    return ids
