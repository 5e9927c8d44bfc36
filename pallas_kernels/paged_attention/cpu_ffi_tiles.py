"""CPU paged attention in tile registers (AMX), for pages in bfloat16: the inner loops of one tile of context.

Sixteen query rows, a block, lie side by side in the lanes of a vector. scores.T = K @ q.T takes K where it lies in its
pages; softmax then has no sum across lanes; sums.T = V.T @ weights.T takes V turned round, once for all blocks of a
unit. Queries and weights are multiplied as two bfloat16 numbers each, the second being what rounding leaves of the
first: to 2**-16 of each query and weight, so that the error of a score grows with the score. An element is summed over
dims, and over tokens, in one order whatever rows lie beside it.

A token that a row does not see has a weight of exactly 0, which an infinite or NaN V of the same request turns into
NaN.

Only where support.has_bf16_tiles(), for head_dim a multiple of 32 and pages of a multiple of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels.cpu_ffi.call_frame import FLOAT, I16, I32, I64
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import (
    LINE,
    ROWS,
    STEP,
    TILE_BYTES,
    emit_pairs,
    emit_row_starts,
    emit_transposed_sums,
)
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import W_TILES, X_TILES, Tiles
from jaxserve.pallas_kernels.cpu_ffi.vectors import (
    INT_VECTOR,
    LANES,
    LOCALITY_SECOND_CACHE,
    MASKED,
    VECTOR,
    Emitter,
    emit_loop,
    void_intrinsic,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import TILE
from llvmlite import ir
from numba import types
from numba.core import cgutils

GROUPS = TILE // ROWS  # keys of one tile register, of a tile of context
_SUMS = (0, 1, 2, 3)  # registers: as many sums as hide the latency of a product
_LEFT, _RIGHT = W_TILES, X_TILES
_RISE = 8.0  # how far a score may lie above the one whose weight is 1
_INT, _FLOAT = types.intp, types.float32


def make_pack_queries(head_dim: int) -> Any:
    """pack_queries(queries, rows, target): up to 16 scaled queries [rows, head_dim] float32 as right matrices, for each
    STEP dims the first and the second number of each. Missing rows repeat the last."""

    def emit(e: Emitter, queries: ir.Value, rows: ir.Value, target: ir.Value) -> None:
        b = e.b
        starts = emit_row_starts(e, queries, e.const(4 * head_dim), rows)
        with emit_loop(e, 0, head_dim, STEP) as (d, count):
            offset, tile = b.mul(d, e.const(4)), b.add(target, b.mul(count, e.const(2 * TILE_BYTES)))
            firsts, seconds = [], []
            for start in starts:
                values = [e.load(e.at(b.add(start, offset), 4 * half)) for half in (0, LANES)]
                firsts.append([e.to_bf16(value) for value in values])
                rests = [b.fsub(value, _widen(e, first)) for value, first in zip(values, firsts[-1])]
                seconds.append([e.to_bf16(rest) for rest in rests])
            emit_pairs(e, firsts, tile)
            emit_pairs(e, seconds, e.at(tile, TILE_BYTES))

    return void_intrinsic((_INT,) * 3, emit)


def _widen(e: Emitter, narrow: ir.Value) -> ir.Value:
    """16 bfloat16, as int16, in float32."""
    shifted = e.b.shl(e.b.zext(narrow, INT_VECTOR), _all_lanes(16))
    return e.b.bitcast(shifted, VECTOR)


def make_turn_values(head_dim: int) -> Any:
    """turn_values(keys, ahead, to_values, low, high, zeros, values): V.T of a tile of context, as left matrices of 32
    tokens; 0 for tokens outside low : high, whose slots may never have been written.

    keys, ahead   addresses of GROUPS addresses of the K of 16 tokens: of this tile, and of the one to fetch meanwhile
    to_values     bytes from a token's K to its V
    zeros         as many zeros as a token's V has bytes
    """
    row_bytes, chunk = 2 * head_dim, LANES // 2  # dims that a quarter of a register holds

    def emit(e: Emitter, keys, ahead, to_values, low, high, zeros, values) -> None:
        b = e.b
        with emit_loop(e, 0, TILE, STEP) as (start, half):
            rows, fetched = [], e.load(b.add(ahead, b.mul(half, e.const(8))), I64, 8)
            for part in range(STEP // ROWS):
                place = b.mul(b.add(b.mul(half, e.const(STEP // ROWS)), e.const(part)), e.const(8))
                group = b.add(e.load(b.add(keys, place), I64, 8), to_values)
                for i in range(ROWS):
                    token = e.at(start, ROWS * part + i)
                    is_inside = b.and_(b.icmp_signed(">=", token, low), b.icmp_signed("<", token, high))
                    rows.append(b.select(is_inside, e.at(group, i * row_bytes), zeros))
            target = b.add(values, b.mul(half, e.const(head_dim * LINE)))
            with emit_loop(e, 0, head_dim, chunk) as (d, _):
                offset, lines = b.mul(d, e.const(2)), b.add(target, b.mul(d, e.const(LINE)))
                for column, line in enumerate(e.columns_of_shorts([b.add(row, offset) for row in rows])):
                    e.store(line, e.at(lines, LINE * column), LINE)
            with emit_loop(e, 0, row_bytes, LINE) as (offset, _):
                _fetch(e, [b.add(e.at(fetched, i * row_bytes), offset) for i in range(ROWS)])

    return void_intrinsic((_INT,) * 7, emit)


def make_fetch_tile(head_dim: int) -> Any:
    """fetch_tile(keys, to_values): K and V of a tile of context into the second cache."""

    def emit(e: Emitter, keys, to_values) -> None:
        b = e.b
        with emit_loop(e, 0, GROUPS, 1) as (i, _):
            group = e.load(b.add(keys, b.mul(i, e.const(8))), I64, 8)
            with emit_loop(e, 0, ROWS * 2 * head_dim, LINE) as (line, _):
                key = b.add(group, line)
                _fetch(e, [key, b.add(key, to_values)])

    return void_intrinsic((_INT,) * 2, emit)


def make_score_block(head_dim: int) -> Any:
    """score_block(queries, keys, ahead, scores): scores.T [TILE, 16] of a tile of context and a packed block.

    ahead   as in turn_values, or 0: nothing is fetched
    """
    row_bytes = 2 * head_dim

    def emit(e: Emitter, queries, keys, ahead, scores) -> None:
        tiles = Tiles(e)
        groups = [e.load(e.at(keys, 8 * i), I64, 8) for i in range(GROUPS)]
        for tile in _SUMS:
            tiles.zero(tile)
        for step in range(head_dim // STEP):
            with e.b.if_then(e.b.icmp_unsigned("!=", ahead, e.const(0))):
                for i in range(GROUPS // 2, GROUPS):
                    group = e.load(e.at(ahead, 8 * i), I64, 8)
                    _fetch(e, [e.at(group, step * LINE + row * row_bytes) for row in range(ROWS)])
            lefts = [e.at(group, step * LINE) for group in groups]
            _emit_products(e, lefts, row_bytes, e.at(queries, 2 * step * TILE_BYTES))
        for i, tile in enumerate(_SUMS):
            tiles.store(tile, e.at(scores, i * TILE_BYTES), e.const(LINE))

    return void_intrinsic((_INT,) * 4, emit)


def make_add_values(head_dim: int) -> Any:
    """add_values(values, weights, sums, ahead, to_values): sums.T [head_dim, 16] += V.T @ weights.T of a tile. For
    ahead see score_block."""
    blocks, row_bytes = head_dim // ROWS, 2 * head_dim

    def emit(e: Emitter, values, weights, sums, ahead, to_values) -> None:
        tiles = Tiles(e)
        for start in range(0, blocks, len(_SUMS)):
            places = [i * TILE_BYTES for i in range(start, min(start + len(_SUMS), blocks))]
            for tile, place in zip(_SUMS, places):
                tiles.load(tile, e.at(sums, place), e.const(LINE))
            for half in range(TILE // STEP):
                with e.b.if_then(e.b.icmp_unsigned("!=", ahead, e.const(0))):
                    group = e.b.add(e.load(e.at(ahead, 8 * (GROUPS // 2 + half)), I64, 8), to_values)
                    lines = range(start * 2 * ROWS, (start + len(places)) * 2 * ROWS, LINE)
                    _fetch(e, [e.at(group, row * row_bytes + line) for row in range(ROWS) for line in lines])
                lefts = [e.at(values, half * head_dim * LINE + place) for place in places]
                _emit_products(e, lefts, LINE, e.at(weights, 2 * half * TILE_BYTES))
            for tile, place in zip(_SUMS, places):
                tiles.store(tile, e.at(sums, place), e.const(LINE))

    return void_intrinsic((_INT,) * 5, emit)


def _fetch(e: Emitter, addresses: list[ir.Value]) -> None:
    for address in addresses:
        e.prefetch(address, locality=LOCALITY_SECOND_CACHE)


def _emit_products(e: Emitter, lefts: list[ir.Value], stride: int, right: ir.Value) -> None:
    """Each of _SUMS += the left matrix at its place, of rows `stride` bytes apart, times the first and then the second
    numbers of the right one."""
    tiles = Tiles(e)
    for i, register in enumerate(_RIGHT):
        tiles.load(register, e.at(right, i * TILE_BYTES), e.const(LINE))
    for start in range(0, len(lefts), len(_LEFT)):  # as many as registers: each is loaded once
        pairs = list(zip(_SUMS[start:], _LEFT, lefts[start:]))
        for _, register, left in pairs:
            tiles.load(register, left, e.const(stride))
        for numbers in _RIGHT:
            for total, register, _ in pairs:
                tiles.multiply_add(total, register, numbers)


def make_softmax_block(head_dim: int) -> Any:
    """softmax_block(scores, weights, sums, states, positions, tile, window, cap, ahead, to_values): scores.T of a tile
    of context into the running softmax of a block.

    scores      [TILE, 16] float32; overwritten
    weights     where the weights go, as right matrices for add_values; exactly 0 for tokens that are not visible
    sums        [head_dim, 16], rescaled where states change
    states      16 scores whose weight is 1, then 16 sums of weights
    positions   16 int32, of the queries; tile: of the first token of the tile
    window      tokens that a query sees, 0: all up to it; cap: soft cap of the scores, 0: none
    ahead       as in score_block
    """

    def emit(e: Emitter, scores, weights, sums, states, positions, tile, window, cap, ahead, to_values) -> None:
        b = e.b
        with b.if_then(b.fcmp_ordered(">", cap, ir.Constant(FLOAT, 0.0)), likely=False):
            wide = e.splat(cap)
            with emit_loop(e, 0, TILE, 1) as (token, _):
                place = b.add(scores, b.mul(token, e.const(LINE)))
                e.store(b.fmul(wide, e.tanh(b.fdiv(e.load(place), wide))), place)

        newest = b.sub(e.load(positions, INT_VECTOR), e.splat(b.trunc(tile, I32)))
        oldest = b.sub(newest, e.splat(b.trunc(window, I32)))  # the last that is too old
        has_window = b.icmp_signed(">", window, e.const(0))
        oldest = b.select(e.splat(has_window), oldest, _all_lanes(-1))
        hides = b.or_(b.icmp_signed("<", newest, _all_lanes(TILE - 1)), b.icmp_signed(">", oldest, _all_lanes(-1)))
        with b.if_else(_any(e, hides)) as (in_part, whole):
            with in_part:
                _mask_scores(e, scores, newest, oldest)
                _emit_softmax(e, head_dim, scores, weights, sums, states, ahead, to_values, is_masked=True)
            with whole:
                _emit_softmax(e, head_dim, scores, weights, sums, states, ahead, to_values, is_masked=False)

    return void_intrinsic((_INT,) * 7 + (_FLOAT, _INT, _INT), emit)


def _all_lanes(value: int) -> ir.Constant:
    return ir.Constant(INT_VECTOR, [value] * LANES)


def _any(e: Emitter, lanes: ir.Value) -> ir.Value:
    return e.b.icmp_unsigned("!=", e.b.bitcast(lanes, I16), ir.Constant(I16, 0))


def _mask_scores(e: Emitter, scores: ir.Value, newest: ir.Value, oldest: ir.Value) -> None:
    """Only tokens after `oldest` up to `newest` keep their scores."""
    b = e.b
    with emit_loop(e, 0, TILE, 1) as (token, _):
        place, index = b.add(scores, b.mul(token, e.const(LINE))), e.splat(b.trunc(token, I32))
        is_visible = b.and_(b.icmp_signed("<=", index, newest), b.icmp_signed(">", index, oldest))
        e.store(b.select(is_visible, e.load(place), e.splat_const(MASKED)), place)


def _emit_softmax(
    e: Emitter, head_dim: int, scores, weights, sums, states, ahead, to_values, *, is_masked: bool
) -> None:
    """softmax_block of capped scores, some of which may be MASKED."""
    b, together = e.b, 4  # tokens per turn: independent chains, and two pairs of weights

    def score_at(first: ir.Value, i: int) -> ir.Value:
        return e.load(b.add(scores, b.mul(e.at(first, i), e.const(LINE))))

    old_top, old_total = e.load(states), e.load(e.at(states, LINE))
    tops = [cgutils.alloca_once_value(b, old_top) for _ in range(together)]
    with emit_loop(e, 0, TILE, together) as (first, _):
        for i, top in enumerate(tops):
            b.store(e.max(b.load(top), score_at(first, i)), top)
    # A higher score counts once it is so high that weights would grow too large: sums are rarely rescaled.
    new_top = _tree(e.max, [b.load(top) for top in tops])
    has_risen = b.fcmp_ordered(">", new_top, b.fadd(old_top, e.splat_const(_RISE)))
    new_top = b.select(has_risen, new_top, old_top)

    totals = [cgutils.alloca_once_value(b, e.splat_const(0.0)) for _ in range(together)]
    with emit_loop(e, 0, TILE, together) as (first, _):
        with b.if_then(b.icmp_unsigned("!=", ahead, e.const(0))):  # V of the first half of the tile
            token = b.lshr(first, e.const(1))
            group = e.load(b.add(ahead, b.lshr(b.and_(token, e.const(-ROWS)), e.const(1))), I64, 8)
            offset = b.mul(b.and_(token, e.const(ROWS - 1)), e.const(2 * head_dim))
            value = b.add(b.add(group, to_values), offset)
            _fetch(e, [e.at(value, line) for line in range(0, together // 2 * 2 * head_dim, LINE)])
        found = []
        for i, total in enumerate(totals):
            score = score_at(first, i)
            weight = e.exp(b.fsub(score, new_top))
            if is_masked:
                is_hidden = b.fcmp_ordered("<=", score, e.splat_const(MASKED))
                weight = b.select(is_hidden, e.splat_const(0.0), weight)
            found.append(weight)
            b.store(b.fadd(b.load(total), weight), total)
        # From STEP tokens to the next two tiles, from pair to pair a line.
        half, within = b.and_(first, e.const(-STEP)), b.and_(first, e.const(STEP - 1))
        tiles = b.add(weights, b.mul(half, e.const(2 * TILE_BYTES // STEP)))
        pairs = b.add(tiles, b.mul(within, e.const(LINE // 2)))
        for i in range(0, together, 2):
            for part, pair in enumerate(_split_pair(e, *found[i : i + 2])):
                e.store(pair, e.at(pairs, part * TILE_BYTES + i * LINE // 2), LINE)
    keep = e.exp(b.fsub(old_top, new_top))
    e.store(new_top, states)
    e.store(e.fma(old_total, keep, _tree(b.fadd, [b.load(total) for total in totals])), e.at(states, LINE))
    with emit_loop(e, 0, b.select(_any(e, has_risen), e.const(head_dim), e.const(0)), 1) as (d, _):
        place = b.add(sums, b.mul(d, e.const(LINE)))
        e.store(b.fmul(e.load(place), keep), place)


def _tree(combine: Callable[..., ir.Value], values: list[ir.Value]) -> ir.Value:
    while len(values) > 1:
        values = [combine(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def _split_pair(e: Emitter, left: ir.Value, right: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two vectors of weights as pairs of bfloat16: of their leading bits, and of what these leave out, rounded."""
    b, upper = e.b, _all_lanes(-65536)

    def pair(low: ir.Value, high: ir.Value) -> ir.Value:
        return b.or_(b.lshr(low, _all_lanes(16)), b.and_(high, upper))

    bits = [b.bitcast(value, INT_VECTOR) for value in (left, right)]
    leads = [b.bitcast(b.and_(value, upper), VECTOR) for value in bits]
    rests = [b.bitcast(b.fsub(value, lead), INT_VECTOR) for value, lead in zip((left, right), leads)]
    return pair(*bits), pair(*(b.add(rest, _all_lanes(0x8000)) for rest in rests))


