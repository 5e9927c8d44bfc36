"""Cost of the radix tree at the size of a large server: match, insert and evict of a long prompt.

    python benchmarks/radix.py [--tokens 131072] [--pages 100000] [--page-size 16] [--repeats 50] [--json FILE]

The tree is filled with conversations that share prefixes. The long prompt is cached in two ways: as one edge, and with
another request branching off after every 256 tokens, so that a match walks hundreds of nodes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from jaxserve.cache.radix_tree import RadixTree

BRANCH_TOKENS = 256
VOCAB = 49152


def fill(tree: RadixTree, num_pages: int, rng: np.random.Generator, first_page: int) -> int:
    """Conversations of 64 pages, each of which continues an earlier one half of the time; returns the next page id."""
    size, page = tree.page_size, first_page
    history: list[np.ndarray] = []
    while tree.num_pages < num_pages:
        count = min(64, num_pages - tree.num_pages)
        tokens = rng.integers(0, VOCAB, 64 * size, dtype=np.int32)
        if history and rng.random() < 0.5:
            shared = int(rng.integers(1, 64)) * size
            tokens[:shared] = history[int(rng.integers(len(history)))][:shared]
        history.append(tokens)
        handle = tree.match("", tokens)
        missing = min(64 - handle.num_tokens // size, count)
        start = handle.num_tokens
        tree.insert(handle, tokens[start : start + missing * size], np.arange(page, page + missing, dtype=np.int32))
        page += missing
    return page


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def summary(times: list[float]) -> dict[str, float]:
    return {"median_ms": round(1e3 * float(np.median(times)), 3), "worst_ms": round(1e3 * max(times), 3)}


def measure(num_tokens: int, num_pages: int, page_size: int, repeats: int, branches: bool) -> dict[str, object]:
    rng = np.random.default_rng(0)
    tree = RadixTree(page_size)
    prompt = rng.integers(0, VOCAB, num_tokens // page_size * page_size, dtype=np.int32)
    count = min(len(prompt) // page_size, num_pages // 2)
    cached = prompt[: count * page_size]
    page = 1
    if branches:
        for end in range(BRANCH_TOKENS, len(cached), BRANCH_TOKENS):
            other = cached[: end // page_size * page_size + page_size].copy()
            other[-page_size:] = rng.integers(0, VOCAB, page_size)
            page += insert_pages(tree, other, page)
    page += insert_pages(tree, cached, page)
    page = fill(tree, max(num_pages, tree.num_pages), rng, page)
    found = tree.match("", prompt)
    if found.num_tokens < len(cached):
        raise RuntimeError(f"{found.num_tokens} tokens matched, {len(cached)} cached")
    nodes, node = 0, found.node
    while node.parent is not None:
        nodes, node = nodes + 1, node.parent

    match = [seconds(lambda: tree.match("", prompt)) for _ in range(repeats)]
    # Each turn evicts pages of the conversations (least recently used) and inserts as many, so the size stays.
    turns = min(repeats, max(8, (tree.num_pages - count) // count))
    moved = min(count, (tree.num_pages - count) // turns)
    evict: list[float] = []
    insert: list[float] = []
    for turn in range(turns):
        evict.append(seconds(lambda: tree.evict(moved)))
        fresh = rng.integers(0, VOCAB, moved * page_size, dtype=np.int32)
        pages = np.arange(page + turn * moved, page + (turn + 1) * moved, dtype=np.int32)
        insert.append(seconds(lambda tokens=fresh, new=pages: tree.insert(tree.root(""), tokens, new)))
    report: dict[str, object] = {
        "page_size": page_size,
        "pages_in_tree": tree.num_pages,
        "prompt_tokens": len(prompt),
        "cached_tokens": found.num_tokens,
        "nodes_on_path": nodes,
        "match": summary(match),
        "pages_moved": moved,
        "insert": summary(insert),
        "evict": summary(evict),
    }
    tree.check_integrity()
    return report


def insert_pages(tree: RadixTree, tokens: np.ndarray, page: int) -> int:
    """Insert from the root with new page ids from `page` on; returns how many of them the tree took."""
    handle = tree.match("", tokens)
    rest = tokens[handle.num_tokens :]
    count = len(rest) // tree.page_size
    tree.insert(handle, rest, np.arange(page, page + count, dtype=np.int32))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--page-size", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json")
    args = parser.parse_args()
    reports = []
    for page_size in args.page_size:
        for branches in (False, True):
            report = measure(args.tokens, args.pages, page_size, args.repeats, branches)
            reports.append(report)
            print("  ".join(f"{name} {value}" for name, value in report.items()), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(reports, file, indent=1)


if __name__ == "__main__":
    main()
