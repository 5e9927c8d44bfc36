"""Compile every GPU kernel and whole steps for a described H100 or H200, without a GPU, and look at the machine code.

    python benchmarks/gpu_compile.py                    # every case, each in a process of its own
    python benchmarks/gpu_compile.py --only decode      # cases whose name contains the word
    python benchmarks/gpu_compile.py --table            # the rows of the table in docs/kernels.md, one program a layer

XLA's and Mosaic's whole pipelines run against the described device down to PTX; ptxas gives registers and spills,
nvdisasm the instructions. Nothing is executed: numerics are the interpreter's part, speed a card's. Needs Python
3.12 and, at the versions of the installed jax: jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and
nvidia-cuda-nvdisasm (13.x). No driver.

Fails (status 1) when a case does not compile, spills registers, lacks an instruction it is meant to use, or copies
its page pool. Status 2: the CUDA plugin or a tool is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# SMs, clock GHz, bytes/s, memory bytes, L2 bytes; NVIDIA's data sheets. Dense bf16 operations per second.
TARGETS = {
    "h100": ("NVIDIA H100 80GB HBM3", 132, 1.98, 3352 * 10**9, 80 * 2**30, 50 * 2**20),
    "h200": ("NVIDIA H200", 132, 1.98, 4800 * 10**9, 141 * 10**9, 50 * 2**20),
}
FLOPS = 989e12
SMEM_PER_SM, SMEM_PER_BLOCK = 233472, 232448
ATTENTION = ("paged_decode", "paged_cascade", "paged_prefill", "mla_attention")
PRODUCTS = ("quant_matmul", "grouped_matmul")
READ_ONLY = ("quant_matmul",)  # store nothing to shared memory: copies fill it, threads read it
COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "UBLKCP", "LDG.128", "LDG", "STG", "LDL", "STL")


def device_description(target: str) -> str:
    """The text form of XLA's GpuTargetConfigProto."""
    name, sms, clock, bandwidth, memory, l2 = TARGETS[target]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {SMEM_PER_SM} shared_memory_per_block_optin: {SMEM_PER_BLOCK}
  threads_per_core_limit: 2048 core_count: {sms} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{name}"
"""


def find_tool(name: str) -> str | None:
    """A CUDA command line tool, from the wheels or from PATH."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for folder in ("cu13", "cuda_nvcc"):
        if os.access(path := site / folder / "bin" / name, os.X_OK):
            return str(path)
    return shutil.which(name)


def missing() -> str:
    """What this machine lacks to compile for a GPU; empty if nothing."""
    if sys.version_info < (3, 12):
        return "Python 3.12 or newer is needed"
    from importlib.metadata import PackageNotFoundError, version

    try:
        plugin, jax = version("jax-cuda13-plugin"), version("jax")
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    if plugin != jax:
        return f"jax-cuda13-plugin {plugin} does not belong to jax {jax}"
    absent = [tool for tool in ("ptxas", "nvdisasm") if find_tool(tool) is None]
    return f"{', '.join(absent)} not found (nvidia-cuda-nvcc, nvidia-cuda-nvdisasm)" if absent else ""


def prepare(dump: Path) -> None:
    """Settings that JAX, XLA and Mosaic read once, when they are first imported."""
    assert "jax" not in sys.modules
    os.environ.update(
        JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_ENABLE_COMPILATION_CACHE="0",
        XLA_FLAGS="--xla_gpu_autotune_level=0", MOSAIC_GPU_DUMP_TO=str(dump), TF_CPP_MIN_LOG_LEVEL="3",
    )  # fmt: skip
    folders = {os.path.dirname(find_tool(tool) or "") for tool in ("ptxas", "nvdisasm")}
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ.get("PATH", "")])


