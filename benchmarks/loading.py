"""Loading a checkpoint: seconds and peak memory of a fresh process, safetensors beside Orbax.

    python benchmarks/loading.py                           a generated 2 GB checkpoint in eight shards, both forms
    python benchmarks/loading.py --gigabytes 0.5 --json FILE
    python benchmarks/loading.py --source FOLDER           a checkpoint of your own beside its conversion

Each form is loaded in a process of its own; its peak is what the kernel says of it (VmHWM). "of its size" is that
peak over the bytes of the weights; "above a process without a model" leaves out the interpreter, JAX and the loader.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

MAX_SHARE = 1.15
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 32, 8, 64, 32000
_CHILD = """
import json, time
import jax
from jaxserve.hub import resolve_model
from jaxserve.models.contract import RuntimeOptions
from jaxserve.models.loading import load_config, load_model
if {is_orbax}:
    import jaxserve.models.weights.orbax
jax.numpy.zeros(8).block_until_ready()
def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before = peak_bytes()
source = resolve_model({folder!r})
start = time.perf_counter()
model = load_model(source, load_config(source), RuntimeOptions(dtype="bfloat16"))
jax.block_until_ready(jax.tree.leaves(model))
seconds = time.perf_counter() - start
peak = peak_bytes()
size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
print(json.dumps(dict(seconds=seconds, before=before, peak=peak, size=size)))
"""


def generate(folder: Path, num_bytes: float, num_shards: int) -> None:
    """A Llama of random bfloat16 weights, a layer after the other, in shards of about one size."""
    layer = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    per_layer = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    num_layers = max(1, round((num_bytes - 4 * VOCAB * HIDDEN) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": num_layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random, total = np.random.default_rng(0), 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    weight_map, held, number = {}, {}, 1
    for name, shape in shapes.items():
        held[name] = (random.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        if sum(array.nbytes for array in held.values()) * num_shards >= total or name == "lm_head.weight":
            file = f"model-{number:05d}.safetensors"
            save_file(held, folder / file)
            weight_map |= dict.fromkeys(held, file)
            held, number = {}, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def measure(folder: Path, *, is_orbax: bool) -> dict[str, float]:
    """Load in a process of its own."""
    code = _CHILD.format(folder=str(folder), is_orbax=is_orbax)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(name: str, found: dict[str, float]) -> float:
    share = found["peak"] / found["size"]
    above = (found["peak"] - found["before"]) / found["size"]
    print(
        f"{name:12s} {found['seconds']:6.1f} s  {found['size'] / found['seconds'] / 1e9:5.2f} GB/s"
        f"  peak {found['peak'] / 1e9:5.2f} GB = {share:5.3f} of its size"
        f"  ({above:5.3f} above a process without a model)"
    )
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--source", type=Path, help="a checkpoint instead of a generated one")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    print(f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}, {date.today()}")
    with tempfile.TemporaryDirectory() as scratch:
        plain = options.source or Path(scratch) / "safetensors"
        if options.source is None:
            plain.mkdir()
            generate(plain, options.gigabytes * 1e9, options.shards)
        converted = Path(scratch) / "orbax"
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "jaxserve.cli", "convert", str(plain), str(converted)], check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        print(f"convert      {time.perf_counter() - start:6.1f} s")
        found = {
            "safetensors": measure(plain, is_orbax=False),
            "orbax": measure(converted, is_orbax=True),
        }
    share = show("safetensors", found["safetensors"])
    show("orbax", found["orbax"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    verdict = "PASS" if share <= MAX_SHARE else "FAIL"
    print(f"{verdict}  safetensors within {MAX_SHARE} x their size: {share:.3f}")
    sys.exit(verdict != "PASS")


if __name__ == "__main__":
    main()
