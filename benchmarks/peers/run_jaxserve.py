"""jaxserve in this process, stepped like every other peer.

python run_jaxserve.py --model MODEL [--option max_num_rows=32 ...]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator

import protocol

channel = protocol.take_stdout()

import jaxserve  # noqa: E402  (standard output must be ours before libraries write to it)
from jaxserve.config import EngineConfig  # noqa: E402
from jaxserve.engine_process import build_engine  # noqa: E402
from jaxserve.messages import AddRequest  # noqa: E402
from jaxserve.sampling_params import SamplingParams  # noqa: E402


class JaxserveEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config)

    def add(self, key: str, ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.handle(AddRequest(request_id=key, prompt=ids, params=params))

    def step(self) -> Iterator[protocol.Progress]:
        for output in self.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            yield protocol.Progress(
                output.request_id,
                len(output.token_ids),
                output.finish_reason is not None,
                output.num_cached_tokens,
            )

    def run(self, requests: list[dict], concurrency: int, use_prefix_cache: bool) -> list[dict[str, float]]:
        # The prefix cache stays on: prompts that share nothing cost it nothing worth switching it off for.
        return protocol.drive(self, requests, concurrency)


def parse_options(options: list[str]) -> dict[str, object]:
    """ "max_num_rows=32" -> {"max_num_rows": 32}; what is no Python literal stays text."""
    parsed: dict[str, object] = {}
    for option in options:
        name, _, value = option.partition("=")
        try:
            parsed[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            parsed[name] = value
    return parsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--option", action="append", default=[], help="FIELD=VALUE of EngineConfig")
    arguments = parser.parse_args()
    engine = JaxserveEngine(EngineConfig(model=arguments.model, **parse_options(arguments.option)))
    ready = {"version": f"jaxserve {jaxserve.__version__}", "dtype": engine.engine.model.dtype}
    protocol.serve(channel, ready, engine.run)


if __name__ == "__main__":
    main()
