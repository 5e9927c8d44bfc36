"""What a step's result says of one request: its token, the scores asked for, whether it ends. No jax."""

from __future__ import annotations

from jaxserve.messages import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from jaxserve.request import TokenEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.decision import SampleWork, StepResult
from jaxserve.scheduler.sequence import Sequence

_Scores = tuple[float | None, int | None, tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]


def take_token(sequence: Sequence, result: StepResult, i: int, token: int) -> TokenEvent:
    """The event of sample `i`, a token that becomes known to the sequence."""
    request = sequence.request
    sequence.append(token)
    if request.constraint is not None:
        request.constraint.advance(token)
    asked = request.params.logprobs
    if asked is None:
        return TokenEvent(request, token)
    return TokenEvent(request, token, 0, *_scores(result, i, asked, request.params))


def take_score(sequence: Sequence, work: SampleWork, result: StepResult, i: int) -> TokenEvent:
    """The event of sample `i`, the score of a token that was given."""
    request = sequence.request
    if work.position == sequence.num_prompt:
        sequence.num_unscored_next -= 1
    asked = request.params.prompt_logprobs
    if asked is None:
        return TokenEvent(request, work.forced_token, work.position)
    return TokenEvent(request, work.forced_token, work.position, *_scores(result, i, asked, request.params))


def take_forced(sequence: Sequence, token: int) -> TokenEvent:
    """The event of a token that is known before it is computed."""
    sequence.num_pending = 1
    sequence.append(token)
    return TokenEvent(sequence.request, token)


def token_stop(sequence: Sequence, token: int, *, is_last: bool = True) -> tuple[str | None, int | None]:
    """Whether this newest token ends the request, and the stop token that did (None: end of sequence).

    is_last: the request's grammar, if it has one, knows of no later token.
    """
    request = sequence.request
    if request.constraint is not None and is_last:
        if request.constraint.error is not None:
            return FINISH_ERROR, None
        if request.constraint.is_finished:
            return FINISH_STOP, None
    if token in sequence.stop_ids and sequence.num_known - sequence.num_prompt > request.params.min_tokens:
        is_eos = token in request.eos_token_ids and not request.params.ignore_eos
        return FINISH_STOP, None if is_eos else token
    if sequence.num_known >= request.max_total_tokens:
        return FINISH_LENGTH, None
    return None, None


def _scores(result: StepResult, i: int, asked: int, params: SamplingParams) -> _Scores:
    if result.logprobs is None:
        raise RuntimeError("log-probabilities were asked for and the runner returned none")
    top: tuple[tuple[int, float], ...] = ()
    if asked and result.top_ids is not None and result.top_logprobs is not None:
        top = tuple(zip(result.top_ids[i][:asked].tolist(), result.top_logprobs[i][:asked].tolist()))
    rank = int(result.ranks[i]) if result.ranks is not None else None
    named: tuple[tuple[int, float], ...] = ()
    if params.logprob_token_ids and result.named_logprobs is not None:
        named = tuple(zip(params.logprob_token_ids, result.named_logprobs[i].tolist()))
    return float(result.logprobs[i]), rank, top, named
