"""A step's samples -> one flat int32 array (and a token mask), and back into SampleInputs inside the program.

Options of a request do not change while it runs. They are written once into a column of a host table, by the
request's place in the device tables; a step copies the columns it needs.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.sampling import AFTER_ANY, AFTER_NONE, SampleInputs
from jaxserve.sampling_params import MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS, SamplingParams
from jaxserve.scheduler.decision import RowReset, SampleWork, StepConstraints

# Words of one sample, in the order of the packed array [len(_FIELDS), S]. Floats lie there as their bits.
_INTS = ("row", "count_row", "bias_row", "position", "seed_high", "seed_low", "forced", "top_k", "is_greedy")
_FLOATS = ("inverse_temperature", "top_p", "log_min_p", "presence", "frequency", "repetition")
_FIELDS = (*_INTS, *_FLOATS)
_AT = {name: index for index, name in enumerate(_FIELDS)}
_PER_STEP = ("row", "position", "seed_high", "seed_low", "forced")
_ALL_ONES = np.int32(-1)


@dataclasses.dataclass(frozen=True)
class StagedSamples:
    """One step's samples, and what its rows need beside the argmax.

    packed          [len(_FIELDS) * bucket] int32
    is_random       some row draws
    mask            [bucket * mask_words] int32 when some row changes its logits, else None
    forbidden       [bucket * MAX_BAD_WORDS * 2] int32 with the mask: see sampling.adjust_logits
    counts_tokens   some row has penalties
    logprob_ids     [bucket * MAX_LOGPROB_TOKEN_IDS] int32 when some row reports log-probabilities, else None
    """

    bucket: int
    packed: np.ndarray
    is_random: bool
    mask: np.ndarray | None
    forbidden: np.ndarray | None
    counts_tokens: bool
    logprob_ids: np.ndarray | None


def packed_size(num_samples: int) -> int:
    return len(_FIELDS) * num_samples


def unpack(packed: jax.Array, num_samples: int) -> SampleInputs:
    """Inside a program: packed [len(_FIELDS) * num_samples] int32 -> SampleInputs."""
    words = packed.reshape(len(_FIELDS), num_samples)
    found = {name: words[_AT[name]] for name in _INTS}
    found |= {name: lax.bitcast_convert_type(words[_AT[name]], jnp.float32) for name in _FLOATS}
    seed = jnp.stack([found.pop("seed_high"), found.pop("seed_low")], axis=-1)
    return SampleInputs(seed=lax.bitcast_convert_type(seed, jnp.uint32), **found)


@dataclasses.dataclass(slots=True)
class _Owner:
    """The request whose options a column holds. Masks are packed, [mask_words] int32."""

    request_id: int
    params: SamplingParams
    allowed: np.ndarray | None = None
    allowed_without_stops: np.ndarray | None = None

    def is_of(self, sample: SampleWork) -> bool:
        """Numbers start again with every engine on a runner; options out of a message are equal, not the same."""
        if self.request_id != sample.request_id:
            return False
        return self.params is sample.params or self.params == sample.params


class SampleBuilder:
    """Keeps the columns and fills a step's samples.

    eos_token_ids  what min_tokens holds back beside a request's own stop tokens
    """

    def __init__(self, shapes: StepShapes, eos_token_ids: frozenset[int]) -> None:
        self.shapes = shapes
        self.eos_token_ids = eos_token_ids
        rows = shapes.max_num_rows
        # The last column is neutral: samples that only score, and padding.
        self._columns = np.zeros((len(_FIELDS), rows + 1), np.int32)
        self._floats = self._columns.view(np.float32)
        self._is_random = np.zeros(rows + 1, bool)
        self._is_adjusted = np.zeros(rows + 1, bool)
        self._has_penalties = np.zeros(rows + 1, bool)
        self._min_tokens = np.zeros(rows + 1, np.int64)
        self._has_mask = np.zeros(rows + 1, bool)
        self._wants_logprobs = np.zeros(rows + 1, bool)
        self._owners: list[_Owner | None] = [None] * rows
        in_range = np.array([token for token in eos_token_ids if token < shapes.vocab_size], np.int64)
        self._all_but_eos = ~self._packed_mask(in_range)
        for row in range(rows + 1):
            self._write_neutral(row)

    def adopt(self, samples: tuple[SampleWork, ...]) -> list[tuple[int, np.ndarray]]:
        """Take over the options of requests that are new to their rows.

        Returns (row, bias [V] float32) for those with a logit bias: the device table must take them before this
        step samples.
        """
        biases = []
        for sample in samples:
            if sample.is_score:
                continue
            row = sample.row
            if not 0 <= row < self.shapes.max_num_rows:
                raise ValueError(f"row of a sample: got {row}; allowed: 0 to {self.shapes.max_num_rows - 1}")
            owner = self._owners[row]
            if owner is None or not owner.is_of(sample):
                self._write_owner(sample)
                if sample.params.logit_bias:
                    biases.append((row, self._dense_bias(sample.params.logit_bias)))
        return biases

    def build(self, samples: tuple[SampleWork, ...], *, at_least: int = 1) -> StagedSamples:
        """Stage the samples of one step, which adopt() has seen, in a bucket of at least so many. The arrays are fresh:
        the device may read them in place."""
        count = len(samples)
        bucket = self.shapes.sample_bucket(max(count, at_least))
        neutral = self.shapes.max_num_rows
        rows = np.full(bucket, neutral, np.int64)
        rows[:count] = [neutral if sample.is_score else sample.row for sample in samples]
        words = self._columns[:, rows]
        words[_AT["row"]] = rows
        words[_AT["position"], :count] = [sample.position for sample in samples]
        words[_AT["forced"], :count] = [sample.forced_token for sample in samples]
        seeds = np.array([sample.seed for sample in samples], np.uint64)
        words[_AT["seed_high"], :count] = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
        words[_AT["seed_low"], :count] = seeds.astype(np.uint32).view(np.int32)
        forced = words[_AT["forced"]]
        if forced.max() >= self.shapes.vocab_size:
            raise ValueError(f"forced_token: got {int(forced.max())}; allowed: up to {self.shapes.vocab_size - 1}")
        is_held = np.zeros(bucket, bool)
        minimum = self._min_tokens[rows]
        if minimum.any():
            is_held[:count] = minimum[:count] > [sample.num_outputs for sample in samples]
        is_adjusted = self._is_adjusted[rows].any() or is_held.any()
        wants = any(sample.is_score for sample in samples) or bool(self._wants_logprobs[rows].any())
        return StagedSamples(
            bucket,
            words.reshape(-1),
            is_random=bool(self._is_random[rows].any()),
            mask=self._mask(rows, is_held) if is_adjusted else None,
            forbidden=_forbidden(samples, bucket) if is_adjusted else None,
            counts_tokens=bool(self._has_penalties[rows].any()),
            logprob_ids=_logprob_ids(samples, bucket) if wants else None,
        )

    def constrain(
        self, staged: StagedSamples, samples: tuple[SampleWork, ...], constraints: StepConstraints
    ) -> StagedSamples:
        """Put a grammar's masks and forced tokens into samples that the device has not been given yet."""
        forced = staged.packed.reshape(len(_FIELDS), staged.bucket)[_AT["forced"]]
        for index, token in constraints.forced.items():
            forced[index] = token
        if not len(constraints.indices):
            return staged
        mask, chosen, allowed = staged.mask, constraints.indices, constraints.masks
        if mask is None:
            mask = np.full(staged.bucket * self.shapes.mask_words, _ALL_ONES, np.int32)
        rows = mask.reshape(staged.bucket, -1)
        # Stop tokens are held back (min_tokens, ignore_eos), unless the grammar allows nothing else.
        held = rows[chosen] & allowed
        held[[samples[index].params.ignore_eos for index in chosen]] &= self._all_but_eos
        rows[chosen] = np.where(held.any(axis=1, keepdims=True), held, allowed)
        forbidden = staged.forbidden if staged.forbidden is not None else _forbidden(samples, staged.bucket)
        return dataclasses.replace(staged, mask=mask, forbidden=forbidden)

    def neutral(self, bucket: int) -> StagedSamples:
        """A step of `bucket` unused samples that needs every program, for warm-up."""
        rows = np.full(bucket, self.shapes.max_num_rows, np.int64)
        words = self._columns[:, rows]
        words[_AT["row"]] = rows
        mask = self._mask(rows, np.zeros(bucket, bool))
        return StagedSamples(
            bucket, words.reshape(-1), True, mask, _forbidden((), bucket), True, _logprob_ids((), bucket)
        )

    def counts_row(self, reset: RowReset) -> np.ndarray:
        """The device's token counts of a row as they start, [V] int16: see sampling.adjust_logits."""
        counted = np.bincount(reset.output_ids, minlength=self.shapes.vocab_size)
        counts = np.minimum(counted, 0x7FFF).astype(np.uint16)
        counts[reset.prompt_ids] |= 0x8000
        return counts.view(np.int16)

    def _mask(self, rows: np.ndarray, is_held: np.ndarray) -> np.ndarray:
        mask = np.full((len(rows), self.shapes.mask_words), _ALL_ONES, np.int32)
        for index in np.flatnonzero(self._has_mask[rows] | is_held).tolist():
            owner = self._owners[rows[index]]
            assert owner is not None
            chosen = owner.allowed_without_stops if is_held[index] else owner.allowed
            if chosen is not None:
                mask[index] = chosen
        return mask.reshape(-1)

    def _write_neutral(self, row: int) -> None:
        self._columns[:, row] = 0
        for name in ("count_row", "bias_row"):
            self._columns[_AT[name], row] = self.shapes.max_num_rows
        self._columns[_AT["forced"], row] = -1
        self._columns[_AT["is_greedy"], row] = 1
        for name, value in (("inverse_temperature", 1), ("top_p", 1), ("log_min_p", -np.inf), ("repetition", 1)):
            self._floats[_AT[name], row] = value
        self._is_random[row] = self._is_adjusted[row] = self._has_penalties[row] = False
        self._min_tokens[row] = 0
        self._has_mask[row] = False
        self._wants_logprobs[row] = False

    def _write_owner(self, sample: SampleWork) -> None:
        row, params = sample.row, sample.params
        params.check_vocabulary(self.shapes.vocab_size)
        self._write_neutral(row)
        owner = _Owner(sample.request_id, params)
        self._owners[row] = owner
        self._wants_logprobs[row] = params.logprobs is not None
        top_k = params.top_k if 0 < params.top_k < self.shapes.vocab_size else 0
        # top_k 1 keeps one value: the argmax. Sent as greedy, so that a tie goes to the lowest id.
        if not params.is_greedy and top_k != 1:
            self._is_random[row] = True
            self._columns[_AT["is_greedy"], row] = 0
            self._columns[_AT["top_k"], row] = top_k
            self._floats[_AT["inverse_temperature"], row] = 1.0 / params.temperature
            self._floats[_AT["top_p"], row] = params.top_p
            self._floats[_AT["log_min_p"], row] = math.log(params.min_p) if params.min_p > 0 else -np.inf
        if params.has_penalties:
            self._has_penalties[row] = True
            self._columns[_AT["count_row"], row] = row
            self._floats[_AT["presence"], row] = params.presence_penalty
            self._floats[_AT["frequency"], row] = params.frequency_penalty
            self._floats[_AT["repetition"], row] = params.repetition_penalty
        if params.logit_bias:
            self._columns[_AT["bias_row"], row] = row
        owner.allowed = self._allowed(params)
        self._has_mask[row] = owner.allowed is not None
        self._is_adjusted[row] = (
            params.has_penalties or bool(params.logit_bias) or bool(params.bad_word_ids) or self._has_mask[row]
        )
        if params.min_tokens > 0:
            owner.allowed_without_stops = self._without_stops(owner)
            self._min_tokens[row] = params.min_tokens

    def _allowed(self, params: SamplingParams) -> np.ndarray | None:
        """The row's mask: allowed ids without bad words of one token; None if everything is allowed."""
        bad = [words[0] for words in params.bad_word_ids if len(words) == 1]
        allowed = params.allowed_token_ids
        if allowed is None and not bad:
            return None
        mask = self._packed_mask(np.arange(self.shapes.vocab_size) if allowed is None else np.array(allowed))
        return mask & ~self._packed_mask(np.array(bad, np.int64))

    def _packed_mask(self, token_ids: np.ndarray) -> np.ndarray:
        """[mask_words] int32 with the bits of `token_ids` set."""
        bits = np.zeros(self.shapes.mask_words * 32, np.uint8)
        bits[token_ids] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def _without_stops(self, owner: _Owner) -> np.ndarray | None:
        """The row's mask while min_tokens holds its stop tokens back. When nothing else is allowed the stop tokens
        stay: a mask must leave something to sample."""
        params = owner.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        in_range = np.array([token for token in stops if token < self.shapes.vocab_size], np.int64)
        start = owner.allowed if owner.allowed is not None else self._packed_mask(np.arange(self.shapes.vocab_size))
        held = start & ~self._packed_mask(in_range)
        return held if held.any() else owner.allowed

    def _dense_bias(self, logit_bias: dict[int, float]) -> np.ndarray:
        bias = np.zeros(self.shapes.vocab_size, np.float32)
        bias[list(logit_bias)] = list(logit_bias.values())
        return bias


def _logprob_ids(samples: tuple[SampleWork, ...], bucket: int) -> np.ndarray:
    ids = np.zeros((bucket, MAX_LOGPROB_TOKEN_IDS), np.int32)
    for index, sample in enumerate(samples):
        named = sample.params.logprob_token_ids
        if named:
            ids[index, : len(named)] = named
    return ids.reshape(-1)


def _forbidden(samples: tuple[SampleWork, ...], bucket: int) -> np.ndarray:
    """Which bad words of several tokens may be completed by this step's tokens. The last output token may be known to
    the device alone: then it is left to the device to compare it."""
    pairs = np.full((bucket, MAX_BAD_WORDS, 2), AFTER_NONE, np.int32)
    for index, sample in enumerate(samples):
        words = sample.params.bad_word_ids
        if not words or sample.is_score:
            continue
        recent, num_seen, place = sample.recent_ids, sample.num_outputs, 0
        for word in words:
            if not 1 < len(word) <= num_seen + 1:
                continue
            known = word[:-2] if sample.is_behind else word[:-1]
            if not known or recent[-len(known) :] == known:
                pairs[index, place] = (word[-2] if sample.is_behind else AFTER_ANY, word[-1])
                place += 1
    return pairs.reshape(-1)
