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
    """

    max_num_rows: int
    pages_per_row: int
    page_size: int
    num_pages: int
    vocab_size: int
    token_buckets: tuple[int, ...]
    sample_buckets: tuple[int, ...]

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


def ladder(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to `largest`, which is always the last.

    Steps of at most a half above 16 bound the padding at a third of a step (a quarter on average between 16 and
    `largest`); each bucket costs one compilation at the first start only.
    """
    sizes = []
    size = 1
    while size < largest:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < largest:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, largest)


def sample_ladder(max_num_rows: int, max_step_tokens: int) -> tuple[int, ...]:
    """Buckets of sampled positions: every row, and room for prompt scores beside them."""
    rows = ladder(max_num_rows)
    most = max_num_rows + min(SCORES_BESIDE_ROWS, max_step_tokens)
    return rows if most == max_num_rows else (*rows, most)


def _smallest(what: str, buckets: tuple[int, ...], count: int) -> int:
    for size in buckets:
        if count <= size:
            return size
    raise ValueError(f"{what} of one step: got {count}; allowed: at most {buckets[-1]}")
