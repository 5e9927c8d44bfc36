"""Names of cached pages that mean the same in every process. No jax.

A page is named by a hash of its tokens and of the page before it, so that one number stands for a whole prefix.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def namespace_hash(namespace: str) -> int:
    """What stands before the first page of a namespace. 64 bits."""
    return _hash(namespace.encode())


def hash_pages(parent: int, tokens: np.ndarray, page_size: int) -> list[int]:
    """The hash of each whole page of int32 `tokens`, which follow the page (or namespace) with hash `parent`."""
    data = np.ascontiguousarray(tokens, np.int32).tobytes()
    size = 4 * page_size
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        parent = _hash(parent.to_bytes(8, "little") + data[start : start + size])
        hashes.append(parent)
    return hashes


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
