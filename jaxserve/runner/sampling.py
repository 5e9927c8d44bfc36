"""From logits to tokens on the device: changes to the logits, truncation, the draw, log-probabilities.

Order: penalties, logit bias, mask, temperature, top-k, top-p over what top-k left, min-p. Everything is float32.

* A row's token depends on its own logits and options only. Greedy rows get exactly the argmax (the lowest id
  among equals) in every program; neutral options leave every value bitwise as it was.
* Truncation keeps a set {token : scaled logit >= threshold}. top-k: the threshold is the k-th largest value;
  top-p: the largest value whose set holds at least top_p of the mass. Tokens equal to the threshold are all kept.
  top_k = 1 is greedy (the host sends it as such), so a tie there goes to the lowest id.
* The threshold is found by bisection, without sorting the vocabulary: first among the NUM_CANDIDATE_BLOCKS blocks
  of largest maxima, which hold every token above the smallest of those maxima; a row whose threshold lies lower
  is searched over the whole vocabulary.
* The draw inverts the cumulative distribution at three levels (groups of blocks, blocks, tokens) with one
  independent uniform per level, from threefry keyed by (seed, position). No noise array of vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling_params import MAX_TOP_LOGPROBS

# adjust_logits may forbid a token only behind a certain last one; these stand for "behind any" and "nothing here".
AFTER_ANY = -1
AFTER_NONE = -2

BLOCK = 64  # tokens per block
BLOCKS_PER_GROUP = 32
NUM_CANDIDATE_BLOCKS = 128
LINEAR_STEPS = 16  # bisection steps that halve the value range; later ones halve the float bits and so always end
LOWEST_SCALED = -104.0  # exp of anything smaller is zero in float32
LOWEST_LOGPROB = -9999.0  # stands for minus infinity in results: JSON has no infinities
IsEnough = Callable[[jax.Array, jax.Array], jax.Array]  # (tokens [S], mass [S]) -> [S] bool
_COUNT_MASK = 0x7FFF  # int16 token counts: low bits count the output, the sign bit marks tokens of the prompt


class SampleInputs(NamedTuple):
    """Per-row options of one step's samples, S rows. Unused rows are greedy with neutral values.

    row          [S] int32  place in the last-token table; past the end: the token is not stored
    count_row    [S] int32  row of the token counts; past the end: this row has no penalties
    bias_row     [S] int32  row of the bias table; past the end: this row has no bias
    position     [S] int32  position the token takes: with the seed it fixes the draw
    seed         [S, 2] uint32  high and low half
    forced       [S] int32  >= 0: take this token
    top_k        [S] int32  0: off
    is_greedy    [S] int32  0 or 1
    inverse_temperature, top_p, log_min_p, presence, frequency, repetition   [S] float32
    """

    row: jax.Array
    count_row: jax.Array
    bias_row: jax.Array
    position: jax.Array
    seed: jax.Array
    forced: jax.Array
    top_k: jax.Array
    is_greedy: jax.Array
    inverse_temperature: jax.Array
    top_p: jax.Array
    log_min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array


class Logprobs(NamedTuple):
    """token [S], rank [S] int32 (1 = best), top_ids [S, K] int32, top [S, K], best first, equals by lowest id;
    named [S, M]: those of the ids that were asked for."""

    token: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array
    named: jax.Array


def greedy_tokens(logits: jax.Array) -> jax.Array:
    """logits [S, V] -> [S] int32, the lowest id among the largest."""
    # XLA:CPU's argmax carries (value, index) pairs through one scalar loop; two maxima are five times as fast.
    blocks = _blocks(logits)
    block_max = jnp.max(blocks, axis=-1)
    return _first_of_largest(blocks, block_max, logits.shape[1])


def draw_tokens(logits: jax.Array, inputs: SampleInputs, *, branch: bool) -> jax.Array:
    """Greedy or random token of each row. logits [S, V] -> [S] int32.

    branch: skip work that no row needs and search the whole vocabulary row by row. Right on CPU, where a branch is
    free and a row fits a cache; on an accelerator each branch waits for the host, so everything is computed.
    """
    blocks = _blocks(logits)
    block_max = jnp.max(blocks, axis=-1)
    greedy = _first_of_largest(blocks, block_max, logits.shape[1])
    # Subtracting the maximum first keeps tiny temperatures finite; the bound keeps a fully masked row from NaN.
    top = jnp.maximum(jnp.max(block_max, axis=-1), jnp.finfo(jnp.float32).min)
    scale = _Scale(top, inputs.inverse_temperature)
    threshold = _threshold(blocks, block_max, scale, inputs, branch=branch)
    scaled = scale(blocks)
    weights = jnp.where(scaled >= threshold[:, None, None], jnp.exp(scaled), 0.0)
    drawn = _invert(weights, _uniforms(inputs.seed, inputs.position))
    drawn = jnp.minimum(drawn, logits.shape[1] - 1)
    return jnp.where(inputs.is_greedy != 0, greedy, drawn)


def adjust_logits(
    logits: jax.Array,  # [S, V]
    inputs: SampleInputs,
    counts: jax.Array,  # [rows, V] int16
    bias: jax.Array,  # [rows, V] float32
    mask: jax.Array,  # [S, ceil(V / 32)] int32: bit i of word w allows token 32 * w + i
    last_token: jax.Array,  # [rows] int32: the token before the one that is sampled
    forbidden: jax.Array,  # [S, B, 2] int32: (last token or AFTER_ANY or AFTER_NONE, token not allowed behind it)
) -> jax.Array:
    """Penalties, bias, mask and bad words. Rows without them keep every logit bitwise."""
    num_rows, vocab_size = counts.shape
    has_counts = (inputs.count_row < num_rows)[:, None]
    seen = jnp.where(has_counts, counts[jnp.minimum(inputs.count_row, num_rows - 1)], jnp.int16(0)).astype(jnp.int32)
    num_outputs = (seen & _COUNT_MASK).astype(jnp.float32)
    repetition = inputs.repetition[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    out = jnp.where(seen != 0, scaled, logits)
    out = out - inputs.frequency[:, None] * num_outputs
    out = out - inputs.presence[:, None] * (num_outputs > 0)
    has_bias = (inputs.bias_row < num_rows)[:, None]
    out = out + jnp.where(has_bias, bias[jnp.minimum(inputs.bias_row, num_rows - 1)], 0.0)
    out = jnp.where(_unpack_mask(mask, vocab_size), out, -jnp.inf)
    after, token = forbidden[..., 0], forbidden[..., 1]
    last = last_token[jnp.minimum(inputs.row, num_rows - 1)][:, None]
    token = jnp.where((after == AFTER_ANY) | (after == last), token, vocab_size)
    return out.at[jnp.arange(out.shape[0])[:, None], token].set(-jnp.inf, mode="drop")


def count_tokens(counts: jax.Array, count_row: jax.Array, tokens: jax.Array) -> jax.Array:
    """counts [rows, V] int16 with each row's new token counted; rows past the end are dropped. Saturates."""
    held = counts[jnp.minimum(count_row, counts.shape[0] - 1), tokens]
    is_full = (held & jnp.int16(_COUNT_MASK)) == _COUNT_MASK
    return counts.at[count_row, tokens].set(jnp.where(is_full, held, held + jnp.int16(1)), mode="drop")


