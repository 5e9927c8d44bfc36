"""jaxserve beside vLLM (CPU) and OpenVINO GenAI: the same requests, one alternating run, ratios of medians.

    python benchmarks/compare_peers.py --workload workload.json --gguf smollm2-135m.gguf --hf smollm2-hf \\
        --vllm-python ~/peers/vllm/bin/python --openvino-python ~/peers/openvino/bin/python \\
        [--peers jaxserve,jaxserve-http,vllm,vllm-http,openvino] [--rounds 3] [--limit N] [--json out.json]

benchmarks/peers/README.md says how the environments, the model folder and the workload are made. Every peer is
loaded once and stays loaded; in each round every measure runs on every peer before the next measure begins, so
that a change in what else the machine does meets all of them. A figure is only as good as its "others" column: the
share of the machine's CPU time that somebody else used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.bench import report

HERE = Path(__file__).parent / "peers"
SHARED_TOKENS = 1024
HTTP_PORTS = {"jaxserve-http": 8101, "vllm-http": 8102}

Request = dict[str, Any]


class Measure(NamedTuple):
    """requests: name in the workload and how many of them; figure: what is read off a run."""

    requests: str
    count: int
    concurrency: int
    figure: str
    num_priming: int = 0
    is_lower_better: bool = False


MEASURES = {
    "single": Measure("single_128_128", 2, 1, "decode_tok_s"),
    "ttft_512": Measure("ttft_512", 4, 1, "ttft_s", is_lower_better=True),
    "mixed_c16": Measure("mixed_64", 64, 16, "output_tok_s"),
    "mixed_c32": Measure("mixed_64", 64, 32, "output_tok_s"),
    "shared_prefix_c16": Measure("shared_prefix_64", 64, 16, "total_tok_s", num_priming=1),
}


def fresh_requests(requests: list[Request], run_number: int, num_shared: int) -> list[Request]:
    """The same lengths with other tokens in every run, so that no peer finds another run's prompts in its cache. The
    first `num_shared` tokens are rotated as one, the rest stay: what is shared remains shared."""

    def rotate(ids: list[int]) -> list[int]:
        shift = (run_number + 1) % len(ids)
        return ids[shift:] + ids[:shift]

    made = []
    for request in requests:
        ids = request["ids"]
        rotated = rotate(ids[:num_shared]) + ids[num_shared:] if num_shared else rotate(ids)
        made.append({"ids": rotated, "max_tokens": request["max_tokens"]})
    return made


def read_figures(answer: dict[str, Any], requests: list[Request]) -> dict[str, float]:
    """Rates over the whole run, latencies over its requests."""
    records, seconds = answer["records"], answer["seconds"]
    num_output = sum(record["num_output"] for record in records)
    num_prompt = sum(len(request["ids"]) for request in requests)
    rates = [
        (record["num_output"] - 1) / (record["e2e"] - record["ttft"])
        for record in records
        if record["num_output"] > 1 and record["e2e"] > record["ttft"]
    ]
    first = report.spread([record["ttft"] for record in records])
    return {
        "seconds": seconds,
        "output_tok_s": num_output / seconds,
        "total_tok_s": (num_prompt + num_output) / seconds,
        "decode_tok_s": statistics.median(rates) if rates else 0.0,
        "ttft_s": first["mean"],
        "ttft_p99_s": first["p99"],
        "cached_tokens": sum(record["num_cached"] for record in records),
        "longest_gap_s": max((record.get("longest_gap", 0.0) for record in records), default=0.0),
        "others_cpu": answer["cpu"]["others"],
        "steal": answer["cpu"]["steal"],
    }


class Peer:
    """One peer's process."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.ready: dict[str, Any] = self._read()["ready"]

    def run(self, requests: list[Request], measure: Measure) -> dict[str, Any]:
        """Raises RuntimeError if the peer fails or answers other lengths than asked for."""
        command = {
            "op": "run",
            "requests": requests,
            "concurrency": measure.concurrency,
            "num_priming": measure.num_priming,
            "use_prefix_cache": measure.num_priming > 0,
        }
        self._write(command)
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self._write({"op": "quit"})
                self._process.wait(60)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()

    def _write(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: ended with status {self._process.wait(30)}; its messages are above")
        return json.loads(line)


def peer_command(name: str, arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a peer. Raises SystemExit if a needed option is missing."""

    def need(option: str) -> str:
        value = getattr(arguments, option)
        if value is None:
            sys.exit(f"peer {name} needs --{option.replace('_', '-')} (see benchmarks/peers/README.md)")
        return os.path.expanduser(value)

    environment = {"BENCH_THREADS": str(arguments.threads)}
    # vLLM binds its threads to cores itself; with fewer threads than cores it must not.
    binding = "auto" if arguments.threads == os.cpu_count() else "nobind"
    vllm_environment = environment | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    http = [sys.executable, str(HERE / "run_http.py"), "--url"]
    options = [word for option in arguments.option for word in ("--option", option)]
    if name == "jaxserve":
        return [sys.executable, str(HERE / "run_jaxserve.py"), "--model", need("gguf"), *options], environment
    if name == "jaxserve-http":
        port = str(HTTP_PORTS[name])
        server = [sys.executable, "-m", "jaxserve.cli", "serve", need("gguf"), "--port", port]
        server += [word for option in arguments.option for word in command_flags(option)]
        return [*http, f"http://127.0.0.1:{port}", "--", *server], environment
    if name == "vllm":
        return [need("vllm_python"), str(HERE / "run_vllm.py"), "--model", need("hf")], vllm_environment
    if name == "vllm-http":
        port = str(HTTP_PORTS[name])
        server = [need("vllm_python"), "-m", "vllm.entrypoints.openai.api_server", "--model", need("hf")]
        server += ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16", "--max-model-len", "2048"]
        server += ["--max-num-seqs", "32", "--enforce-eager"]
        return [*http, f"http://127.0.0.1:{port}", "--", *server], vllm_environment
    if name == "openvino":
        model = need("openvino_model") if arguments.openvino_model else need("gguf")
        return [need("openvino_python"), str(HERE / "run_openvino.py"), "--model", model], environment
    if name == "llama-bench":
        model = ["--program", need("llama_bench"), "--model", need("bf16_gguf")]
        return [sys.executable, str(HERE / "run_llama_bench.py"), *model], environment
    sys.exit(f"unknown peer {name!r}; there are: jaxserve, jaxserve-http, vllm, vllm-http, openvino, llama-bench")


def command_flags(option: str) -> list[str]:
    """FIELD=VALUE as the command line has it: overlap=False is --no-overlap."""
    field, _, value = option.partition("=")
    name = field.replace("_", "-")
    if value in ("True", "False"):
        return [f"--{name}" if value == "True" else f"--no-{name}"]
    return [f"--{name}", value]


Results = dict[str, dict[str, list[dict[str, float]]]]  # measure -> peer -> one entry per round


def measure_all(peers: list[Peer], workload: dict[str, Any], arguments: argparse.Namespace) -> Results:
    results: Results = defaultdict(lambda: defaultdict(list))
    warmup = workload["warmup"]
    for peer in peers:
        for concurrency in (1,) if peer.name == "llama-bench" else (1, 4):  # it has one stream
            peer.run(warmup, Measure("warmup", len(warmup), concurrency, ""))
    names = arguments.measures.split(",")
    for round_number in range(arguments.rounds):
        for number, name in enumerate(names):
            measure = MEASURES[name]
            count = min(measure.count, arguments.limit or measure.count)
            num_shared = SHARED_TOKENS if measure.num_priming else 0
            # Two measures may have the same prompts: each run has tokens of its own, not each round.
            run_number = round_number * len(names) + number
            requests = fresh_requests(workload[measure.requests][:count], run_number, num_shared)
            # The order turns round, so that no peer always follows the same one.
            shift = round_number % len(peers)
            for peer in peers[shift:] + peers[:shift]:
                figures = read_figures(peer.run(requests, measure), requests)
                results[name][peer.name].append(figures)
                value, others = figures[measure.figure], figures["others_cpu"]
                print(f"round {round_number + 1} {name} {peer.name}: {measure.figure} {value:.4g}, "
                      f"others {others:.0%}", file=sys.stderr)  # fmt: skip
    return results


def markdown(results: Results, names: list[str]) -> str:
    """Medians per peer, and how many times the first peer is as good as each other one, round by round."""
    first, others = names[0], names[1:]
    header = ["measure", *names, *(f"{first} : {other}" for other in others), "others' CPU, largest"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name, by_peer in results.items():
        measure = MEASURES[name]
        values = {peer: [run[measure.figure] for run in by_peer[peer]] for peer in names}
        ratios = []
        for other in others:
            pairs = zip(values[first], values[other])
            quotients = [b / a if measure.is_lower_better else a / b for a, b in pairs if a and b]
            ratios.append(f"{statistics.median(quotients):.2f}" if quotients else "–")
        noise = max(run["others_cpu"] for runs in by_peer.values() for run in runs)
        cells = [f"{statistics.median(values[peer]):.4g}" for peer in names]
        lines.append(f"| {name}, {measure.figure} | {' | '.join(cells + ratios)} | {noise:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--peers", default="jaxserve,vllm,openvino", help="the first is compared with the others")
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="at most so many requests per measure (a trial)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peers")
    parser.add_argument("--gguf", help="model of jaxserve and OpenVINO")
    parser.add_argument("--hf", help="model folder of vLLM")
    parser.add_argument("--openvino-model", help="OpenVINO folder instead of --gguf")
    parser.add_argument("--vllm-python")
    parser.add_argument("--openvino-python")
    parser.add_argument("--llama-bench", help="llama.cpp's program of that name, which has one stream")
    parser.add_argument("--bf16-gguf", help="model of llama-bench")
    parser.add_argument("--option", action="append", default=[], help="FIELD=VALUE of jaxserve's EngineConfig")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.measures.split(",")) - MEASURES.keys()
    if unknown:
        parser.error(f"unknown measures {', '.join(sorted(unknown))}; there are: {', '.join(MEASURES)}")
    several = [name for name in arguments.measures.split(",") if MEASURES[name].concurrency > 1]
    if "llama-bench" in arguments.peers.split(",") and several:
        parser.error(f"llama-bench has one stream; it cannot take part in {', '.join(several)}")
    workload = json.loads(arguments.workload.read_text(encoding="utf-8"))
    names = arguments.peers.split(",")
    commands = [(name, *peer_command(name, arguments)) for name in names]
    peers: list[Peer] = []
    try:
        for name, command, environment in commands:
            peers.append(Peer(name, command, environment))
        results = measure_all(peers, workload, arguments)
    finally:
        for peer in peers:
            peer.close()
    machine = report.describe_machine()
    if arguments.json is not None:
        document = {"machine": machine, "peers": {peer.name: peer.ready for peer in peers}, "results": results}
        report.write_json(arguments.json, document)
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['date']}, {arguments.threads} threads, "
          f"{arguments.rounds} rounds, medians\n")  # fmt: skip
    print(markdown(results, names))


if __name__ == "__main__":
    main()
