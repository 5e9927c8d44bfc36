"""Published models of real size compiled over a mesh without their weights: memory, aliases and collectives.

    python benchmarks/mesh_shapes.py deepseek_v3 --mesh expert=8 --layers 61 --tokens 256
    python gpu_check.py benchmarks.mesh_shapes:deepseek_v3 --devices 8 --target h200 --allow-no-kernels

The first compiles for virtual CPU devices (XLA_FLAGS=--xla_force_host_platform_device_count=8). Case functions of the
second kind take a list of devices, which may be described ones that are not there.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_hf import HFConfig
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.decoder import Decoder
from jaxserve.models.registry import HF_ARCHITECTURES, family_of
from jaxserve.models.sharded_parameters import ShardedParameters
from jaxserve.models.tensor_parallel import shard_config
from jaxserve.sharding.expert_parallel import received_bytes
from jaxserve.sharding.mesh import make_mesh
from jaxserve.sharding.shape import MeshShape, parse_mesh, resolve_shape

from jaxserve.runner.buckets import StepShapes
from jaxserve.runner.runner import make_programs
from jaxserve.runner.step import Program, StepPrograms

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "vocab_size": 129280,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu", "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
MODELS = {"deepseek_v3": DEEPSEEK_V3, "qwen3_235b": QWEN3_235B}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}


def read_config(content: dict[str, Any], num_layers: int | None = None) -> ModelConfig:
    if num_layers is not None:
        content = content | {"num_hidden_layers": num_layers}
        if "first_k_dense_replace" in content:  # at least one layer of each kind
            content["first_k_dense_replace"] = min(content["first_k_dense_replace"], num_layers - 1)
    hf = HFConfig(content, Path("config.json"))
    return family_of(hf.architecture, known=HF_ARCHITECTURES, where="config.json").read_hf(hf)


def forward_program(
    config: ModelConfig, mesh_text: str, devices: Sequence[jax.Device], *, num_tokens: int, **sizes: Any
) -> Program:
    """The forward program of `num_tokens` tokens for each rank, with abstract weights."""
    return forward_shapes(config, mesh_text, devices, num_tokens=num_tokens, **sizes)[0].program(
        ("forward", num_tokens)
    )


def forward_shapes(
    config: ModelConfig,
    mesh_text: str,
    devices: Sequence[jax.Device],
    *,
    num_tokens: int,
    rows: int = 64,
    pages_per_row: int = 64,
    page_size: int = 64,
    num_pages: int = 4097,
    form: str = "",
    **options: Any,
) -> tuple[StepPrograms, MeshShape]:
    """All programs with steps of `num_tokens` tokens for each rank, with abstract weights; sizes are per rank.

    form: of the layers' matrices and experts (pallas_kernels/matmul/quantized.py); "": not quantised."""
    shape = resolve_shape(parse_mesh(mesh_text), config.moe.num_experts if config.moe else 0)
    mesh = make_mesh(shape, devices)
    wanted = {"dtype": "bfloat16", "page_size": page_size, "page_dtype": "bfloat16", "attention": "xla"} | options
    runtime = RuntimeOptions(**wanted, mesh=shape, max_model_len=pages_per_row * page_size)
    model = Decoder(
        shard_config(config, shape), runtime, ShardedParameters(config, mesh, runtime.dtype, None, form=form)
    )
    shapes = StepShapes(
        max_num_rows=rows, pages_per_row=pages_per_row, page_size=page_size, num_pages=num_pages,
        vocab_size=config.vocab_size, token_buckets=(num_tokens,), sample_buckets=(rows,),
    )  # fmt: skip
    return make_programs(model, shapes, runtime, mesh, hidden_size=config.hidden_size), shape


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """kind -> (how many, bytes of their results on one device), from a compiled program's text."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for kind, results in _collective_results(hlo):
        found[kind][0] += 1
        found[kind][1] += sum(_BYTES[dtype] * num_values(dims) for dtype, dims in results)
    return {kind: (count, size) for kind, (count, size) in found.items()}


def expected_collectives(
    config: ModelConfig, shape: MeshShape, *, num_tokens: int, dispatch: str, value_bytes: int, is_ragged: bool
) -> dict[str, int]:
    """kind -> bytes of the results on one device, its own part included, of a forward step: what the formulas of
    sharding/expert_parallel.py say. is_ragged: not the padded twin that XLA:CPU takes for all_to_all."""
    rows, devices = num_tokens * config.hidden_size * 4, shape.expert
    found: collections.Counter[str] = collections.Counter()
    if shape.tensor > 1:  # sums of the embedding, and of attention and feed-forward in each layer
        found["all-reduce"] = (1 + 2 * config.num_layers) * rows
    if config.moe is not None and devices > 1:
        layers, chosen = sum(layer.uses_moe for layer in config.layers), config.moe.num_experts_per_token
        received = received_bytes(
            "gather", num_devices=devices, num_tokens=num_tokens, hidden=config.hidden_size,
            num_experts=config.moe.num_experts, num_chosen=chosen, value_bytes=value_bytes,
        )  # fmt: skip
        inputs, results = (layers * int(size) // (devices - 1) for size in received)  # of one device
        if dispatch == "gather":
            found["all-gather"], found["reduce-scatter"] = devices * inputs, results
        elif is_ragged:  # there is room for all that may come; back comes one row from each device that was visited
            found["all-to-all"] = layers * devices * 8
            found["ragged-all-to-all"] = devices * inputs + min(chosen, devices) * results
        else:
            found["all-to-all"] = devices * (inputs + results)
    return dict(found)


def gathered_shapes(hlo: str) -> dict[str, int]:
    """Shape of an all-gather's result, as "bf16[2048,7168]" -> how many there are."""
    names = (
        f"{dtype}[{dims}]" for kind, found in _collective_results(hlo) if kind == "all-gather" for dtype, dims in found
    )
    return dict(collections.Counter(names))


