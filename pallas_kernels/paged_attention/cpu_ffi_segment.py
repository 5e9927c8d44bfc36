"""One segment of CPU paged attention: the softmax of SEGMENT tokens for all rows of a unit, by vectors or tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    arg,
    attr,
    data,
    dim,
    jit,
    load_f32,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    zero_bytes,
)
from jaxserve.pallas_kernels.cpu_ffi.parallel import named
from jaxserve.pallas_kernels.cpu_ffi.tile_layout import LINE, ROWS
from jaxserve.pallas_kernels.cpu_ffi.tile_registers import configure_tiles, release_tiles
from jaxserve.pallas_kernels.cpu_ffi.vectors import ELEMENT_BYTES, LANES
from jaxserve.pallas_kernels.paged_attention import cpu_ffi_pairs, cpu_ffi_tiles
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_layout import (
    ARG_K,
    ARG_PAGES,
    ARG_SCALES,
    ARG_TABLE,
    ATTR_SOFTCAP,
    ATTR_WINDOW,
    ITEM_SEGMENT,
    ITEM_UNIT,
    SCORE_BYTES,
    SEGMENT,
    UNIT_COUNT,
    UNIT_END,
    UNIT_FIRST,
    UNIT_HEAD,
    UNIT_POSITION,
    UNIT_ROW,
    clamp,
    group_of,
    page_size_of,
)
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_products import make_product, make_value_product
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_vectors import (
    MAX_BLOCK_ROWS,
    TILE,
    end_rows,
    make_begin_rows,
    make_load_keys,
    make_load_values,
    make_softmax_row,
)
from jaxserve.pallas_kernels.paged_attention.quantized_pages import CODES


class SegmentKernel(NamedTuple):
    """How segments are computed: numba functions, all of one thread and in its work space."""

    page_multiple: int  # pages hold a multiple of so many tokens
    work_bytes: Any  # (query rows) -> bytes of the work space, a multiple of 64
    prepare: Any  # (frame, unit, index, queries, work): before the first segment; queries [rows, D] are scaled
    # (frame, unit, index, queries, work, sums, states, following): of one, into sums [rows, D], states [rows, 2].
    # following: the item whose first tile may be fetched meanwhile, or 0
    segment: Any
    finish: Any  # (): after the unit's last segment


@jit
def _rows_of_unit(frame, unit):
    return load_i64(unit, UNIT_COUNT) * group_of(frame)


@jit
def _page_of(frame, unit, position, page_bytes):
    """Address of the K, of the unit's kv head, of the page that holds a token at `position`."""
    num_pages, width = dim(arg(frame, ARG_PAGES), 0), dim(arg(frame, ARG_TABLE), 1)
    table = data(arg(frame, ARG_TABLE)) + load_i64(unit, UNIT_ROW) * width * 4
    # Clamped: a damaged table must not crash the process.
    page = clamp(load_i32(table, 4 * (position // page_size_of(frame))), 0, num_pages - 1)
    head = page * dim(arg(frame, ARG_K), 1) + load_i64(unit, UNIT_HEAD)
    return data(arg(frame, ARG_PAGES)) + head * page_bytes


@jit
def _first_tile(unit, index):
    """The first token of the tile that a segment begins with."""
    return max(index * SEGMENT, load_i64(unit, UNIT_FIRST) // TILE * TILE)


def _make_walk_rows(
    tag: str, head_dim: int, per_row: int, score_product: Any, softmax_row: Any, add_values: Any
) -> Any:
    """walk_rows(frame, unit, tile, queries, keys, values, scores, sums, states, totals, here, ahead): the rows of a
    unit against one tile of context, a block of rows at a time.

    per_row        how many dims, or tokens, a row of a tile has together
    here, ahead    addresses of the tile's K, and of the next one's, which is fetched beside the scores
    add_values     (frame, unit, block, scores, values, sums, low, high, here, ahead, fetched): the weighted values of
                   tokens low : high of the tile into the sums of a block; fetched: `ahead` with the first block, then 0
    """
    head_bytes = 4 * head_dim

    @named(tag)
    def walk_rows(frame, unit, tile, queries, keys, values, scores, sums, states, totals, here, ahead):
        group, position, rows = group_of(frame), load_i64(unit, UNIT_POSITION), _rows_of_unit(frame, unit)
        cap, window = load_f32(attr(frame, ATTR_SOFTCAP), 0), load_i32(attr(frame, ATTR_WINDOW), 0)
        fetched = ahead
        for r in range(0, rows, MAX_BLOCK_ROWS):
            block = min(MAX_BLOCK_ROWS, rows - r)
            # Tokens that some row of the block sees; rows are ordered by token.
            low = max(0, position + r // group - window + 1 - tile) if window > 0 else 0
            high = min(TILE, position + (r + block - 1) // group + 1 - tile)
            if high <= low:
                continue
            score_product(
                block, queries + r * head_bytes, head_bytes, keys, TILE * 4, scores, TILE * 4,
                0, head_dim // per_row, 0, fetched, 0,
            )  # fmt: skip
            # Tokens that all of them see.
            inside = max(0, position + (r + block - 1) // group - window + 1 - tile) if window > 0 else 0
            seen = position + r // group + 1 - tile
            is_whole = inside == 0 and seen >= TILE
            for i in range(block):
                first, end = 0, TILE
                if not is_whole:
                    end = position + (r + i) // group + 1 - tile
                    first = max(0, end - window) if window > 0 else 0
                softmax_row(
                    scores + i * TILE * 4, sums + (r + i) * head_bytes, states + 8 * (r + i), totals + LINE * (r + i),
                    first, min(TILE, end), cap,
                )  # fmt: skip
            add_values(frame, unit, block, scores, values, sums + r * head_bytes, low, high, here, ahead, fetched)
            fetched = 0

    return walk_rows


def make_vector_kernel(head_dim: int, kind: str, block_vectors: int) -> SegmentKernel:
    """For pages of any kind and size, on any CPU."""
    tag = f"d{head_dim}_{kind}_b{block_vectors}"
    load_keys, load_values = make_load_keys(head_dim, kind), make_load_values(head_dim, kind)
    begin_rows = make_begin_rows(tag, head_dim)
    row_bytes, head_bytes, has_scales = head_dim * ELEMENT_BYTES[kind], head_dim * 4, kind in CODES
    score_product = make_product(TILE // LANES, block_vectors, row_bytes, head_dim)
    tile_product = make_product(head_dim // LANES, block_vectors, row_bytes, TILE)
    value_product = make_value_product(head_dim, kind, block_vectors)

    @named(tag)
    def has_value_tile(rows):
        # Values that one register block uses are read where they lie; without wide vectors that would turn every
        # token's address and scale into work of each column.
        return rows > MAX_BLOCK_ROWS or block_vectors == 1

    @named(tag)
    def scales_of(frame):
        return data(arg(frame, ARG_SCALES)) if has_scales else 0

    @named(tag)
    def add_values(frame, unit, block, scores, values, sums, low, high, here, ahead, fetched):
        page_size = page_size_of(frame)
        if has_value_tile(_rows_of_unit(frame, unit)):
            tile_product(
                block, scores, TILE * 4, values, head_bytes, sums, head_bytes,
                low, high, 1, fetched, page_size * row_bytes,
            )  # fmt: skip
        else:
            pages = data(arg(frame, ARG_PAGES))
            value_product(block, scores, here, ahead, page_size, pages, scales_of(frame), sums, low, high)

    walk_rows = _make_walk_rows(tag, head_dim, 1, score_product, make_softmax_row(head_dim), add_values)

    @named(tag)
    def find_tokens(frame, unit, start, addresses):
        """Addresses of the K rows of TILE tokens from `start` on. Tokens outside the unit's context, whose slots
        may never have been written, read the dummy page: their scores are masked, and sums leave them out."""
        page_size, pages = page_size_of(frame), data(arg(frame, ARG_PAGES))
        first, end = load_i64(unit, UNIT_FIRST), load_i64(unit, UNIT_END)
        position = start
        while position < start + TILE:
            stop = min(start + TILE, (position // page_size + 1) * page_size)
            if position >= end or stop <= first:
                for p in range(position, stop):
                    store_i64(addresses, 8 * (p - start), pages)
            else:
                base = _page_of(frame, unit, position, 2 * page_size * row_bytes)
                for p in range(position, stop):
                    inside = first <= p < end
                    store_i64(addresses, 8 * (p - start), base + (p % page_size) * row_bytes if inside else pages)
            position = stop

    @named(tag)
    def segment(frame, unit, index, queries, work, sums, states, following):
        scores, keys = work, work + SCORE_BYTES
        values = keys + TILE * head_bytes
        here = values + TILE * head_bytes
        ahead = here + 8 * TILE
        page_size, pages, scales = page_size_of(frame), data(arg(frame, ARG_PAGES)), scales_of(frame)
        totals = ahead + 8 * TILE
        rows, first, end = _rows_of_unit(frame, unit), load_i64(unit, UNIT_FIRST), load_i64(unit, UNIT_END)
        begin_rows(rows, sums, states, totals)
        start = _first_tile(unit, index)
        find_tokens(frame, unit, start, here)
        for tile in range(start, min((index + 1) * SEGMENT, end), TILE):
            find_tokens(frame, unit, tile + TILE, ahead)
            for u in range(0, TILE, LANES):
                if tile + u < end and tile + u + LANES > first:
                    load_keys(here + 8 * u, keys + 4 * u, pages, scales)
                    if has_value_tile(rows):
                        load_values(here + 8 * u, page_size, values + u * head_bytes, pages, scales)
            walk_rows(frame, unit, tile, queries, keys, values, scores, sums, states, totals, here, ahead)
            here, ahead = ahead, here
        end_rows(rows, states, totals)

    @named(tag)
    def work_bytes(rows):
        return SCORE_BYTES + 2 * TILE * (head_bytes + 8) + LINE * rows

    @named(tag)
    def prepare(frame, unit, index, queries, work):
        pass

    @named(tag)
    def finish():
        pass

    return SegmentKernel(1, work_bytes, prepare, segment, finish)


def _make_find_groups(row_bytes: int) -> tuple[Any, Any]:
    """find_groups(frame, unit, start, addresses): of the K of each LANES tokens of a tile of context, in pages of a
    multiple of so many. Those outside the unit's context read the dummy page: their scores are masked, and their V is
    not read.
    find_ahead(frame, unit, tile, stop, following, addresses): of the tile behind `tile`, or where that lies behind
    `stop`, of the first of the item `following`, unless that is 0."""

    @named(f"r{row_bytes}")
    def find_groups(frame, unit, start, addresses):
        page_size = page_size_of(frame)
        for i in range(TILE // LANES):
            position, address = start + i * LANES, data(arg(frame, ARG_PAGES))
            if position < load_i64(unit, UNIT_END) and position + LANES > load_i64(unit, UNIT_FIRST):
                address = _page_of(frame, unit, position, 2 * page_size * row_bytes)
                address += position % page_size * row_bytes
            store_i64(addresses, 8 * i, address)

    @named(f"r{row_bytes}")
    def find_ahead(frame, unit, tile, stop, following, addresses):
        start = tile + TILE
        if following != 0 and start >= stop:
            unit = load_i64(following, ITEM_UNIT)
            start = _first_tile(unit, load_i64(following, ITEM_SEGMENT))
        find_groups(frame, unit, start, addresses)

    return find_groups, find_ahead


def make_pair_kernel(head_dim: int, block_vectors: int) -> SegmentKernel:
    """For pages in bfloat16, as cpu_ffi_pairs says: K and V are multiplied as they are, queries and weights as two
    numbers each."""
    tag = f"d{head_dim}_b{block_vectors}_pairs"
    row_bytes, head_bytes = 2 * head_dim, 4 * head_dim
    load_keys, load_values = cpu_ffi_pairs.make_load_keys(head_dim), cpu_ffi_pairs.make_load_values(head_dim)
    split_row, begin_rows = cpu_ffi_pairs.make_split_row(head_dim), make_begin_rows(tag, head_dim)
    find_groups, find_ahead = _make_find_groups(row_bytes)
    score_product = make_product(
        TILE // LANES, block_vectors, row_bytes, head_dim // 2, parts=(0, 2 * head_dim), tokens_together=LANES
    )
    value_product = make_product(head_dim // LANES, block_vectors, row_bytes, TILE // 2, parts=(0, 2 * TILE))

    @named(tag)
    def add_values(frame, unit, block, scores, values, sums, low, high, here, ahead, fetched):
        value_product(block, scores, TILE * 4, values, head_bytes, sums, head_bytes, low // 2, (high + 1) // 2, 1, 0, 0)

    softmax_row = make_softmax_row(head_dim, in_pairs=True)
    walk_rows = _make_walk_rows(tag, head_dim, 2, score_product, softmax_row, add_values)

    @named(tag)
    def segment(frame, unit, index, queries, work, sums, states, following):
        scores, keys = work, work + SCORE_BYTES
        values = keys + TILE * row_bytes
        here = values + TILE * row_bytes
        ahead = here + LINE
        to_values = page_size_of(frame) * row_bytes
        rows, first, end = _rows_of_unit(frame, unit), load_i64(unit, UNIT_FIRST), load_i64(unit, UNIT_END)
        totals = ahead + LINE
        begin_rows(rows, sums, states, totals)
        start, stop = _first_tile(unit, index), min((index + 1) * SEGMENT, end)
        find_groups(frame, unit, start, here)
        for tile in range(start, stop, TILE):
            find_ahead(frame, unit, tile, stop, following, ahead)
            for i in range(cpu_ffi_pairs.GROUPS):
                at, group = tile + i * LANES, load_i64(here, 8 * i)
                if at < end and at + LANES > first:
                    # V of the next tile here and its K beside the scores: later, or all at once, is slower.
                    load_keys(group, load_i64(ahead, 8 * i) + to_values, keys + 4 * i * LANES)
                    load_values(group + to_values, first - at, end - at, values + i * LANES * row_bytes)
            walk_rows(frame, unit, tile, queries, keys, values, scores, sums, states, totals, here, ahead)
            here, ahead = ahead, here
        end_rows(rows, states, totals)

    @named(tag)
    def work_bytes(rows):
        return SCORE_BYTES + 2 * TILE * row_bytes + 2 * LINE + LINE * rows

    @named(tag)
    def prepare(frame, unit, index, queries, work):
        for r in range(_rows_of_unit(frame, unit)):
            split_row(queries + r * head_bytes)

    @named(tag)
    def finish():
        pass

    return SegmentKernel(LANES, work_bytes, prepare, segment, finish)


def make_tile_kernel(head_dim: int) -> SegmentKernel:
    """For pages in bfloat16, as cpu_ffi_tiles says."""
    tag = f"d{head_dim}_tiles"
    pack_queries, turn_values = cpu_ffi_tiles.make_pack_queries(head_dim), cpu_ffi_tiles.make_turn_values(head_dim)
    score_block, softmax_block = cpu_ffi_tiles.make_score_block(head_dim), cpu_ffi_tiles.make_softmax_block(head_dim)
    add_values, clear_block = cpu_ffi_tiles.make_add_values(head_dim), cpu_ffi_tiles.make_clear_block(head_dim)
    store_block, fetch_tile = cpu_ffi_tiles.make_store_block(head_dim), cpu_ffi_tiles.make_fetch_tile(head_dim)
    row_bytes, head_bytes = 2 * head_dim, 4 * head_dim
    find_groups, find_ahead = _make_find_groups(row_bytes)
    # The work space: addresses of keys, a token of zeros, scores and weights of a block, V turned round, the blocks.
    keys_at, zeros_at = (0, LINE), 2 * LINE
    scores_at = zeros_at + -(-row_bytes // LINE) * LINE
    weights_at = scores_at + TILE * LINE
    values_at = weights_at + TILE * LINE
    blocks_at = values_at + TILE * row_bytes
    # A block: packed queries, sums, states, positions.
    sums_at, states_at = ROWS * head_bytes, 2 * ROWS * head_bytes
    positions_at = states_at + 2 * LINE
    block_bytes = positions_at + LINE

    @named(tag)
    def work_bytes(rows):
        return blocks_at + (rows + ROWS - 1) // ROWS * block_bytes

    @named(tag)
    def prepare(frame, unit, index, queries, work):
        configure_tiles()
        find_groups(frame, unit, _first_tile(unit, index), work + keys_at[0])
        fetch_tile(work + keys_at[0], page_size_of(frame) * row_bytes)
        zero_bytes(work + zeros_at, row_bytes)
        rows, block = _rows_of_unit(frame, unit), work + blocks_at
        group, position, place = group_of(frame), load_i64(unit, UNIT_POSITION), 0
        for first in range(0, rows, ROWS):
            pack_queries(queries + first * head_bytes, min(ROWS, rows - first), block)
            for i in range(ROWS):
                store_i32(block + positions_at, 4 * i, position)
                place += 1
                if place == group and first + i + 1 < rows:
                    position, place = position + 1, 0
            block += block_bytes

    @named(tag)
    def segment(frame, unit, index, queries, work, sums, states, following):
        scores, weights, values = work + scores_at, work + weights_at, work + values_at
        here, ahead = work + keys_at[0], work + keys_at[1]
        to_values, rows = page_size_of(frame) * row_bytes, _rows_of_unit(frame, unit)
        cap, window = load_f32(attr(frame, ATTR_SOFTCAP), 0), load_i32(attr(frame, ATTR_WINDOW), 0)
        first, end = load_i64(unit, UNIT_FIRST), load_i64(unit, UNIT_END)
        blocks_end = work + work_bytes(rows)
        for block in range(work + blocks_at, blocks_end, block_bytes):
            clear_block(block + sums_at, block + states_at)
        start, stop = _first_tile(unit, index), min((index + 1) * SEGMENT, end)
        find_groups(frame, unit, start, here)
        for tile in range(start, stop, TILE):
            find_ahead(frame, unit, tile, stop, following, ahead)
            turn_values(here, ahead, to_values, first - tile, end - tile, work + zeros_at, values)
            fetched = ahead  # K and V of the next tile, with the first block
            for block in range(work + blocks_at, blocks_end, block_bytes):
                oldest = load_i32(block + positions_at, 0)
                newest = load_i32(block + positions_at, 4 * (ROWS - 1))
                if tile > newest or (window > 0 and tile + TILE <= oldest - window + 1):
                    continue
                score_block(block, here, fetched, scores)
                softmax_block(
                    scores, weights, block + sums_at, block + states_at, block + positions_at, tile, window, cap,
                    fetched, to_values,
                )  # fmt: skip
                add_values(values, weights, block + sums_at, fetched, to_values)
                fetched = 0
            here, ahead = ahead, here
        block = work + blocks_at
        for row in range(0, rows, ROWS):
            store_block(
                block + sums_at, block + states_at, min(ROWS, rows - row), sums + row * head_bytes, states + 8 * row
            )
            block += block_bytes

    @named(tag)
    def finish():
        release_tiles()

    return SegmentKernel(ROWS, work_bytes, prepare, segment, finish)
