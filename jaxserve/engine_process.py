"""The process that owns the device: `python -m jaxserve.engine_process --config JSON --socket ipc://PATH`.

It connects to the front end's socket (engine_link says how both sides do it), loads the model, compiles, sends
EngineReady and serves. It ends

    0  after a Shutdown message, or SIGTERM: what runs is finished within --drain seconds, the rest aborted
    1  when the model cannot be loaded or the engine crashed; EngineFailed has been sent
    2  when its command line is wrong
    3  at once when its parent is gone

SIGINT is ignored: Ctrl-C in a terminal reaches both processes, and the front end decides.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import zmq

from jaxserve import logs
from jaxserve.config import EngineConfig
from jaxserve.encoder_engine import EncoderEngine
from jaxserve.engine import Engine
from jaxserve.engine_link import check_address, open_socket, parse_config
from jaxserve.engine_loop import EngineLoop
from jaxserve.generation_defaults import generation_defaults
from jaxserve.hub import ModelSource, resolve_model
from jaxserve.messages import EngineFailed, ModelInfo, encode
from jaxserve.models.loading import is_encoder
from jaxserve.runner.encoder import EncoderRunner
from jaxserve.runner.runner import ModelRunner

logger = logging.getLogger(__name__)

EXIT_FAILED, EXIT_USAGE, EXIT_ORPHANED = 1, 2, 3
DRAIN_S = 30.0
_PARENT_POLL_S = 0.5

Progress = Callable[[str, int, int], None]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine | EncoderEngine:
    """Load, compile and warm up. For a bad checkpoint: what the loader raises, naming the tensor."""
    source = resolve_model(config.model)
    if is_encoder(source):
        return _build_encoder_engine(config, source, progress)
    runner = ModelRunner(config, progress, source=source)
    tokenizer = runner.tokenizer
    geometry = runner.geometry
    model = ModelInfo(
        name=runner.source.name,
        tokenizer_path=str(runner.source.path),
        vocab_size=runner.model_config.vocab_size,
        max_model_len=geometry.max_model_len,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        max_num_rows=geometry.max_num_rows,
        dtype=str(runner.dtype),
        num_pages=geometry.num_pages,
        page_size=geometry.page_size,
        task=runner.model_config.task,
        pooling=runner.model_config.pooling,
        embedding_size=runner.model_config.hidden_size,
        defaults=generation_defaults(source.path) if config.generation_config else {},
    )
    engine = Engine(runner, tokenizer, config, model=model)
    engine.prepare_grammars()
    return engine


def _build_encoder_engine(config: EngineConfig, source: ModelSource, progress: Progress | None) -> EncoderEngine:
    runner = EncoderRunner(config, source, progress)
    assert runner.tokenizer is not None
    described = runner.model_config
    model = ModelInfo(
        name=source.name,
        tokenizer_path=str(source.path),
        vocab_size=described.vocab_size,
        max_model_len=runner.max_model_len,
        eos_token_ids=[],
        max_num_rows=runner.max_batch,
        dtype=runner.dtype,
        num_pages=0,
        page_size=1,
        task=described.task,
        pooling=described.pooling,
        embedding_size=described.hidden_size,
    )
    return EncoderEngine(runner, runner.tokenizer, config, model=model)


def watch_parent(parent: int) -> None:
    """End this process soon after process `parent` is no longer its parent, also in the middle of a compilation.

    A thread that polls: the kernel's own signal (PR_SET_PDEATHSIG) comes when the *thread* that started this
    process ends, which a server's start-up thread may do early.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class _PrintProgress:
    """One line on stderr for each tenth of a stage: this goes to a log, not to a terminal's bar."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        step = (what, 10 * done // max(total, 1))
        if step != self._last:
            self._last = step
            text = f"{what} {10 * step[1]} %"
            if logs.is_json():
                logger.info("%s", text)
            else:
                print(f"jaxserve engine: {text}", file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jaxserve.engine_process", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", required=True, help="EngineConfig: JSON, or the path of a JSON or msgpack file")
    parser.add_argument("--socket", required=True, help="ipc://PATH in a folder with mode 0700")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="end when this is no longer the parent")
    parser.add_argument("--drain", type=float, default=DRAIN_S, help="seconds to finish requests after SIGTERM")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the engine; returns the exit status."""
    options = _parse(arguments)
    logs.configure()
    faulthandler.enable()
    try:
        config = parse_config(options.config)
        check_address(options.socket)
    except (ValueError, OSError) as error:
        print(f"jaxserve.engine_process: {error}", file=sys.stderr)
        return EXIT_USAGE
    watch_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with zmq.Context() as context, open_socket(context, options.socket, bind=False) as socket:
        try:
            engine = build_engine(config, _PrintProgress())
        except Exception as error:
            logger.exception("the engine could not be started")
            socket.send(encode(EngineFailed(f"{type(error).__name__}: {error}")))
            return EXIT_FAILED
        return _serve(engine, socket, options.drain)


def _serve(engine: Engine | EncoderEngine, socket: zmq.Socket, drain_s: float) -> int:
    loop = EngineLoop(engine, socket)
    num_signals = 0

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        loop.stop(drain_s if num_signals == 1 else 0.0)

    signal.signal(signal.SIGTERM, terminate)
    # Everything alive now stays alive: later collections need not look at it.
    gc.collect()
    gc.freeze()
    if not loop.run():
        return EXIT_FAILED
    engine.close()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # A failed engine leaves nothing behind that could be ended in order: its devices, or those of a lost host, may
        # wait for ever, and JAX waits for them when the interpreter ends.
        os._exit(status)
