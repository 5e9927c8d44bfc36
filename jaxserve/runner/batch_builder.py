"""A step's rows -> one flat int32 array, and back into StepInputs inside the program.

Every argument of a program costs host time, so a step's inputs travel as one array whose sections lie at fixed
offsets. The layout is written once and used by both sides.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from jaxserve.models.contract import StepInputs
from jaxserve.pallas_kernels.ragged import RaggedBatch
from jaxserve.runner.buckets import StepShapes
from jaxserve.scheduler.decision import LAST_TOKEN, StepDecision

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Where each section of a step's inputs lies. Sections of fixed size come first, those of T tokens last, so
    that one buffer serves every bucket: a step uses its first `size(T)` words.

    table_row [R] names the place in the device tables of each row of the step; unused rows 0. pooling [R] is
    RowWork.pooling.
    """

    shapes: StepShapes

    def sections(self, num_tokens: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """name -> (offset in words, shape) for a bucket of `num_tokens`."""
        rows, pages = self.shapes.max_num_rows, self.shapes.pages_per_row
        wanted: list[tuple[str, tuple[int, ...]]] = [
            ("page_table", (rows, pages)),
            ("query_start", (rows + 1,)),
            ("seq_len", (rows,)),
            ("table_row", (rows,)),
            ("pooling", (rows,)),
            ("num_rows", (1,)),
            ("sample_index", (self.shapes.max_num_samples,)),
            ("token_ids", (num_tokens,)),
            ("positions", (num_tokens,)),
            ("row_of_token", (num_tokens,)),
            ("write_slot", (num_tokens,)),
        ]
        found: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for name, shape in wanted:
            found[name] = (offset, shape)
            offset += math.prod(shape)
        return found

    def size(self, num_tokens: int) -> int:
        """Words of a step with a bucket of `num_tokens`."""
        offset, shape = self.sections(num_tokens)["write_slot"]
        return offset + math.prod(shape)

    def split(self, packed: Array, num_tokens: int) -> dict[str, Array]:
        """Views (numpy) or static slices (jax) of `packed`, by name."""
        return {
            name: packed[offset : offset + math.prod(shape)].reshape(shape)
            for name, (offset, shape) in self.sections(num_tokens).items()
        }


def unpack(layout: StepLayout, packed: jax.Array, num_tokens: int) -> tuple[StepInputs, jax.Array, jax.Array]:
    """Inside a program: the packed step -> (StepInputs whose token_ids may still be LAST_TOKEN, table_row [R],
    pooling [R])."""
    part = layout.split(packed, num_tokens)
    batch = RaggedBatch(
        positions=part["positions"],
        row_of_token=part["row_of_token"],
        write_slot=part["write_slot"],
        query_start=part["query_start"],
        seq_len=part["seq_len"],
        page_table=part["page_table"],
        num_rows=part["num_rows"],
    )
    return StepInputs(part["token_ids"], batch, part["sample_index"]), part["table_row"], part["pooling"]


class StepBuffer:
    """One staging buffer. Its owner must not touch it between build() and the end of the step that reads it: on
    CPU the device may read this very memory."""

    def __init__(self, layout: StepLayout) -> None:
        self.words = np.zeros(layout.size(layout.shapes.max_step_tokens), np.int32)
        self.pages_used = np.zeros(layout.shapes.max_num_rows, np.int64)  # filled entries of each page table row
        self.views = {size: layout.split(self.words, size) for size in layout.shapes.token_buckets}


class BatchBuilder:
    """Fills step buffers. Raises ValueError, before anything reaches the device, for a decision that does not fit
    the shapes or names a page, slot or row that does not exist."""

    def __init__(self, shapes: StepShapes) -> None:
        self.shapes = shapes
        self.layout = StepLayout(shapes)

    def build(self, decision: StepDecision, buffer: StepBuffer, *, at_least: int = 1) -> tuple[np.ndarray, int]:
        """Returns (the packed words to hand to the program, its token bucket, which holds `at_least` tokens)."""
        rows, shapes = decision.rows, self.shapes
        if not 0 < len(rows) <= shapes.max_num_rows:
            raise ValueError(f"rows of one step: got {len(rows)}; allowed: 1 to {shapes.max_num_rows}")
        count = np.array([len(row.token_ids) for row in rows], np.int32)
        start = np.array([row.start for row in rows], np.int32)
        total = int(count.sum())
        bucket = shapes.token_bucket(max(total, at_least))
        out = buffer.views[bucket]
        ends = np.cumsum(count, dtype=np.int32)
        self._fill_rows(decision, buffer, out, start, count, ends)
        self._fill_tokens(decision, out, start, count, ends, total)
        self._fill_samples(decision, out, total)
        return buffer.words[: self.layout.size(bucket)], bucket

    def build_idle(self, buffer: StepBuffer, bucket: int) -> np.ndarray:
        """The packed words of a step without rows: padding, which writes no page and attends to nothing."""
        out = buffer.views[bucket]
        for index in np.flatnonzero(buffer.pages_used).tolist():
            out["page_table"][index, : buffer.pages_used[index]] = 0
        buffer.pages_used[:] = 0
        for name in ("query_start", "seq_len", "table_row", "pooling", "num_rows", "sample_index"):
            out[name][...] = 0
        self._fill_unused_tokens(out, 0)
        return buffer.words[: self.layout.size(bucket)]

    def _fill_rows(
        self,
        decision: StepDecision,
        buffer: StepBuffer,
        out: dict[str, np.ndarray],
        start: np.ndarray,
        count: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        rows, shapes = decision.rows, self.shapes
        num_rows = len(rows)
        if count.min() < 1 or start.min() < 0:
            raise ValueError("rows of one step: each needs at least one token and a start of 0 or more")
        out["query_start"][0] = 0
        out["query_start"][1 : num_rows + 1] = ends
        out["query_start"][num_rows + 1 :] = ends[-1]
        out["seq_len"][:num_rows] = start + count
        out["seq_len"][num_rows:] = 0
        table_row = np.array([row.row for row in rows], np.int32)
        if table_row.min() < 0 or table_row.max() >= shapes.max_num_rows:
            raise ValueError(f"row: got {table_row.tolist()}; allowed: 0 to {shapes.max_num_rows - 1}")
        out["table_row"][:num_rows] = table_row
        out["table_row"][num_rows:] = 0
        out["pooling"][:num_rows] = [row.pooling for row in rows]
        out["pooling"][num_rows:] = 0
        out["num_rows"][0] = num_rows
        needed = -(-(start + count) // shapes.page_size)
        if needed.max() > shapes.pages_per_row:
            raise ValueError(
                f"tokens of one row: got {int((start + count).max())}; "
                f"allowed: at most {shapes.pages_per_row * shapes.page_size}"
            )
        table, used = out["page_table"], buffer.pages_used
        for index, (row, size) in enumerate(zip(rows, needed.tolist())):
            if len(row.pages) < size:
                raise ValueError(f"pages of request {row.request_id}: got {len(row.pages)}; allowed: {size} or more")
            table[index, :size] = row.pages[:size]
        # Entries that an earlier step left behind go back to the dummy page.
        longer = np.flatnonzero(used[:num_rows] > needed)
        for index in longer.tolist():
            table[index, needed[index] : used[index]] = 0
        for index in range(num_rows, int(np.count_nonzero(used))):
            table[index, : used[index]] = 0
        used[:num_rows] = needed
        used[num_rows:] = 0
        filled = table[:num_rows, : needed.max()]
        if filled.min() < 0 or filled.max() >= shapes.num_pages:
            raise ValueError(
                f"pages: got {int(filled.min())} to {int(filled.max())}; allowed: 0 to {shapes.num_pages - 1}"
            )

    def _fill_tokens(
        self,
        decision: StepDecision,
        out: dict[str, np.ndarray],
        start: np.ndarray,
        count: np.ndarray,
        ends: np.ndarray,
        total: int,
    ) -> None:
        shapes = self.shapes
        tokens, positions = out["token_ids"], out["positions"]
        rows_of, slots = out["row_of_token"], out["write_slot"]
        np.concatenate([row.token_ids for row in decision.rows], out=tokens[:total], casting="same_kind")
        if tokens[:total].min() < LAST_TOKEN or tokens[:total].max() >= shapes.vocab_size:
            raise ValueError(
                f"token_ids: got {int(tokens[:total].min())} to {int(tokens[:total].max())}; "
                f"allowed: {LAST_TOKEN} to {shapes.vocab_size - 1}"
            )
        num_decodes = decision.num_decodes
        if (count[:num_decodes] != 1).any() or (tokens[num_decodes:total] < 0).any():
            raise ValueError("rows of one step: decoding rows come first, one token each; only they may be LAST_TOKEN")
        row_index = np.repeat(np.arange(len(count), dtype=np.int32), count)
        positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(start - (ends - count), count)
        page_index, offset = np.divmod(positions[:total], shapes.page_size)
        page = out["page_table"][row_index, page_index]
        if page.min() < 1:
            raise ValueError(f"pages written: got {int(page.min())}; allowed: 1 to {shapes.num_pages - 1}")
        rows_of[:total] = row_index
        slots[:total] = page * shapes.page_size + offset
        self._fill_unused_tokens(out, total)

    def _fill_unused_tokens(self, out: dict[str, np.ndarray], total: int) -> None:
        out["token_ids"][total:] = 0
        out["positions"][total:] = 0
        out["row_of_token"][total:] = self.shapes.max_num_rows
        out["write_slot"][total:] = self.shapes.num_pages * self.shapes.page_size

    def _fill_samples(self, decision: StepDecision, out: dict[str, np.ndarray], total: int) -> None:
        samples = decision.samples
        index = out["sample_index"]
        self.shapes.sample_bucket(len(samples))
        index[len(samples) :] = 0
        if samples:
            index[: len(samples)] = [sample.token_index for sample in samples]
            if index.min() < 0 or index.max() >= total:
                raise ValueError(
                    f"token_index: got {int(index.min())} to {int(index.max())}; allowed: 0 to {total - 1}"
                )
