"""Whole published models compiled for a mesh of described H200s, without a GPU: memory, aliases and collectives.

    python benchmarks/mesh_compile.py deepseek_v3 --mesh expert=8 --form fp8_32
    python benchmarks/mesh_compile.py qwen3_235b --mesh expert=8 --layers 2 4 8     # and what follows for all layers

The forward step of `--tokens` tokens a rank, with abstract weights, through XLA's and Mosaic's whole GPU pipelines.
Needs what gpu_compile.py needs. With several numbers of layers it also tells whether memory is linear in them, and
what that makes at full depth. Fails (status 1) when the pages are not updated in place, when an all-gather brings
together anything but a step's tokens and their choices, or when the bytes of any kind of collective are not those of
the formula (`mesh_shapes.expected_collectives`). Few layers with many pages (`--layers 4 --pages 215000`) show in
seconds what XLA does when they fill the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_compile import TARGETS, device_description, missing, prepare

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes on one device. gathered: result shape of an all-gather -> how many."""

    layers: int
    weights: int
    pages: int
    arguments: int
    aliased: int
    temporaries: int
    collectives: dict[str, tuple[int, int]]
    gathered: dict[str, int]
    seconds: float

    def show(self) -> None:
        print(
            f"{self.layers} layers, compiled in {self.seconds:.0f} s. GiB a device: weights {self.weights / GIB:.3f}, "
            f"pages {self.pages / GIB:.3f}, aliased {self.aliased / GIB:.3f}, temporaries {self.temporaries / GIB:.3f}"
        )
        for kind, (count, size) in sorted(self.collectives.items()):
            print(f"    {kind}: {count}, results of {size / 2**20:.2f} MiB")
        for shape, count in sorted(self.gathered.items()):
            print(f"    all-gather of {shape}: {count}")


def compile_forward(options: argparse.Namespace, layers: int, devices: Any) -> tuple[Report, Iterator[str]]:
    """What compiling says, and what is wrong with it."""
    import jax
    import mesh_shapes

    config = mesh_shapes.read_config(mesh_shapes.MODELS[options.model], layers)
    programs, mesh = mesh_shapes.forward_shapes(
        config, options.mesh, devices, num_tokens=options.tokens, num_pages=options.pages,
        expert_dispatch=options.dispatch, attention=options.attention, matmul=options.matmul, form=options.form,
    )  # fmt: skip
    program = programs.program(("forward", options.tokens))
    start = time.monotonic()
    with jax.default_device(devices[0]):
        compiled = program.jitted().trace(*program.arguments).lower(lowering_platforms=("cuda",)).compile()
    seconds = time.monotonic() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    gathered = mesh_shapes.gathered_shapes(hlo)
    report = Report(
        config.num_layers, mesh_shapes.bytes_per_device(program.arguments[0]),
        mesh_shapes.bytes_per_device(program.arguments[1]), memory.argument_size_in_bytes,
        memory.alias_size_in_bytes, memory.temp_size_in_bytes, mesh_shapes.collectives(hlo), gathered, seconds,
    )  # fmt: skip
    expected = mesh_shapes.expected_collectives(
        config, mesh, num_tokens=options.tokens, dispatch=options.dispatch, value_bytes=2, is_ragged=True
    )
    return report, problems(report, expected, config, mesh.expert * options.tokens)


def problems(report: Report, expected: dict[str, int], config: Any, num_tokens: int) -> Iterator[str]:
    """What is wrong. num_tokens: of all ranks that share experts."""
    import mesh_shapes

    if report.aliased < report.pages:
        yield f"pages: {report.aliased} bytes are updated in place, the pool has {report.pages}"
    for kind in sorted(expected.keys() | report.collectives.keys()):
        size = report.collectives.get(kind, (0, 0))[1]
        if size != expected.get(kind, 0):
            yield f"{kind}: results of {size} bytes, by the formula {expected.get(kind, 0)}"
    for shape in report.gathered:
        size = mesh_shapes.num_values(shape.partition("[")[2].rstrip("]"))
        if size not in (num_tokens * config.hidden_size, num_tokens * config.moe.num_experts_per_token):
            yield f"all-gather of {shape}: neither tokens nor their choices"


def extrapolate(reports: list[Report], full: int) -> None:
    """Memory at full depth from what one more layer has cost, and how far from linear it was."""
    for name in ("weights", "pages", "aliased", "temporaries"):
        values = [(report.layers, getattr(report, name)) for report in reports]
        slopes = [(b - a) / (m - n) for (n, a), (m, b) in itertools.pairwise(values)]
        steps = ", ".join(f"{slope / 2**20:.3f}" for slope in slopes)
        total = values[-1][1] + slopes[-1] * (full - values[-1][0])
        print(f"{name}: MiB for each further layer {steps}; at {full} layers {total / GIB:.2f} GiB (extrapolated)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=("deepseek_v3", "qwen3_235b"))
    parser.add_argument("--mesh", default="expert=8")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs="+", help="numbers of layers (default: all)")
    parser.add_argument("--tokens", type=int, default=256, help="of a step, for each rank")
    parser.add_argument("--dispatch", default="gather", choices=("gather", "all_to_all"))
    parser.add_argument("--pages", type=int, default=4097, help="of each rank")
    parser.add_argument("--form", default="", help="fp8_32, q4_1, ...: layers' weights in such blocks")
    parser.add_argument("--attention", default="mosaic", choices=("mosaic", "xla"))
    parser.add_argument("--matmul", default="mosaic", choices=("mosaic", "xla"))
    parser.add_argument("--target", choices=sorted(TARGETS), default="h200")
    options = parser.parse_args()
    if reason := missing():
        print(f"SKIPPED: {reason}. See the top of benchmarks/gpu_compile.py for what is needed.")
        return 2
    with tempfile.TemporaryDirectory(prefix="mesh_compile_") as folder:
        prepare(Path(folder))
        import jax
        import mesh_shapes
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{options.devices}", target_config=device_description(options.target)
        ).devices
        full = mesh_shapes.read_config(mesh_shapes.MODELS[options.model]).num_layers
        print(
            f"{options.model} on {options.mesh}, {len(devices)} described {devices[0].device_kind}, jax "
            f"{jax.__version__}, {options.tokens} tokens a rank, attention {options.attention}, "
            f"experts {options.matmul}, dispatch {options.dispatch}, weights {options.form or 'bfloat16'}",
            flush=True,
        )
        reports, failed = [], False
        for layers in options.layers or [full]:
            report, found = compile_forward(options, layers, devices)
            reports.append(report)
            report.show()
            for problem in found:
                print(f"    FAIL {problem}")
                failed = True
        if len(reports) > 1:
            extrapolate(reports, full)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
