"""Block sizes of the GPU kernels as data: one file per card under tuned/, and the search that makes them on a card.

A file says where its values come from: "modelled" (shared memory, registers and occupancy of the compiled kernels;
no card has run them) or "measured" (timed on the card by `jaxserve tune`, with date and versions). A measured file of
one's own goes to $JAXSERVE_TUNED (a folder) and takes precedence over the one that is shipped.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "tuned"
FALLBACK = "h200"
HEAD_DIMS = (64, 128, 192, 256)
_DECODE = {"stages": (2, 3, 4), "min_blocks": (4, 8, 16), "waves": (1, 2, 4)}
_PREFILL = {"keys": (64, 128), "stages": (2, 3, 4)}


def card_name(device_kind: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100"."""
    match = re.search(r"\b([HB]\d{3})\b", device_kind)
    return match[1].lower() if match else FALLBACK


@functools.cache
def block_sizes(card: str, operation: str, head_dim: int) -> dict[str, Any]:
    """{"decode": {...}, "prefill": {...}} of `operation` for a card, head_dim a multiple of 64. A card without a file
    gets the values of FALLBACK."""
    for folder in filter(None, (os.environ.get("JAXSERVE_TUNED"), SHIPPED)):
        for name in (card, FALLBACK):
            path = Path(folder) / f"{name}.json"
            if path.is_file():
                return _checked(json.loads(path.read_text()), path)["operations"][operation][str(head_dim)]
    raise FileNotFoundError(f"no block sizes for {card} or {FALLBACK} in {SHIPPED}")


def _checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    if content.get("source") not in ("modelled", "measured"):
        raise ValueError(f"{path}: source: got {content.get('source')!r}; allowed: modelled, measured")
    return content


def decode_smem(head_dim: int, stages: int, group: int = 8) -> int:
    """Bytes of shared memory of the decode kernel, barriers left out: queries, rings of K and V, weights, results."""
    return 2 * (group * head_dim + 2 * stages * 64 * head_dim + group * 64) + 4 * (head_dim + 1) * group


def prefill_smem(head_dim: int, keys: int, stages: int) -> int:
    """The same of the prefill kernel: queries or results, whichever is larger, rings of K and V."""
    return max(2 * 2 * 64 * head_dim, 4 * 2 * 64 * min(head_dim, 128)) + 2 * 2 * stages * keys * head_dim + 1024


def candidates(head_dim: int, kind: str, smem_limit: int = 232448 - 4096) -> Iterator[dict[str, int]]:
    """Block sizes worth timing: those that fit one block's shared memory and, with wide heads, the registers."""
    grid = _DECODE if kind == "decode" else _PREFILL
    for values in itertools.product(*grid.values()):
        sizes = dict(zip(grid, values))
        if kind == "decode":
            sizes["blocks_per_sm"] = max(1, min(4, smem_limit // decode_smem(head_dim, sizes["stages"])))
            fits = decode_smem(head_dim, sizes["stages"]) <= smem_limit
        else:
            fits = prefill_smem(head_dim, **sizes) <= smem_limit and (head_dim <= 128 or sizes["keys"] == 64)
        if fits:
            yield sizes


def tune(folder: Path, *, timer: Callable[[int, str, dict[str, int]], float] | None = None) -> Path:
    """Time every candidate on the GPU at hand and write `folder`/<card>.json. Returns the path.

    timer: (head_dim, "decode" or "prefill", sizes) -> seconds; the default runs the kernel on random data.
    Raises ValueError where there is no Hopper GPU.
    """
    import jax
    from jaxserve.pallas_kernels.backend import mosaic_available

    if timer is None:
        is_available, reason = mosaic_available()
        if not is_available:
            raise ValueError(f"tune: the GPU kernels do not run here: {reason}")
        timer = _time_on_device
    found: dict[str, Any] = {}
    for head_dim in HEAD_DIMS:
        best = {}
        for kind in ("decode", "prefill"):
            times = [
                (timer(head_dim, kind, sizes), index, sizes) for index, sizes in enumerate(candidates(head_dim, kind))
            ]
            seconds, _, sizes = min(times)
            best[kind] = sizes | {"microseconds": round(seconds * 1e6, 1)}
        found[str(head_dim)] = best
    kind = jax.devices()[0].device_kind
    content = {
        "card": kind, "source": "measured", "date": str(datetime.date.today()), "jax": jax.__version__,
        "operations": {"paged_attention": found},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card_name(kind)}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _time_on_device(head_dim: int, kind: str, sizes: dict[str, int]) -> float:
    """64 rows that decode at 4096 tokens, or 4 chunks of 512 behind 8192, with 32 query and 8 kv heads."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jaxserve.pallas_kernels.paged_attention.mosaic import options_from, paged_attention_mosaic
    from jaxserve.pallas_kernels.paged_attention.spec import AttentionSpec
    from jaxserve.pallas_kernels.ragged import RaggedBatch

    spec = AttentionSpec(32, 8, head_dim, head_dim**-0.5)
    rows, cached, new = (64, 4096, 1) if kind == "decode" else (4, 8192, 512)
    tokens, width = rows * new, -(-(cached + new) // 64)
    row = np.repeat(np.arange(rows), new)
    positions = cached + np.tile(np.arange(new), rows)
    table = np.random.default_rng(0).permutation(rows * width).reshape(rows, width) + 1
    slots = table[row, positions // 64] * 64 + positions % 64
    start, lengths = np.arange(rows + 1) * new, np.full(rows, cached + new)
    fields = (positions, row, slots, start, lengths, table, np.array([rows]))
    batch = RaggedBatch(*(jnp.asarray(field, jnp.int32) for field in fields))
    options = options_from(block_sizes(FALLBACK, "paged_attention", head_dim) | {kind: sizes})
    pages = jnp.zeros((rows * width + 1, 8, 2, 64, head_dim), jnp.bfloat16)
    q = jnp.ones((tokens, 32, head_dim))
    kv = jnp.ones((tokens, 8, head_dim))
    step = jax.jit(
        lambda pages: paged_attention_mosaic(q, kv, kv, pages, batch, spec, options=options), donate_argnums=0
    )
    samples = []
    for _ in range(6):
        start_time = time.perf_counter()
        for _ in range(5):
            out, pages = step(pages)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start_time) / 5)
    return statistics.median(samples[1:])
