"""The engine's process with a scripted runner: `python scripted_process.py MODE [arguments of engine_process]`."""

import sys
import time

from engine_fakes import alphabet, make_engine

from jaxserve import engine_process


def slow(work):
    time.sleep(0.01)
    return alphabet(work)


def broken(config, progress=None):
    raise ValueError("model.gguf: tensor 'output.weight' is missing")


def scripted(config, progress=None):
    return make_engine(slow, max_model_len=4000, num_pages=2000)


def crashing(config, progress=None):
    engine = scripted(config)
    engine._runner.fails_at = 5
    return engine


engine_process.build_engine = {"scripted": scripted, "broken": broken, "crashing": crashing}[sys.argv[1]]
sys.exit(engine_process.main(sys.argv[2:]))
