"""Expert layers on CPU: the forms of grouped products against each other, whole layers with routing and sorting.

    python benchmarks/experts.py                                   64 experts, 8 per token
    python benchmarks/experts.py --tokens 1 16 256 --experts 128

Forms are timed in turn, round by round; medians are printed. Tokens choose experts at random, so that T tokens need
about E (1 - (1 - k / E) ** T) experts' weights. Every layer has weights of its own: they come from memory.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from cpu_kernels import median_seconds, read_bandwidth
from jaxserve.models.config import MoEConfig
from jaxserve.models.moe import ExpertWeights, combine, compute_experts, route, sort_by_expert
from jaxserve.pallas_kernels.backend import cpu_ffi_available
from jaxserve.pallas_kernels.grouped_matmul import xla


def make_layer(form: str, moe: MoEConfig) -> Callable[..., jax.Array]:
    """One layer with `form` for its products: "cpu_ffi", "blocks" (XLA, block by block) or "ragged_dot"."""

    def layer(x: jax.Array, router: jax.Array, weights: ExpertWeights) -> jax.Array:
        ids, share = route(x @ router.T, moe)
        order, sizes = sort_by_expert(ids, moe.num_experts)
        rows = x[order // moe.num_experts_per_token]
        if form == "ragged_dot":
            hidden = xla._ragged_dot(rows, weights.gate_up, sizes)
            gate, up = jnp.split(hidden, 2, axis=-1)
            out = xla._ragged_dot(jax.nn.silu(gate) * up, weights.down, sizes)
        else:
            backend = "cpu_ffi" if form == "cpu_ffi" else "xla"
            out = compute_experts(rows, sizes, weights, activation="silu", swiglu_limit=0.0, backend=backend)
        return x + 0.01 * combine(out, order, share)

    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512, help="of one expert")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--forms", nargs="+", default=["cpu_ffi", "blocks", "ragged_dot"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    moe = MoEConfig(num_experts=args.experts, num_experts_per_token=args.chosen, intermediate_size=args.width)
    print(f"{platform.processor() or platform.machine()}, JAX {jax.__version__}, {jax.local_device_count()} device(s)")
    print(f"memory read {read_bandwidth() / 1e9:.1f} GB/s")

    def draw(seed: int, *shape: int) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[-1])).astype(args.dtype)

    count, size, hidden = args.experts, args.width, args.hidden
    layers = [
        (
            jax.random.normal(jax.random.key(3 * i), (count, hidden)),
            ExpertWeights(draw(3 * i + 1, count, 2 * size, hidden), draw(3 * i + 2, count, hidden, size)),
        )
        for i in range(args.layers)
    ]
    forms = [form for form in args.forms if form != "cpu_ffi" or cpu_ffi_available()[0]]
    steps = {}
    for form in forms:
        layer = make_layer(form, moe)

        def step(x: jax.Array, layers: list, layer: Callable[..., jax.Array] = layer) -> jax.Array:
            for router, weights in layers:
                x = layer(x, router, weights)
            return x

        steps[form] = jax.jit(step)
    expert_bytes = 3 * size * hidden * jnp.dtype(args.dtype).itemsize
    for tokens in args.tokens:
        x = jax.random.normal(jax.random.key(7), (tokens, hidden))
        needed = count * (1 - (1 - args.chosen / count) ** tokens)
        times = median_seconds(
            {form: (lambda run=run, x=x: run(x, layers)) for form, run in steps.items()}, args.rounds
        )
        for form, seconds in times.items():
            per_layer = seconds / args.layers
            print(
                f"experts {tokens:4d} tokens  {args.dtype} {form:10s} {per_layer * 1e3:8.2f} ms a layer"
                f"  {needed * expert_bytes / per_layer / 1e9:5.1f} GB/s of needed weights"
                f"  {6 * tokens * args.chosen * size * hidden / per_layer / 1e9:6.1f} GFLOP/s"
                f"  {times[forms[-1]] / seconds:6.2f} x {forms[-1]}"
            )


if __name__ == "__main__":
    main()
