"""An engine process over the simulated runner, for a real server: python simulated_engine.py --tokenizer DIR ...

The model writes signs and digits that no merge joins, so that its text is cut into the same tokens again.
"""

from __future__ import annotations

import argparse
import sys

import zmq

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.engine_link import open_socket
from jaxserve.engine_loop import EngineLoop
from jaxserve.messages import ModelInfo
from jaxserve.scheduler.decision import CacheGeometry
from jaxserve.simulator.runner import SimulatedRunner
from jaxserve.tokenizer import load_tokenizer

NUM_SIGNS = 33  # ids 0 to 32 are the characters from ! to A


def make_engine(tokenizer_path: str) -> Engine:
    tokenizer = load_tokenizer(tokenizer_path)
    geometry = CacheGeometry(
        num_pages=500, page_size=16, max_num_rows=16, max_num_samples=48, max_step_tokens=128, max_model_len=1024
    )
    model = ModelInfo(
        name="simulated",
        tokenizer_path=tokenizer_path,
        vocab_size=tokenizer.vocab_size,
        max_model_len=1024,
        eos_token_ids=list(tokenizer.eos_token_ids),
        max_num_rows=16,
        dtype="float32",
        num_pages=500,
        page_size=16,
    )
    config = EngineConfig(max_num_rows=16, max_step_tokens=128)
    return Engine(SimulatedRunner(geometry, vocab_size=NUM_SIGNS), tokenizer, config, model=model)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--tokenizer", "--config", "--socket", "--parent"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    with zmq.Context() as context, open_socket(context, options.socket, bind=False) as socket:
        return 0 if EngineLoop(make_engine(options.tokenizer), socket).run() else 1


if __name__ == "__main__":
    sys.exit(main())
