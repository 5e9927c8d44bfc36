"""The description of one ragged batch that every attention kernel takes."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedBatch:
    """Which tokens belong to which row, where their K/V go and where the rows' cached K/V lie.

    T tokens of R rows lie flat, one row after the other, rows that decode (one token each) first.
    All arrays are int32. Shapes are static; the filled part is given by `num_rows` and `query_start`.

    positions     [T]     position of each token in its sequence; unused tokens 0
    row_of_token  [T]     row of each token; unused tokens R (an index past the end)
    write_slot    [T]     page * page_size + offset where the token's K/V are written; unused tokens hold
                          num_pages * page_size (past the end: dropped). Never negative. No slot twice.
    query_start   [R + 1] row r owns tokens query_start[r] : query_start[r + 1]; unused rows repeat the total
    seq_len       [R]     tokens of the row in the cache once this step's have been written; unused rows 0.
                          Row r's first token of this step has position seq_len[r] - num_tokens(r).
    page_table    [R, P]  pages of the row in order; unused entries 0 (the dummy page)
    num_rows      [1]     rows in use

    Causal: a token at position p attends to positions 0..p of its row, those of this step included.
    """

    positions: jax.Array
    row_of_token: jax.Array
    write_slot: jax.Array
    query_start: jax.Array
    seq_len: jax.Array
    page_table: jax.Array
    num_rows: jax.Array