def token_logprobs(logits: jax.Array, tokens: jax.Array, named: jax.Array) -> Logprobs:
    """Log-softmax of the raw logits [S, V] at `tokens` [S], their ranks, the best K tokens, and at `named` [S * M]."""
    vocab_size = logits.shape[1]
    blocks = _blocks(logits)
    block_max = jnp.max(blocks, axis=-1)
    top = jnp.max(block_max, axis=-1)
    total = top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum((logits > chosen).astype(jnp.int32), axis=-1)
    num_top = min(MAX_TOP_LOGPROBS, vocab_size)
    values, block_ids, _ = _candidates(blocks, block_max, num_top)
    best, at = lax.top_k(values, num_top)
    ids = jnp.take_along_axis(block_ids, at // BLOCK, axis=1) * BLOCK + at % BLOCK
    return Logprobs(
        jnp.maximum(chosen[:, 0] - total, LOWEST_LOGPROB),
        rank,
        jnp.minimum(ids, vocab_size - 1),
        jnp.maximum(best - total[:, None], LOWEST_LOGPROB),
        jnp.maximum(
            jnp.take_along_axis(logits, named.reshape(logits.shape[0], -1), axis=1) - total[:, None], LOWEST_LOGPROB
        ),
    )


def _blocks(logits: jax.Array) -> jax.Array:
    """[S, V] -> [S, NB, BLOCK]; the tail of the last block is -inf."""
    tail = -logits.shape[1] % BLOCK
    if tail:
        logits = jnp.pad(logits, ((0, 0), (0, tail)), constant_values=-jnp.inf)
    return logits.reshape(logits.shape[0], -1, BLOCK)


def _first(mask: jax.Array) -> jax.Array:
    """[S, n] bool -> [S] index of the first True; n - 1 where there is none (NaN logits)."""
    index = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    return jnp.min(jnp.where(mask, index, mask.shape[1] - 1), axis=-1)


def _take_block(blocks: jax.Array, block: jax.Array) -> jax.Array:
    """[S, n, m], [S] -> [S, m]."""
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _first_of_largest(blocks: jax.Array, block_max: jax.Array, vocab_size: int) -> jax.Array:
    largest = jnp.max(block_max, axis=-1, keepdims=True)
    block = _first(block_max == largest)
    inside = _first(_take_block(blocks, block) == largest)
    return jnp.minimum(block * BLOCK + inside, vocab_size - 1)


def _candidates(blocks: jax.Array, block_max: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `num_blocks` blocks of largest maxima, in ascending order of their ids.

    Returns values [S, n * BLOCK], ids [S, n] and the smallest of the maxima [S]. Every token above that maximum
    is among the values, and so are num_blocks of the largest tokens.
    """
    num_blocks = min(num_blocks, block_max.shape[1])
    maxima, ids = lax.top_k(block_max, num_blocks)
    ids = jnp.sort(ids, axis=-1)
    # Gathered once: XLA would fuse the gather into every reader.
    values = lax.optimization_barrier(jnp.take_along_axis(blocks, ids[:, :, None], axis=1))
    return values.reshape(values.shape[0], -1), ids, maxima[:, -1]


class _Scale(NamedTuple):
    """(logit - top) * inverse temperature, computed where it is read: as an array of its own it would cost a pass
    over memory, and an operand of a branch or loop is always one."""

    top: jax.Array  # [S]
    factor: jax.Array  # [S]

    def __call__(self, logits: jax.Array) -> jax.Array:
        """logits [S, ...] -> the same shape, <= 0."""
        shape = (-1,) + (1,) * (logits.ndim - 1)
        return (logits - self.top.reshape(shape)) * self.factor.reshape(shape)


class _Search(NamedTuple):
    """Bisection state per row: {x >= low} is enough, {x >= high} is not. low and high are ordered float bits."""

    low: jax.Array  # [S] int32
    high: jax.Array  # [S] int32
    count_low: jax.Array  # [S] int32, tokens >= low
    count_high: jax.Array
    mass_low: jax.Array  # [S] float32

    def is_open(self) -> jax.Array:
        return (self.count_low - self.count_high > 1) & (self.high - self.low > 1)


def _threshold(
    blocks: jax.Array,  # [S, NB, BLOCK]
    block_max: jax.Array,  # [S, NB]
    scale: _Scale,
    inputs: SampleInputs,
    *,
    branch: bool,
) -> jax.Array:
    """The smallest scaled logit that each row keeps, [S]."""
    wants = (inputs.top_k > 0) | (inputs.top_p < 1.0)

    def search() -> jax.Array:
        return _truncation_threshold(blocks, block_max, scale, inputs, wants, branch=branch)

    none = jnp.full(wants.shape, -jnp.inf, jnp.float32)
    found = lax.cond(jnp.any(wants), search, lambda: none) if branch else search()
    return jnp.maximum(jnp.where(wants, found, none), inputs.log_min_p)


def _truncation_threshold(
    blocks: jax.Array,
    block_max: jax.Array,
    scale: _Scale,
    inputs: SampleInputs,
    wants: jax.Array,
    *,
    branch: bool,
) -> jax.Array:
    """The threshold of top-k and top-p for the rows of `wants`, [S]."""
    k, p = inputs.top_k, inputs.top_p
    values, _, smallest = _candidates(blocks, block_max, NUM_CANDIDATE_BLOCKS)
    values = scale(values)
    has_all = block_max.shape[1] <= NUM_CANDIDATE_BLOCKS
    floor = jnp.full(k.shape, LOWEST_SCALED, jnp.float32)
    floor = floor if has_all else jnp.maximum(scale(smallest), floor)
    total = jnp.sum(jnp.exp(scale(blocks)), axis=(1, 2))
    count, mass = _measure(values, jnp.exp(values), floor)
    if has_all:
        return _search(values, floor, count, mass, total, k, p, wants)
    is_here = jnp.where(k > 0, count >= k, mass >= p * total)
    found = _search(values, floor, count, mass, total, k, p, wants & is_here)
    rest = wants & ~is_here
    whole = blocks.reshape(blocks.shape[0], -1)
    return jnp.where(rest, _search_whole(whole, scale, total, k, p, rest, branch=branch), found)


def _measure(values: jax.Array, weights: jax.Array, floor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of the values [S, n] are >= floor [S] (int32 [S]), and the sum of their weights [S]. One pass."""
    is_in = values >= floor[:, None]
    operands = (is_in.astype(jnp.int32), jnp.where(is_in, weights, 0.0))
    zeros = (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
    count, mass = lax.reduce(operands, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))
    return count, mass


def _search_whole(
    logits: jax.Array,  # [S, V]
    scale: _Scale,
    total: jax.Array,
    k: jax.Array,
    p: jax.Array,
    wants: jax.Array,
    *,
    branch: bool,
) -> jax.Array:
    """_search over the whole vocabulary. Tokens below LOWEST_SCALED have no weight and are not looked for."""
    floor = jnp.full(k.shape, LOWEST_SCALED, jnp.float32)
    count = jnp.full(k.shape, logits.shape[1], jnp.int32)

    def search(logits: jax.Array, top: jax.Array, factor: jax.Array, *rest: jax.Array) -> jax.Array:
        floor, count, total, k, p, wants = rest
        return _search(_Scale(top, factor)(logits), floor, count, total, total, k, p, wants)

    operands = (logits, *scale, floor, count, total, k, p, wants)
    if not branch:
        return search(*operands)

    def search_row(i: jax.Array, out: jax.Array) -> jax.Array:
        row = search(*(lax.dynamic_slice_in_dim(operand, i, 1) for operand in operands))
        return lax.dynamic_update_slice_in_dim(out, row, i, 0)

    def visit(i: jax.Array, out: jax.Array) -> jax.Array:
        return lax.cond(wants[i], search_row, lambda i, out: out, i, out)

    return lax.fori_loop(0, k.shape[0], visit, floor)


def _search(
    values: jax.Array,  # [S, n], <= 0
    floor: jax.Array,  # [S] where to start; {values >= floor} is enough for top-k, or for top-p without top-k
    count: jax.Array,  # [S] int32, size of that set (or more)
    mass: jax.Array,  # [S] its sum of exp
    total: jax.Array,  # [S] sum of exp over the vocabulary
    k: jax.Array,
    p: jax.Array,
    wants: jax.Array,  # [S] bool
) -> jax.Array:
    """The threshold of top-k and then top-p, [S]."""
    weights = jnp.exp(values)

    def phase(is_top_p: jax.Array, state: _Search) -> _Search:
        # One body for both phases halves what there is to compile.
        is_wanted = wants & jnp.where(is_top_p == 0, k > 0, p < 1.0)
        target = p * jnp.where(k > 0, state.mass_low, total)
        high = _Search(state.low, jnp.ones_like(k), state.count_low, jnp.zeros_like(k), state.mass_low)
        return _bisect(
            values,
            weights,
            high,
            is_wanted,
            lambda number, mass: jnp.where(is_top_p == 0, number >= k, mass >= target),
        )

    nothing = jnp.zeros_like(k)
    state = _Search(_ordered(floor), nothing, count, nothing, mass)
    return _from_ordered(lax.fori_loop(0, 2, phase, state).low)


def _bisect(values: jax.Array, weights: jax.Array, state: _Search, wants: jax.Array, is_enough: IsEnough) -> _Search:
    """Raise `low` and lower `high` until at most one token lies between, or they are neighbouring floats."""

    def body(carry: tuple[jax.Array, _Search]) -> tuple[jax.Array, _Search]:
        step, state = carry
        by_value = _ordered(0.5 * (_from_ordered(state.low) + jnp.minimum(_from_ordered(state.high), 0.0)))
        by_bits = state.low + (state.high - state.low) // 2
        middle = jnp.where(step < LINEAR_STEPS, by_value, by_bits)
        middle = jnp.clip(middle, state.low + 1, state.high - 1)
        number, mass = _measure(values, weights, _from_ordered(middle))
        is_moving, enough = wants & state.is_open(), is_enough(number, mass)
        up, down = is_moving & enough, is_moving & ~enough
        return step + 1, _Search(
            jnp.where(up, middle, state.low),
            jnp.where(down, middle, state.high),
            jnp.where(up, number, state.count_low),
            jnp.where(down, number, state.count_high),
            jnp.where(up, mass, state.mass_low),
        )

    def is_running(carry: tuple[jax.Array, _Search]) -> jax.Array:
        return jnp.any(wants & carry[1].is_open())

    return lax.while_loop(is_running, body, (jnp.zeros((), jnp.int32), state))[1]


def _ordered(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_ordered(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """[S, 2] uint32, [S] -> [S, 3] float32 in [0, 1), a function of (seed, position) alone."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.uniform(key, (3,), jnp.float32)

    return jax.vmap(one)(seed, position)


def _invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """weights [S, NB, BLOCK] >= 0, uniforms [S, 3] -> [S] int32 token index drawn in proportion."""
    sums = jnp.sum(weights, axis=-1)
    tail = -sums.shape[1] % BLOCKS_PER_GROUP
    groups = jnp.pad(sums, ((0, 0), (0, tail))).reshape(sums.shape[0], -1, BLOCKS_PER_GROUP)
    group = _pick(jnp.sum(groups, axis=-1), uniforms[:, 0])
    block = group * BLOCKS_PER_GROUP + _pick(_take_block(groups, group), uniforms[:, 1])
    block = jnp.minimum(block, sums.shape[1] - 1)
    return block * BLOCK + _pick(_take_block(weights, block), uniforms[:, 2])


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index of [S, n] drawn in proportion to the weights; never one of weight zero unless all are."""
    # n is at most a few hundred: one masked sum compiles to one loop, a scan to dozens.
    index = jnp.arange(weights.shape[1])
    cumulative = jnp.sum(jnp.where(index <= index[:, None], weights[:, None, :], 0.0), axis=-1)
    is_beyond = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    last = weights.shape[1] - 1 - _first((weights > 0)[:, ::-1])
    return jnp.where(jnp.any(is_beyond, axis=-1), _first(is_beyond), last)


def _unpack_mask(mask: jax.Array, vocab_size: int) -> jax.Array:
    """[S, W] int32 -> [S, vocab_size] bool."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] != 0