def compile_for(target: str, function: Any, arguments: Any, donate: tuple[int, ...]) -> Any:
    """The compiled program for one described device."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=device_description(target)
    ).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("gpu",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    traced = jax.jit(function, donate_argnums=donate).trace(*structs)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def kernels(dump: Path) -> list[dict[str, Any]]:
    """What became of every dumped Mosaic kernel."""
    found = []
    for path in sorted(dump.glob("*.ptx")):
        text = path.read_text()
        arch = re.search(r"^\s*\.target\s+(\w+)", text, re.M)[1]
        cubin = path.with_suffix(".cubin")
        log = subprocess.run(
            [find_tool("ptxas"), "-v", f"-arch={arch}", str(path), "-o", str(cubin)],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
        sass = subprocess.run(
            [find_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        name = re.search(r"\.entry\s+([\w$]+)", text)[1].removesuffix("_mosaic_gpu_kernel")
        registers = int(re.search(r"Used (\d+) registers", log)[1])
        warps, smem = launch_sizes(path.with_suffix(".mlir-passes.log"))
        found.append(
            {
                "name": name, "registers": registers, "spill_bytes": int(spills[1]) + int(spills[2]),
                "warps": warps, "shared_memory": smem, "blocks_per_sm": occupancy(registers, warps, smem),
                "instructions": {op: n for op in COUNTED if (n := len(re.findall(pattern(op), sass)))},
                "proxy_fences": text.count("fence.proxy.async"),
                "register_budget": register_budget(text, registers, warps),
            }
        )  # fmt: skip
    return found


def register_budget(ptx: str, registers: int, warps: int) -> int:
    """Registers of a block, less those that its warpgroups ask for: negative where one would wait for ever. Every place
    that gives some away is one warpgroup; the others take them."""
    given = [int(count) for count in re.findall(r"setmaxnreg\.dec\S*\s+(\d+)", ptx)]
    taken = [int(count) for count in re.findall(r"setmaxnreg\.inc\S*\s+(\d+)", ptx)]
    wanted = sum(given) + max(taken, default=registers) * (warps // 4 - len(given))
    return (-(-registers // 8) * 8 * (warps // 4) - wanted) * 128 if taken else 0


def pattern(op: str) -> str:
    return r"\bLDG\b[.\w]*\.128\b" if op == "LDG.128" else rf"\b{op}\b"


def launch_sizes(log: Path) -> tuple[int, int]:
    """(warps, bytes of dynamic shared memory) of a dumped kernel."""

    def literal(value: str) -> int | None:  # the number in an MLIR constant's name, like %c384_i32
        match = re.match(r"%c(\d+)(?:_|$)", value)
        return int(match[1]) if match else None

    best = (4, 0)
    for line in log.read_text(errors="replace").splitlines():
        if " gpu.launch " not in line:
            continue
        sizes = re.search(r"\bthreads\([^)]*\) in \(([^)]*)\)", line)[1]
        threads = [literal(part.split("=")[1].strip()) for part in sizes.split(",")]
        smem = re.search(r"dynamic_shared_memory_size (%\w+)", line)
        size = literal(smem[1]) if smem else 0
        if all(threads) and size is not None:
            best = (threads[0] * threads[1] * threads[2] // 32, size)
    return best


def occupancy(registers: int, warps: int, smem: int) -> int:
    """Upper bound on blocks that run on one SM at once."""
    per_warp = -(-registers * 32 // 256) * 256
    smem = -(-(smem + 1024) // 128) * 128
    return min(65536 // (per_warp * warps), 64 // warps, SMEM_PER_SM // smem, 32)


def check(case_name: str, target: str) -> dict[str, Any]:
    """Compile one case in this process."""
    with tempfile.TemporaryDirectory(prefix="gpu_compile_") as folder:
        prepare(Path(folder))
        if case_name.startswith("step "):
            import gpu_steps

            function, arguments, donate, pool = gpu_steps.make(case_name)
            needs = ("HGMMA", "UTMALDG")
        elif case_name.startswith("product "):
            import gpu_products

            name = case_name.removeprefix("product ")
            (product,) = [product for product in gpu_products.all_products() if product.name == name]
            function, arguments, needs = product.function, product.arguments, product.needs
            donate, pool = (), ()
        else:
            import gpu_cases

            (case,) = [case for case in gpu_cases.all_cases() if case.name == case_name]
            function, arguments, donate = case.function, case.abstract_arguments(), (len(case.arrays),)
            pool, needs = case.pages, case.needs
        compiled = compile_for(target, function, arguments, donate)
        memory = compiled.memory_analysis()
        import jax

        pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
        report = {
            "case": case_name, "target": target, "jax": jax.__version__, "kernels": kernels(Path(folder)),
            "temporaries": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes, "pool": pool_bytes,
        }  # fmt: skip
    report["problems"] = problems(report, needs)
    return report


def problems(report: dict[str, Any], needs: tuple[str, ...]) -> list[str]:
    found = [f"{k['name']}: {k['spill_bytes']} bytes spilled" for k in report["kernels"] if k["spill_bytes"]]
    found += [
        f"{k['name']}: {k['shared_memory']} bytes of shared memory"
        for k in report["kernels"]
        if k["shared_memory"] > SMEM_PER_BLOCK
    ]
    found += [
        f"{k['name']}: warpgroups ask for {-k['register_budget']} registers more than a block has"
        for k in report["kernels"]
        if k["register_budget"] < 0
    ]
    checked = [k for k in report["kernels"] if k["name"] in ATTENTION + PRODUCTS]
    wanted, kind = (PRODUCTS, "product") if report["case"].startswith("product ") else (ATTENTION, "attention")
    if not any(k["name"] in wanted for k in checked):
        found.append(f"no {kind} kernel came out of the compiler")
    for kernel in checked:
        found += [f"{kernel['name']}: no {op}" for op in needs if op not in kernel["instructions"]]
        if not kernel["proxy_fences"] and kernel["name"] not in READ_ONLY:
            found.append(f"{kernel['name']}: no fence between stores to shared memory and what reads them")
    if report["aliased"] < report["pool"]:
        found.append(f"pages: {report['aliased']} bytes are updated in place, the pool has {report['pool']}")
    if report["case"].startswith("step ") and report["temporaries"] > report["pool"] / 4:
        found.append(f"temporaries of {report['temporaries']} bytes beside a pool of {report['pool']}")
    return found


def show(report: dict[str, Any]) -> None:
    print(
        f"{'FAIL' if report['problems'] else 'ok  '} {report['case']} ({report['target']}, jax {report['jax']}): "
        f"temporaries {report['temporaries'] / 2**20:.1f} MiB, pages in place {report['aliased'] / 2**20:.0f} MiB"
    )
    for k in report["kernels"]:
        counts = " ".join(f"{op}={n}" for op, n in k["instructions"].items())
        print(
            f"       {k['name']}: {k['registers']} registers, {k['spill_bytes']} B spilled, {k['shared_memory']} B "
            f"shared, {k['warps']} warps, at most {k['blocks_per_sm']} blocks per SM; {counts}"
        )
    for problem in report["problems"]:
        print(f"       {problem}")


def table_rows(report: dict[str, Any], cases: Sequence[Any]) -> list[str]:
    """Rows for docs/kernels.md, one per case that consists of the kernels of this report: the kernel that it is about,
    and the time that the card's nominal rates would allow."""
    bandwidth = TARGETS[report["target"]][3]
    rows = []
    for case in cases:
        times = case.bytes / bandwidth * 1e6, case.flops / FLOPS * 1e6
        digits = 0 if max(times) >= 10 else 1
        bound = f"{max(times):.{digits}f} µs, {'memory' if times[0] > times[1] else 'products'}"
        rows += [
            f"| {case.name} | {k['name']} | {k['registers']} | {k['shared_memory']:,} | {k['blocks_per_sm']} | "
            f"{k['instructions'].get('HGMMA', 0)} | {k['instructions'].get('UTMALDG', 0)} | {bound} |"
            for k in report["kernels"]
            if k["name"] in (*PRODUCTS, "mla_attention", _attention_kernel(case))
        ]
    return rows


