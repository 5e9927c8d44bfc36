"""Block sizes of the GPU kernels as data: one file per card under tuned/, and the search that makes them on a card.

A file says where its values come from: "modelled" (shared memory, registers and occupancy of the compiled kernels;
no card has run them) or "measured" (timed on the card by `jaxserve tune`, with date and versions). A measured file of
one's own goes to $JAXSERVE_TUNED (a folder) and takes precedence over the one that is shipped.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "tuned"
FALLBACK = "h200"
HEAD_DIMS = (64, 128, 192, 256)
# operation -> shape classes -> kinds of block sizes. Classes are head sizes (padded), what the outputs are a multiple
# of, and whether rows are few or many.
OPERATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "paged_attention": {str(head_dim): ("decode", "prefill") for head_dim in HEAD_DIMS},
    "mla_attention": {"any": ("blocks",)},
    "grouped_matmul": {"256": ("blocks",), "128": ("blocks",)},
    "quant_matmul": {"few": ("blocks",), "many": ("blocks",)},
}
_GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "decode": {"stages": (2, 3, 4), "min_blocks": (4, 8, 16), "waves": (1, 2, 4)},
    "prefill": {"keys": (64, 128), "stages": (2, 3, 4)},
    "mla_attention": {"stages": (2,), "min_blocks": (4, 8, 16), "waves": (1, 2, 4)},
    "grouped_matmul": {"outputs": (64, 128), "inputs": (64,), "stages": (2, 3, 4, 6)},
    "quant_matmul": {"outputs": (64, 128), "stages": (2, 3, 4, 6)},
}
_SMEM = 232448 - 4096  # of one block of attention, barriers and scratch left out
_PRODUCT_SMEM = 232448 - 1024  # and of a product, which has no scratch


def card_name(device_kind: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100"."""
    match = re.search(r"\b([HB]\d{3})\b", device_kind)
    return match[1].lower() if match else FALLBACK


@functools.cache
def block_sizes(card: str, operation: str, shape_class: int | str) -> dict[str, Any]:
    """{kind: {...}} of `operation` for a card; see OPERATIONS. A card without a file gets the values of FALLBACK, as
    does an operation that a file knows nothing of."""
    for folder in filter(None, (os.environ.get("JAXSERVE_TUNED"), SHIPPED)):
        for name in (card, FALLBACK):
            path = Path(folder) / f"{name}.json"
            if path.is_file():
                operations = _checked(json.loads(path.read_text()), path)["operations"]
                if operation in operations:
                    return operations[operation][str(shape_class)]
    raise FileNotFoundError(f"no block sizes of {operation} for {card} or {FALLBACK} in {SHIPPED}")


def default_blocks(cls: Any, operation: str, shape_class: str) -> Any:
    """An instance of `cls`, the block sizes of an operation with one kind of them, for the device at hand."""
    import jax

    sizes = block_sizes(card_name(jax.devices()[0].device_kind), operation, shape_class)["blocks"]
    # What else stands there (times) is left out.
    return cls(**{field.name: sizes[field.name] for field in dataclasses.fields(cls) if field.name in sizes})


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


def grouped_smem(outputs: int, inputs: int, stages: int) -> int:
    """The same of the products with experts: rings of rows and weights, results."""
    return stages * 2 * inputs * (64 + 2 * outputs) + 2 * 64 * outputs * 4


def quant_smem(tile: int, outputs: int, stages: int) -> int:
    """The same of the products with quantised weights of 8 bits and a scale for 16 inputs: rings of rows, codes and
    scales."""
    return stages * (2 * 128 * tile + 2 * outputs * 128 + 2 * outputs * 8 * 4)


def candidates(operation: str, shape_class: str, kind: str) -> Iterator[dict[str, int]]:
    """Block sizes worth timing: those that fit one block's shared memory and, with wide heads, the registers."""
    grid = _GRIDS.get(kind) or _GRIDS[operation]
    for values in itertools.product(*grid.values()):
        sizes = dict(zip(grid, values))
        if kind == "decode":
            used = decode_smem(int(shape_class), sizes["stages"])
            sizes["blocks_per_sm"] = max(1, min(4, _SMEM // used))
            fits = used <= _SMEM
        elif kind == "prefill":
            fits = prefill_smem(int(shape_class), **sizes) <= _SMEM and (int(shape_class) <= 128 or sizes["keys"] == 64)
        elif operation == "grouped_matmul":
            fits = grouped_smem(**sizes) <= _PRODUCT_SMEM and int(shape_class) % (2 * sizes["outputs"]) == 0
        elif operation == "quant_matmul":
            # Few rows, or outputs that two warpgroups can share in parts of 64 only.
            fits = quant_smem(128, **sizes) <= _PRODUCT_SMEM and (shape_class == "many" or sizes["outputs"] == 64)
        else:
            fits = True
        if fits:
            yield sizes


def tune(folder: Path, *, timer: Callable[[str, str, str, dict[str, int]], float] | None = None) -> Path:
    """Time every candidate on the GPU at hand and write `folder`/<card>.json. Returns the path.

    timer: (operation, shape class, kind, sizes) -> seconds; the default runs the kernels on random data.
    Raises ValueError where there is no Hopper GPU.
    """
    import jax
    from jaxserve.pallas_kernels.backend import mosaic_available

    if timer is None:
        is_available, reason = mosaic_available()
        if not is_available:
            raise ValueError(f"tune: the GPU kernels do not run here: {reason}")
        from jaxserve.pallas_kernels.tuning_cases import seconds

        timer = seconds
    found: dict[str, Any] = {}
    for operation, classes in OPERATIONS.items():
        found[operation] = {}
        for shape_class, kinds in classes.items():
            best = {}
            for kind in kinds:
                tried = enumerate(candidates(operation, shape_class, kind))
                used, _, sizes = min((timer(operation, shape_class, kind, sizes), i, sizes) for i, sizes in tried)
                best[kind] = sizes | {"microseconds": round(used * 1e6, 1)}
            found[operation][shape_class] = best
    card = jax.devices()[0].device_kind
    content = {
        "card": card, "source": "measured", "date": str(datetime.date.today()), "jax": jax.__version__,
        "operations": found,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card_name(card)}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
