"""What a request must satisfy before the scheduler sees it, and how n continuations are made from it. No jax."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np

from jaxserve.embedding import check_embedding
from jaxserve.messages import AddEmbedding, AddRequest, ModelInfo, ProgramPart
from jaxserve.request import ALONE, Request
from jaxserve.sampling_params import InvalidParameter

_MASK64 = 2**64 - 1


def continuation_seed(seed: int, index: int) -> int:
    """Seed (0 .. 2**64 - 1) of continuation `index` of a request.

    Index 0 draws with the request's own seed, so n = 1 and the first of n agree. The others take output `index` of
    the generator SplitMix64 started at the seed (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014), a bijection of the seed for each index.
    """
    state = seed & _MASK64
    if index == 0:
        return state
    state = (state + index * 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """vocab_size of the model; max_model_len in tokens; max_cached_tokens: what all pages together hold;
    max_next_ids: how many tokens one step can always score after a prompt."""

    vocab_size: int
    max_model_len: int
    max_cached_tokens: int
    max_next_ids: int = 1

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of one request at most."""
        return min(self.max_model_len, self.max_cached_tokens)

    def check(self, message: AddRequest) -> None:
        """Raise InvalidParameter, naming the field, unless the request can be served."""
        if message.stream_interval < 0:
            raise InvalidParameter("stream_interval", message.stream_interval, "0 or more tokens")
        self._check_deadline(message.deadline_s)
        self._check_prompt(message.prompt)
        message.params.check_vocabulary(self.vocab_size)
        if message.part is not None:
            self._check_part(message, message.part)

    def _check_part(self, message: AddRequest, part: ProgramPart) -> None:
        if not math.isfinite(part.lease_s) or part.lease_s <= 0:
            raise InvalidParameter("lease_s", part.lease_s, "a finite number of seconds above 0")
        if not part.next_ids:
            return
        if len(part.next_ids) > self.max_next_ids:
            raise InvalidParameter("next_ids", f"{len(part.next_ids)} tokens", f"at most {self.max_next_ids}")
        if min(part.next_ids) < 0 or max(part.next_ids) >= self.vocab_size:
            raise InvalidParameter("next_ids", list(part.next_ids), f"token ids 0 to {self.vocab_size - 1}")
        if message.params.n != 1:
            raise InvalidParameter("n", message.params.n, "1 with next_ids")
        if message.params.prompt_logprobs is None:
            raise InvalidParameter("prompt_logprobs", None, "0 or more with next_ids")

    def check_embedding(self, message: AddEmbedding, model: ModelInfo) -> None:
        """Raise InvalidParameter, naming the field, unless a decoder can make the embedding."""
        check_embedding(message, size=model.embedding_size, poolings=("last", "mean"))
        self._check_deadline(message.deadline_s)
        self._check_prompt(message.prompt)

    def _check_deadline(self, deadline: float | None) -> None:
        if deadline is not None and not (math.isfinite(deadline) and deadline > 0):
            raise InvalidParameter("deadline_s", deadline, "a finite number of seconds above 0")

    def _check_prompt(self, prompt: list[int]) -> None:
        limit = self.max_total_tokens
        if not 1 <= len(prompt) < limit:
            if self.max_model_len <= self.max_cached_tokens:
                why = f"max_model_len is {limit}, and one token must follow"
            else:
                why = f"the cache has pages for {limit}, and one token must follow"
            raise InvalidParameter("prompt", f"{len(prompt)} tokens", f"1 to {limit - 1} tokens; {why}")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            place, bad = next((k, t) for k, t in enumerate(prompt) if not 0 <= t < self.vocab_size)
            raise InvalidParameter("prompt", f"{bad} at index {place}", f"token ids 0 to {self.vocab_size - 1}")


class RequestMaker:
    """Numbers requests and draws seeds for those that bring none (from `seed`, so that a run can be repeated)."""

    def __init__(self, limits: Limits, eos_token_ids: frozenset[int], seed: int) -> None:
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def make(self, message: AddRequest, arrival: float, *, pooling: str = "") -> list[Request]:
        """The n Requests of a checked message; those after the first name it as their parent. pooling: of an
        embedding."""
        params = message.params
        prompt = np.asarray(message.prompt, np.int32)
        prompt.setflags(write=False)
        limit = self._limits.max_total_tokens
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        part = message.part or ALONE
        if part.next_ids:
            limit = len(prompt)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        requests: list[Request] = []
        for index in range(params.n):
            request = Request(
                number=next(self._numbers),
                prompt=prompt,
                params=params,
                seed=continuation_seed(seed, index),
                max_total_tokens=limit,
                eos_token_ids=self._eos_token_ids,
                index=index,
                parent=requests[0] if requests else None,
                namespace=message.namespace,
                priority=message.priority,
                arrival=arrival,
                pooling=pooling,
                part=part,
                keep_as=message.request_id if part.keep and index == 0 else "",
            )
            requests.append(request)
        return requests