def _attention_kernel(case: Any) -> str:
    """The attention kernel that a case is about; none for a product or a mixed batch."""
    work = getattr(case, "work", None)
    if work is None or (work.decodes and work.chunks):
        return ""
    return "paged_prefill" if work.chunks else "paged_cascade" if work.shared else "paged_decode"


def _programs(options: argparse.Namespace) -> list[tuple[str, list[Any]]]:
    """(name of what is compiled, the cases that it shows). For the table, one for all steps of one layer: their
    programs differ in the sizes of their arrays and hold the same kernels."""
    import gpu_cases
    import gpu_products

    cases = gpu_cases.all_cases()
    programs = [(case.name, [case]) for case in cases]
    if options.table:
        layers: dict[Any, list[Any]] = {}
        for case in cases:
            layers.setdefault((case.spec, case.page_size, str(case.pages.dtype)), []).append(case)
        programs = [(group[0].name, group) for group in layers.values()]
    programs += [(f"product {product.name}", [product]) for product in gpu_products.all_products()]
    programs += [(f"step {name}", []) for name in ("Llama-3-8B", "Qwen3-30B-A3B") if options.steps]
    return [(name, cases) for name, cases in programs if options.only.lower() in name.lower()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), default="h200")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--steps", action="store_true", help="whole steps too (minutes each)")
    parser.add_argument("--table", action="store_true", help="print the rows of docs/kernels.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in this process, report as JSON
    options = parser.parse_args()
    if reason := missing():
        print(f"SKIPPED: {reason}. See the top of benchmarks/gpu_compile.py for what is needed.")
        return 2
    if options.case:
        print(json.dumps(check(options.case, options.target)))
        return 0
    failed = 0
    for name, cases in _programs(options):
        command = [sys.executable, __file__, "--target", options.target, "--case", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"FAIL {name}: does not compile\n{done.stderr[-3000:]}", flush=True)
            failed += 1
            continue
        report = json.loads(done.stdout.splitlines()[-1])
        failed += bool(report["problems"])
        if options.table and cases and not report["problems"]:
            print(*table_rows(report, cases), sep="\n", flush=True)
        else:
            show(report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
