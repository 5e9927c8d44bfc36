"""Mosaic GPU kernels in JAX's GPU interpreter, on a CPU. The only file that touches the interpreter's private parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def interpreter_params(*, detect_races: bool = False) -> Any:
    """For the `interpret` argument of the kernels: shared memory and outputs start as NaN, a read out of bounds
    raises."""
    return plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan", out_of_bounds_reads="raise")


@contextlib.contextmanager
def races_raise() -> Iterator[None]:
    """Around the execution (not only the tracing) of kernels interpreted with race detection: raises AssertionError
    when a race was recorded."""
    # The recorded races have no public name: a version that moves them fails here, and no race goes unseen.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        yield
        assert not gpu_callbacks.get_races().races_found, "the interpreter found a data race"
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def compile_once() -> None:
    """Make the interpreter compile a kernel's body once, not once per warpgroup and block: many times faster.

    JAX 0.12 lowers and compiles the same program anew for every simulated thread, and has no public name for where
    it does: for tests only. Does nothing where a later version has another structure.
    """
    try:
        from jax._src.pallas.mosaic.interpret import thread_map
    except ImportError:
        return
    if not hasattr(thread_map, "_run_jaxpr") or not hasattr(thread_map, "_run"):
        return
    programs: dict[int, tuple[Any, Any]] = {}
    lock = threading.Lock()

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if id(jaxpr) not in programs:
                if len(programs) > 64:
                    programs.clear()
                traced = jax.jit(thread_map._run, static_argnums=(0,)).trace(jaxpr, consts, *args)
                programs[id(jaxpr)] = jaxpr, traced.lower().compile()  # kept alive, so that the id stays its own
            program = programs[id(jaxpr)][1]
        program(consts, *args)

    thread_map._run_jaxpr = run
