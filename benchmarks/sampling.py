"""Time of the sampling programs beside a step: milliseconds per call on the machine at hand.

    python benchmarks/sampling.py [--rows 16 32] [--vocab 49152] [--json FILE]

Logits are normal. With the default spread the nucleus of top_p 0.9 holds thousands of tokens, more than the
candidate blocks cover: the dearest case. The table gives the median over --repeat calls.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runner import sampling, step
from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.sample_builder import SampleBuilder, StagedSamples
from jaxserve.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from jaxserve.scheduler.decision import SampleWork

SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("temperature 0.8", {"temperature": 0.8}),
    ("top_k 50", {"top_k": 50}),
    ("top_p 0.9", {"top_p": 0.9}),
    ("top_k 50, top_p 0.9", {"top_k": 50, "top_p": 0.9}),
    ("top_k 5000", {"top_k": 5000}),
    ("presence 0.5, top_p 0.9", {"presence_penalty": 0.5, "top_p": 0.9}),
    ("allowed ids, greedy", {"temperature": 0.0, "allowed_token_ids": tuple(range(100))}),
)


def measure(call: Callable[[], Any], repeat: int) -> float:
    """Median milliseconds."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def programs(rows: int, vocab_size: int, spread: float) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) of every setting. Nothing is donated, so that a call can be repeated."""
    shapes = StepShapes(
        max_num_rows=rows, pages_per_row=1, page_size=1, num_pages=2, vocab_size=vocab_size,
        token_buckets=(rows,), sample_buckets=(rows,),
    )  # fmt: skip
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((rows, vocab_size)) * spread, jnp.float32)
    last_token = jnp.zeros((rows,), jnp.int32)
    counts = jnp.zeros((rows, vocab_size), jnp.int16)
    bias = jnp.zeros((rows, vocab_size), jnp.float32)
    branch = jax.devices()[0].platform == "cpu"
    adjust = jax.jit(functools.partial(step.adjust, rows))
    greedy = jax.jit(functools.partial(step.sample_greedy, rows))
    random_ = jax.jit(functools.partial(step.sample_random, rows, branch))
    count = jax.jit(functools.partial(step.count, rows))

    def sample(staged: StagedSamples) -> Any:
        given = logits
        if staged.mask is not None:
            given = adjust(logits, staged.packed, counts, bias, staged.mask, last_token, staged.forbidden)
        tokens, table = (random_ if staged.is_random else greedy)(given, staged.packed, last_token)
        return tokens, table, count(counts, staged.packed, tokens) if staged.counts_tokens else None

    for name, options in SETTINGS:
        builder = SampleBuilder(shapes, frozenset())
        params = SamplingParams(**options)
        samples = tuple(SampleWork(row, row, row, 17, row, 3, params) for row in range(rows))
        builder.adopt(samples)
        yield name, functools.partial(sample, builder.build(samples))
    yield (
        "logprobs",
        functools.partial(
            jax.jit(sampling.token_logprobs), logits, last_token, np.zeros(rows * MAX_LOGPROB_TOKEN_IDS, np.int32)
        ),
    )
    yield "jnp.argmax, to compare", functools.partial(jax.jit(lambda x: jnp.argmax(x, axis=-1)), logits)
    yield "jnp.sort, to compare", functools.partial(jax.jit(lambda x: jnp.sort(x, axis=-1)), logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--json", help="write the table to this file too")
    options = parser.parse_args()
    print(f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}, vocabulary {options.vocab}")
    table: dict[str, dict[str, float]] = {}
    for rows in options.rows:
        for name, call in programs(rows, options.vocab, options.spread):
            table.setdefault(name, {})[str(rows)] = measure(call, options.repeat)
    print(f"{'milliseconds':36s}" + "".join(f"{rows:>4d} rows" for rows in options.rows))
    for name, cells in table.items():
        print(f"{name:36s}" + "".join(f"{value:9.2f}" for value in cells.values()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"vocab": options.vocab, "spread": options.spread, "milliseconds": table}, file, indent=1)


if __name__ == "__main__":
    main()
