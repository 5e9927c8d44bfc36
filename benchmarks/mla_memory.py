"""Latent cache of DeepSeek-V3 under data and tensor parallelism, read from real page arrays.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/mla_memory.py --layers 2 --tokens 8192

For the same tokens in all, a device of a data-parallel mesh holds its own requests' latents, one of a tensor-parallel
mesh all of them: the latent is one head, which nothing splits.
"""

from __future__ import annotations

import argparse
import dataclasses

import jax
from jaxserve.models.config import ModelConfig

from benchmarks.mesh_shapes import DEEPSEEK_V3, forward_shapes, read_config
from jaxserve.runner.memory import allocate, plan_pages
from jaxserve.runner.sharded_step import ShardedPrograms

PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Cache:
    """num_tokens in all ranks; bytes_per_device of their pages, the dummy page left out; largest: tokens in all ranks
    that a budget of kv_bytes for each device holds."""

    mesh: str
    num_ranks: int
    num_tokens: int
    bytes_per_device: int
    largest: int


def measure(config: ModelConfig, mesh: str, *, num_tokens: int, kv_bytes: int) -> Cache:
    """Allocate the pages of `num_tokens` tokens over a mesh and look at what lies on its first device."""
    ranks = forward_shapes(config, mesh, jax.devices(), num_tokens=8, rows=1, pages_per_row=1, num_pages=2)[1].num_ranks
    num_pages = 1 + num_tokens // ranks // PAGE_SIZE
    programs, shape = forward_shapes(
        config, mesh, jax.devices(), num_tokens=8, rows=1, pages_per_row=1, page_size=PAGE_SIZE, num_pages=num_pages
    )
    assert isinstance(programs, ShardedPrograms)
    pages = allocate(programs.state_structs()[0])
    device = programs.mesh.devices.flat[0]
    held = sum(s.data.nbytes for layer in pages for s in layer.addressable_shards if s.device == device)
    per_page = held // num_pages
    plan = plan_pages(
        bytes_per_page=per_page, pages_per_request=1, max_num_rows=2**31, num_pages=None, kv_cache_bytes=kv_bytes,
        memory_fraction=0.9, free_bytes=kv_bytes, platform="gpu",
    )  # fmt: skip
    largest = (plan.num_pages - 1) * PAGE_SIZE * shape.num_ranks
    return Cache(mesh, shape.num_ranks, num_tokens, held - per_page, largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kv-gib", type=float, default=1.0)
    options = parser.parse_args()
    config = read_config(DEEPSEEK_V3, options.layers)
    print(
        f"DeepSeek-V3, {options.layers} layers, bfloat16, {options.tokens} tokens in all, {options.kv_gib} GiB a device"
    )
    print("mesh       ranks  bytes on a device  tokens that fit")
    for mesh in ("tensor=8", "data=4,tensor=2", "data=8"):
        found = measure(config, mesh, num_tokens=options.tokens, kv_bytes=int(options.kv_gib * 2**30))
        print(f"{mesh:16} {found.num_ranks:5} {found.bytes_per_device:18,} {found.largest:16,}")


if __name__ == "__main__":
    main()