def _collective_results(hlo: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(kind, [(dtype, sizes) of its results]) of each collective."""
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) (" + "|".join(COLLECTIVES) + r")(?:-start)?\(", line)
        if match is None:
            continue
        result = re.sub(r"\{[^}]*\}", "", match[1])  # without layouts
        is_nested = result.startswith("((")  # (operands), then results
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", result.partition("),")[2] if is_nested else result)
        if "-start(" in line and not is_nested and len(shapes) > 1:
            shapes = shapes[len(shapes) // 2 :]  # an operand, then its result
        yield match[2], [(dtype, dims) for dtype, dims in shapes if dtype in _BYTES]


def num_values(sizes: str) -> int:
    """Of an array whose sizes are written "2048,7168"."""
    return math.prod(int(size) for size in sizes.split(",") if size)


def bytes_per_device(tree: Any) -> int:
    """Of the arrays (or their structs) in `tree`."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _case(name: str, devices: Sequence[jax.Device]) -> tuple[Any, tuple[Any, ...]]:
    layers = int(os.environ["LAYERS"]) if "LAYERS" in os.environ else None
    mesh = os.environ.get("MESH", f"expert={len(devices)}")
    tokens = int(os.environ.get("TOKENS", "256"))
    dispatch = os.environ.get("DISPATCH", "gather")
    program = forward_program(
        read_config(MODELS[name], layers), mesh, devices, num_tokens=tokens, expert_dispatch=dispatch
    )
    return program.jitted(), program.arguments


def deepseek_v3(devices: Sequence[jax.Device]) -> tuple[Any, tuple[Any, ...]]:
    """One step of DeepSeek-V3: MESH, LAYERS, TOKENS and DISPATCH are taken from the environment."""
    return _case("deepseek_v3", devices)


def qwen3_235b(devices: Sequence[jax.Device]) -> tuple[Any, tuple[Any, ...]]:
    """As deepseek_v3, for Qwen3-235B-A22B."""
    return _case("qwen3_235b", devices)


def report(program: Program, *, compiles: bool) -> None:
    gib = 2**30
    weights, pages = (bytes_per_device(part) / gib for part in program.arguments[:2])
    print(f"per device, GiB: weights {weights:.2f}, pages {pages:.2f}")
    if not compiles:
        return
    compiled = program.lower().compile()
    memory = compiled.memory_analysis()
    arguments, aliased = memory.argument_size_in_bytes / gib, memory.alias_size_in_bytes / gib
    temporary = memory.temp_size_in_bytes / gib
    print(f"compiled: arguments {arguments:.2f}, aliased {aliased:.2f}, temporaries {temporary:.2f}")
    for kind, (count, num_bytes) in sorted(collectives(compiled.as_text()).items()):
        print(f"{kind}: {count}, results of {num_bytes / 2**20:.2f} MiB on a device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--mesh", default="expert=8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dispatch", default="gather")
    parser.add_argument("--form", default="", help="fp8_32, q4_1, ...: layers' weights in such blocks")
    parser.add_argument("--compile", action="store_true", help="minutes for tens of layers")
    options = parser.parse_args()
    devices = jax.devices()
    config = read_config(MODELS[options.model], options.layers)
    print(f"{options.model}, {config.num_layers} layers, {options.mesh}, {options.tokens} tokens for each rank")
    program = forward_program(
        config, options.mesh, devices, num_tokens=options.tokens, expert_dispatch=options.dispatch, form=options.form
    )
    report(program, compiles=options.compile)


if __name__ == "__main__":
    main()
