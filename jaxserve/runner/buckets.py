"""The fixed shapes of an engine's programs. No other module knows a size.

Only two dimensions have buckets: tokens of a step (T) and sampled positions (S). Rows and pages per row have one
size, because attention reads the real lengths at run time.
"""

from __future__ import annotations

import dataclasses

SCORES_BESIDE_ROWS = 32  # positions that prompt scoring may use in a step while every row decodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShapes:
    """Resolved once; static in every program.

    max_num_rows     R, rows of a step and of the device tables
    pages_per_row    P, pages of a request of full length
    page_size        tokens per page
    num_pages        pages of the pool, the dummy page 0 included
    vocab_size       V
    token_buckets    ascending; the last is the largest step
    sample_buckets   ascending; the last is the most positions sampled in one step
    prefill_samples  a step without decodes takes a bucket of at least so many (deterministic: the last)
    """

    max_num_rows: int
    pages_per_row: int
    page_size: int
    num_pages: int
    vocab_size: int
    token_buckets: tuple[int, ...]
    sample_buckets: tuple[int, ...]
    prefill_samples: int = 1

    @property
    def max_step_tokens(self) -> int:
        return self.token_buckets[-1]

    @property
    def max_num_samples(self) -> int:
        return self.sample_buckets[-1]

    @property
    def mask_words(self) -> int:
        """int32 words of one row's packed token mask."""
        return -(-self.vocab_size // 32)

    def token_bucket(self, num_tokens: int) -> int:
        """The smallest bucket that holds `num_tokens`. Raises ValueError when none does."""
        return _smallest("tokens", self.token_buckets, num_tokens)

    def sample_bucket(self, num_samples: int) -> int:
        """The smallest bucket that holds `num_samples`. Raises ValueError when none does."""
        return _smallest("samples", self.sample_buckets, num_samples)


def token_ladder(max_step_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to `max_step_tokens`, which is always the last.

    A step computes its padding too, so sizes lie closer where steps cost most; below 16 tokens a step is bound by
    reading the weights, and padding is nearly free.
    """
    sizes = []
    for size in _powers_of_two(max_step_tokens):
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < max_step_tokens:
            sizes.append(size * 3 // 2)
    return (*sizes, max_step_tokens)


def sample_ladder(max_num_rows: int, max_step_tokens: int) -> tuple[int, ...]:
    """1, 4, 8, 16, ... up to every row, and one bucket with room for prompt scores beside them. Each size costs
    five programs; two rows cost about what four do, for both are bound by reading the head's weights."""
    most = max_num_rows + min(SCORES_BESIDE_ROWS, max_step_tokens)
    return (*(size for size in _powers_of_two(max_num_rows) if size != 2), max_num_rows, most)


def _powers_of_two(limit: int) -> list[int]:
    """Those below `limit`."""
    return [1 << exponent for exponent in range((limit - 1).bit_length())]


def _smallest(what: str, buckets: tuple[int, ...], count: int) -> int:
    for size in buckets:
        if count <= size:
            return size
    raise ValueError(f"{what} of one step: got {count}; allowed: at most {buckets[-1]}")
