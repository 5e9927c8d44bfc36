"""From hidden states to the vector of a text: which states are pooled, and what is done with their sum. No jax."""

from __future__ import annotations

import numpy as np

from jaxserve.messages import FINISH_STOP, POOLINGS, AddEmbedding, AddRequest, RequestOutput
from jaxserve.sampling_params import InvalidParameter, SamplingParams

# A decoder computes an embedding as a request for one token, which nobody is told of.
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def check_embedding(message: AddEmbedding, *, size: int, poolings: tuple[str, ...]) -> None:
    """Raise InvalidParameter, naming the field, unless a model with these poolings and this size can answer."""
    if message.pooling and message.pooling not in poolings:
        raise InvalidParameter("pooling", message.pooling, f"{', '.join(poolings)} with this model")
    if not 0 <= message.dimensions <= size:
        raise InvalidParameter("dimensions", message.dimensions, f"1 to {size}, or 0 for all")


def as_request(message: AddEmbedding) -> AddRequest:
    """The request whose steps compute the embedding's hidden states."""
    return AddRequest(
        request_id=message.request_id,
        prompt=message.prompt,
        params=_ONE_TOKEN,
        namespace=message.namespace,
        priority=message.priority,
        stream_interval=0,
        deadline_s=message.deadline_s,
    )


class Pooler:
    """Gathers the pooled states of one text while its chunks are computed.

    pooling   one of POOLINGS. "mean" sums every token's state, so it needs all tokens computed: the scheduler takes
              none of them from the prefix cache, and a preempted text starts again.
    """

    def __init__(self, message: AddEmbedding, default_pooling: str) -> None:
        self.message = message
        self.pooling = message.pooling or default_pooling
        assert self.pooling in POOLINGS, self.pooling
        self._sum: np.ndarray | None = None
        self._num_tokens = 0

    def take(self, start: int, num_tokens: int, values: np.ndarray) -> None:
        """values [hidden]: of "last" the last token's state, of "mean" the sum over tokens start .. + num_tokens."""
        if start == 0 or self.pooling != "mean":
            self._sum, self._num_tokens = None, 0
        wide = values.astype(np.float64)
        self._sum = wide if self._sum is None else self._sum + wide
        self._num_tokens += num_tokens

    def output(self, num_cached_tokens: int) -> RequestOutput:
        """The answer. Raises RuntimeError when states are missing."""
        count = len(self.message.prompt) if self.pooling == "mean" else self._num_tokens
        if self._sum is None or self._num_tokens != count:
            raise RuntimeError(f"{self._num_tokens} of {count} tokens were pooled")
        vector = self._sum / count if self.pooling == "mean" else self._sum
        return embedding_output(self.message, vector, num_cached_tokens)


def embedding_output(message: AddEmbedding, vector: np.ndarray, num_cached_tokens: int = 0) -> RequestOutput:
    """The answer to a message. vector [hidden], of any float type."""
    return RequestOutput(
        request_id=message.request_id,
        finish_reason=FINISH_STOP,
        num_prompt_tokens=len(message.prompt),
        num_cached_tokens=num_cached_tokens,
        embedding=finish_vector(vector, normalize=message.normalize, dimensions=message.dimensions),
    )


def finish_vector(vector: np.ndarray, *, normalize: bool, dimensions: int) -> list[float]:
    """The first `dimensions` values (0: all), scaled to length one; a vector of zeros stays what it is."""
    wide = vector[: dimensions or None].astype(np.float64)
    if normalize:
        length = float(np.linalg.norm(wide))
        wide = wide / length if length > 0 else wide
    return wide.astype(np.float32).tolist()
