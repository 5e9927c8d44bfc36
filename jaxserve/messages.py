"""Typed messages between a front end (HTTP server, LLM) and the engine. msgspec msgpack, never pickle. No jax.

Front end -> engine: AddRequest, AddEmbedding, AbortRequest, FlushCache, ReleaseKept, Shutdown.
Engine -> front end: EngineReady (once, when warm), OutputBatch (one per step), Heartbeat, EngineFailed,
CacheEvents (config.kv_events).
"""

from __future__ import annotations

import msgspec

from jaxserve.sampling_params import SamplingParams

FINISH_STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
FINISH_LENGTH = "length"  # max_tokens or the context limit
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


class ProgramPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request as a part of a program. All but next_ids are hints, on which no answer depends.

    program     requests of a program that began earlier run first
    base        id of a request whose kept pages may hold the beginning of this prompt; it is waited for if it runs
    keep        the pages of continuation 0 stay when it has ended, under the request's id, until ReleaseKept, until
                nobody has used them for lease_s seconds, or until requests need their room
    next_ids    nothing is sampled: the answer is next_logprobs, how likely each of these tokens is after the prompt;
                with prompt_logprobs, and a prompt_logprobs_start that may be the prompt's length (none of its own)
    """

    program: str = ""
    base: str = ""
    keep: bool = False
    lease_s: float = 60.0
    next_ids: tuple[int, ...] = ()


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One prompt. request_id is made by the front end and unique to it; a second one in flight is refused.

    prompt       token ids, at least one, each inside the vocabulary, fewer than the context
    namespace    requests share cached prefixes only inside one namespace (cache salt, LoRA, image hashes)
    priority     lower runs first under the policy "priority"; equal: order of arrival
    stream_interval  tokens between two outputs of a running request (the first and the last come at once);
                 0: only one output at the end
    deadline_s   seconds from arrival after which the request is ended with FINISH_ABORT; None: never
    part         what it has to do with other requests of one program; None: nothing
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    namespace: str = ""
    priority: int = 0
    stream_interval: int = 1
    deadline_s: float | None = None
    part: ProgramPart | None = None


POOLINGS = ("last", "mean", "cls")


class AddEmbedding(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One text to turn into a vector. Answered by one RequestOutput with `embedding` and FINISH_STOP, or FINISH_ERROR.

    prompt       token ids as the model's tokenizer makes them, special tokens included
    pooling      which hidden states behind the final norm make the vector: "last" token, "mean" of all, "cls" (the
                 first; encoders only); "": what the model was trained with (ModelInfo.pooling)
    normalize    scale the vector to length one
    dimensions   keep the first so many values (before normalising); 0: all (ModelInfo.embedding_size)
    namespace, priority, deadline_s   as in AddRequest
    """

    request_id: str
    prompt: list[int]
    pooling: str = ""
    normalize: bool = True
    dimensions: int = 0
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached prefix that no running request uses."""


class ReleaseKept(msgspec.Struct, frozen=True, tag=True):
    """Pages kept under these request ids are not needed any more. Ids under which nothing is kept are no mistake."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs (at most drain_s seconds), then end."""

    drain_s: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its log-probability, its rank (1 = best), the best alternatives, best first, and those that
    logprob_token_ids named, in that order."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    named: list[tuple[int, float]] = []


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new for one continuation (`index` of n) since its last output.

    text         characters that are final: never the start of a possible stop string, never half a character
    token_ids    tokens behind this output; all sampled tokens appear exactly once, in order. A token that ended
                 the text (eos, stop token) is included, a token sampled after the stop never is
    logprobs     one per token of token_ids, if asked for
    prompt_logprobs   once, with the first output: one per prompt token, None for the first token and for those
                      before prompt_logprobs_start
    next_logprobs     once: one per token of ProgramPart.next_ids
    finish_reason     None while it runs; stop_reason: the stop string or stop token id, None for eos
    num_prompt_tokens, num_cached_tokens, num_output_tokens   totals so far
    queue_seconds  with the first output: from arrival until it was given a row
    error        with FINISH_ERROR: what went wrong, in the client's terms
    embedding    the answer to AddEmbedding
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    next_logprobs: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None
    parameter: str | None = None
    embedding: list[float] | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges as they are now, and counters since the start. Prometheus names stand in jaxserve/metrics.py."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_held: int = 0  # by running requests
    num_pages_cached: int = 0  # in the tree and held by nobody
    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompt tokens of admitted requests
    num_cached_tokens: int = 0  # of those, found in the cache; counted once per request
    num_computed_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: dict[str, int] = {}  # by finish reason
    num_compiles_after_warmup: int = 0
    num_forced_tokens: int = 0  # of the output tokens, those that a grammar left no choice of
    num_jumped_tokens: int = 0  # of those, tokens computed without a step of their own
    num_grammars_cached: int = 0  # compiled grammars that are kept
    step_seconds: float = 0.0  # sum over steps of the time between dispatch and collect
    host_seconds: float = 0.0  # sum of host time between two dispatches not spent waiting for the device
    num_reads_without_queue: int = 0  # collects for which no later step was already dispatched


class OutputBatch(msgspec.Struct, frozen=True, tag=True):
    outputs: list[RequestOutput]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent at least once a second, also while idle, by the thread that runs the loop."""

    stats: EngineStats


class CacheEvents(msgspec.Struct, frozen=True, tag=True):
    """Cached prefixes that came and went since the last one, as hashes (cache/page_hashes.py); config.kv_events."""

    stored: list[int]
    evicted: list[int]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end must know to check requests before sending them.

    task             "generate": AddRequest and AddEmbedding are answered; "embed": AddEmbedding alone
    pooling          one of POOLINGS: what AddEmbedding.pooling "" means
    embedding_size   values of a whole embedding
    defaults         fields of SamplingParams for requests that do not set them (generation_config.json)
    """

    name: str
    tokenizer_path: str  # what jaxserve.tokenizer.load_tokenizer takes
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    max_num_rows: int
    dtype: str
    num_pages: int
    page_size: int
    task: str = "generate"
    pooling: str = "last"
    embedding_size: int = 0
    defaults: dict[str, float] = {}


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    model: ModelInfo


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; everything in flight is lost. The front end answers it and restarts the engine."""

    reason: str


def num_outputs(message: AddRequest | AddEmbedding) -> int:
    """Outputs with a finish_reason that a message is answered with: one for each of n continuations."""
    return message.params.n if isinstance(message, AddRequest) else 1


ToEngine = AddRequest | AddEmbedding | AbortRequest | FlushCache | ReleaseKept | Shutdown
FromEngine = EngineReady | OutputBatch | Heartbeat | EngineFailed | CacheEvents

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