def make_clear_block(head_dim: int) -> Any:
    """clear_block(sums, states): the softmax over no token."""

    def emit(e: Emitter, sums: ir.Value, states: ir.Value) -> None:
        with emit_loop(e, 0, head_dim, 1) as (d, _):
            e.store(e.splat_const(0.0), e.b.add(sums, e.b.mul(d, e.const(LINE))))
        e.store(e.splat_const(MASKED), states)
        e.store(e.splat_const(0.0), e.at(states, LINE))

    return void_intrinsic((_INT,) * 2, emit)


def make_store_block(head_dim: int) -> Any:
    """store_block(sums, states, count, rows, row_states): `count` rows of a block as sums [count, head_dim] and states
    [count, 2], of maximum and sum of weights."""

    def emit(e: Emitter, sums, states, count, rows, row_states) -> None:
        b = e.b
        with emit_loop(e, 0, head_dim // ROWS, 1) as (i, _):
            tile = b.add(sums, b.mul(i, e.const(TILE_BYTES)))
            emit_transposed_sums(e, tile, b.add(rows, b.mul(i, e.const(LINE))), e.const(4 * head_dim), count)
        with emit_loop(e, 0, count, 1) as (i, _):
            source, target = b.add(states, b.mul(i, e.const(4))), b.add(row_states, b.mul(i, e.const(8)))
            for field in range(2):
                e.store(e.load(e.at(source, field * LINE), FLOAT), e.at(target, 4 * field))

    return void_intrinsic((_INT,) * 5, emit)
