"""Decode rows that share pages: which of them read which part of their context together.

Rows whose page tables begin with the same pages (a common prompt, forks of one request) need the same keys and
values, and laying out a tile of them costs more than multiplying it with one row's queries. So the segments that
lie inside the common run are computed once for all of those rows, as one tall matrix, and each row then merges
them with its own segments (Juravsky et al., 2024, arXiv:2402.05099; the kernel's segments are the independent
softmaxes that this needs). A segment's arithmetic does not depend on the rows computed with it, so the result is
bitwise that of computing each row alone.

Groups are found in the page table itself, once a call: whoever fills the table need not know of them.
"""

from __future__ import annotations

from jaxserve.pallas_kernels.cpu_ffi.call_frame import arg, attr, data, dim, jit, load_i32, load_i64, store_i64
from jaxserve.pallas_kernels.paged_attention.cpu_ffi_layout import (
    ARG_LENGTHS,
    ARG_Q,
    ARG_STARTS,
    ARG_TABLE,
    ATTR_CASCADE,
    ATTR_WINDOW,
    SEGMENT,
    page_size_of,
    rows_in_use,
)

# One record per row: segments shared with others (0: none), place in its group, size and first member of the group,
# and the address of the row's unit of kv head 0.
RECORD_RUN, RECORD_PLACE, RECORD_SIZE, RECORD_MEMBERS, RECORD_UNIT = 0, 8, 16, 24, 32
RECORD_BYTES = 40
# Then the rows of all groups, group after group.
_MEMBER_BYTES = 8


@jit
def groups_bytes(rows):
    """Size of the records and members of `rows` rows."""
    return rows * (RECORD_BYTES + _MEMBER_BYTES)


@jit
def record_of(groups, row):
    return groups + row * RECORD_BYTES


@jit
def _whole_segments(frame, row):
    """Segments of a decoding row that end before its newest token; 0 for any other row."""
    starts, lengths = data(arg(frame, ARG_STARTS)), data(arg(frame, ARG_LENGTHS))
    first, stop = load_i32(starts, 4 * row), load_i32(starts, 4 * row + 4)
    if stop - first != 1 or first < 0 or stop > dim(arg(frame, ARG_Q), 0):  # damaged: it has no unit
        return 0
    capacity = dim(arg(frame, ARG_TABLE), 1) * page_size_of(frame)
    return max(min(load_i32(lengths, 4 * row), capacity) - 1, 0) // SEGMENT


@jit
def _common_segments(frame, row, other, limit):
    """How many of the first `limit` segments lie on the same pages in both rows."""
    page_size, width = page_size_of(frame), dim(arg(frame, ARG_TABLE), 1)
    table = data(arg(frame, ARG_TABLE))
    a, b = table + row * width * 4, table + other * width * 4
    pages = (limit * SEGMENT + page_size - 1) // page_size
    same = 0
    while same < pages and load_i32(a, 4 * same) == load_i32(b, 4 * same):
        same += 1
    return min(limit, same * page_size // SEGMENT)


@jit
def find_groups(frame, groups, max_run):
    """Fill the records. A group's run is the one that saves most: rows beyond the first, times segments."""
    rows = rows_in_use(frame)
    members = groups + rows * RECORD_BYTES
    for row in range(rows):
        for field in range(0, RECORD_BYTES, 8):
            store_i64(record_of(groups, row), field, 0)
    if load_i32(attr(frame, ATTR_CASCADE), 0) == 0 or load_i32(attr(frame, ATTR_WINDOW), 0) > 0:
        return  # with a window each row's context begins elsewhere
    for leader in range(rows):
        limit = min(_whole_segments(frame, leader), max_run)
        if limit == 0 or load_i64(record_of(groups, leader), RECORD_RUN) != 0:
            continue
        # For now a record's place holds what its row has in common with the leader.
        highest = 0
        for row in range(leader + 1, rows):
            record, common = record_of(groups, row), 0
            if load_i64(record, RECORD_RUN) == 0:
                common = _common_segments(frame, leader, row, min(limit, _whole_segments(frame, row)))
                store_i64(record, RECORD_PLACE, common)
            highest = max(highest, common)
        best = run = 0
        for length in range(1, highest + 1):
            count = 0
            for row in range(leader + 1, rows):
                record = record_of(groups, row)
                count += load_i64(record, RECORD_RUN) == 0 and load_i64(record, RECORD_PLACE) >= length
            if count * length > best:
                best, run = count * length, length
        size = 0
        for row in range(leader, rows):
            record = record_of(groups, row)
            if load_i64(record, RECORD_RUN) != 0:
                continue
            if run > 0 and (row == leader or load_i64(record, RECORD_PLACE) >= run):
                store_i64(members, 8 * size, row)
                size += 1
            store_i64(record, RECORD_PLACE, 0)
        for place in range(size):
            record = record_of(groups, load_i64(members, 8 * place))
            store_i64(record, RECORD_RUN, run)
            store_i64(record, RECORD_PLACE, place)
            store_i64(record, RECORD_SIZE, size)
            store_i64(record, RECORD_MEMBERS, members)
        members += 8 * size
