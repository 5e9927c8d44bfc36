"""Decode throughput of DeepSeek-V2 on 8 x H100 by the cost model: tensor-parallel against data-parallel attention.

    python -m benchmarks.dp_attention

SGLang reports up to 1.9 times the decode throughput from DP attention on this model and these machines (v0.4, December
2024: lmsys.org/blog/2024-12-04-sglang-v0-4), without batch sizes. Assumed: weights of one byte a number, latents of
two, the batch that fits the cache (at most --rows), all rows at the given context, peaks and shares of
jaxserve/simulator/devices.py. The last column is the smallest data-parallel batch that gives 1.9 times the throughput
of the largest tensor-parallel one.
"""

from __future__ import annotations

import argparse
import bisect

from jaxserve.simulator.devices import device_named
from jaxserve.simulator.model_shape import load_shape
from jaxserve.simulator.step_cost import Parallel, RooflineCost, decode_load

REPORTED = 1.9


def throughput(cost: RooflineCost, context: int, rows: int) -> float:
    """Tokens per second of steps in which `rows` rows decode at `context` tokens."""
    return rows / cost.seconds(decode_load(rows, rows * context))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="deepseek-v2")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    options = parser.parse_args()
    shape, device = load_shape(options.model, weight_bytes=1.0), device_named(options.device)
    tensor, data = (RooflineCost(shape, device, Parallel(devices=8, attention_ranks=ranks)) for ranks in (1, 8))
    print(f"{options.model}, 8 x {options.device}; cache of {tensor.kv_tokens:,} and {data.kv_tokens:,} tokens")
    print(f"context  TP rows  TP tok/s  DP rows  DP tok/s  DP / TP  at TP's rows  DP rows for {REPORTED}")
    for context in options.contexts:
        rows, more = (min(cost.kv_tokens // context, options.rows) for cost in (tensor, data))
        alone, together = throughput(tensor, context, rows), throughput(data, context, more)
        same = throughput(data, context, rows)
        enough = 1 + bisect.bisect_left(
            range(1, more), REPORTED * alone, key=lambda count: throughput(data, context, count)
        )
        print(
            f"{context:7} {rows:8} {alone:9.0f} {more:8} {together:9.0f} {together / alone:8.2f} {same / alone:13.2f} "
            f"{enough if together >= REPORTED * alone else '-':>15}"
        )


if __name__ == "__main__":
    main()
