"""Reading a file's bytes into arrays that a device can take over without a copy. No jax."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

_ALIGNMENT = 64  # XLA:CPU takes over memory that starts at a multiple
_CHUNK_BYTES = 8 << 20


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose memory starts at a multiple of 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def read_array(path: Path, start: int, shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype) -> np.ndarray:
    """A fresh array [shape] of `dtype` from the `stored` values behind byte `start`.

    Bytes are read, not mapped: a mapped file counts as memory of the process until the map is gone. Values of another
    dtype are converted a few megabytes at a time. Raises ValueError naming the file when it ends early.
    """
    out = aligned_empty(shape, dtype)
    flat = out.reshape(-1)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        if stored == dtype:
            _fill(file, memoryview(flat.view(np.uint8)), path)
            return out
        step = _CHUNK_BYTES // stored.itemsize
        chunk = np.empty(min(step, flat.size), stored)
        for at in range(0, flat.size, step):
            part = chunk[: flat.size - at]
            _fill(file, memoryview(part.view(np.uint8)), path)
            flat[at : at + len(part)] = part
    return out


def _fill(file: object, target: memoryview, path: Path) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{path}: the file ends {len(target) - done} bytes early: it is truncated")
        done += count
