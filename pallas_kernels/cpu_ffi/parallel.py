"""FFI handlers whose work items run on several threads: the caller, helpers that stay awake, XLA's own pool.

Items are claimed from an atomic counter by the calling thread and by whoever shows up. The caller alone can finish
everything, so helpers that are late or busy cannot deadlock it. Helpers (helpers.py) come first, since XLA's pool takes
longer to wake up than most calls last; XLA's pool stands in where they work for another call. (numba's prange would
start a pool that does not sleep and wake like this, and its default layer aborts on concurrent calls.) XLA's pool does
not survive fork: processes that compute must be spawned.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import jax
import llvmlite.binding as llvm
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    STAGE_EXECUTE,
    address_of,
    answer_metadata,
    atomic_add,
    atomic_load,
    call_task,
    const_string,
    flush_subnormals,
    free,
    jit,
    load_i64,
    make_error,
    malloc,
    num_threads,
    pause,
    restore_subnormals,
    sched_yield,
    schedule,
    stage,
    store_i64,
    symbol_address,
)
from jaxserve.pallas_kernels.cpu_ffi.helpers import JOB_ENTRY, num_helpers, offer, start_helpers, take_back
from jaxserve.pallas_kernels.cpu_ffi.object_cache import compile_function
from numba import types

# What a handler's `plan` returns instead of the address of a plan.
BAD_ARGUMENTS, NO_MEMORY = -1, -2
# The head of every plan: number of work items, and of threads worth using (int64 each).
PLAN_ITEMS, PLAN_THREADS, PLAN_HEAD = 0, 8, 16
_SPINS_BEFORE_YIELD = 100

# One call's shared record; each counter on its own cache line. It outlives the call, since a pool thread may
# arrive after the last item: hence the reference count. Frame and plan are touched only while items are left.
_NEXT, _DONE, _WORKERS, _REFERENCES, _NUM_ITEMS, _FRAME, _PLAN = 64, 128, 192, 256, 320, 328, 336
_JOB_BYTES = 384  # begins with JOB_ENTRY

_lock = threading.RLock()  # numba compiles in one thread at a time; registration is checked under it too
_registered: dict[str, list[object]] = {}  # name -> objects that keep its code alive, for good


def named(tag: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` for a function made in a closure over compile-time parameters, which `tag` spells out.

    The linker tells functions apart by name alone, and code loaded from disk brings the names of another
    process: two specialisations must never share one.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{function.__qualname__}_{tag}"
        return jit(function)

    return decorate


@jit
def wait_for(counter, value):
    """Return once the int64 at `counter` has reached `value`."""
    spins = 0
    while atomic_load(counter) < value:
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            sched_yield()


def register_handler(name: str, make_parts: Callable[[], tuple[Any, Any, Any]]) -> str:
    """Compile and register the FFI target `name` (for CPU), unless that was done; returns `name`.

    `name` must spell out every compile-time parameter: a process registers each name once. make_parts()
    returns three numba functions:
        plan(frame) -> address of a plan (PLAN_HEAD, then what body needs), or BAD_ARGUMENTS or NO_MEMORY
        body(frame, plan, i, worker)   one work item; workers are numbered from 0 below the plan's threads
        finish(frame, plan)            called once, after the last item; frees the plan
    Items are claimed in order: an item may wait for ones before it (`wait_for`), never for later ones.
    """
    with _lock:
        if name not in _registered:
            start_helpers()
            _registered[name] = _register(name, *make_parts())
    return name


def _register(name: str, plan: Any, body: Any, finish: Any) -> list[object]:
    bad_arguments = const_string(f"{name}: unacceptable argument types or shapes, or pages not updated in place")
    no_memory = const_string(f"{name}: out of memory for work space")

    def task(pointer):
        """Run items until none is left, then let go of the job."""
        job = address_of(pointer)
        items, worker = load_i64(job, _NUM_ITEMS), -1
        mode = flush_subnormals()  # whichever thread it is: the same bits
        while True:
            i = atomic_add(job + _NEXT, 1)
            if i >= items:
                break
            if worker < 0:
                worker = atomic_add(job + _WORKERS, 1)
            body(load_i64(job, _FRAME), load_i64(job, _PLAN), i, worker)
            atomic_add(job + _DONE, 1)
        restore_subnormals(mode)
        if atomic_add(job + _REFERENCES, -1) == 1:
            free(job)

    task.__qualname__ = f"{name}_task"
    task_address, task_code = compile_function(task, types.void, (name,))
    # The handler reaches the task through the linker: its code is compiled once, and the handler can be kept
    # on disk without an address in it.
    llvm.add_symbol(f"{name}_task_entry", task_address)
    task_symbol = symbol_address(f"{name}_task_entry")

    @named(name)
    def run(frame, plan_address, items, threads):
        job = malloc(_JOB_BYTES)
        if job == 0:
            return False
        store_i64(job, _NEXT, 0)
        store_i64(job, _DONE, 0)
        store_i64(job, _WORKERS, 0)
        store_i64(job, _REFERENCES, threads + 1)  # one for each task, and one for waiting here
        store_i64(job, _NUM_ITEMS, items)
        store_i64(job, _FRAME, frame)
        store_i64(job, _PLAN, plan_address)
        entry = task_symbol()
        store_i64(job, JOB_ENTRY, entry)
        for i in range(threads - 1):
            is_taken = i < num_helpers() and offer(i, job)
            if not is_taken and not schedule(frame, entry, job):
                atomic_add(job + _REFERENCES, -1)
        call_task(entry, job)
        for i in range(min(threads - 1, num_helpers())):
            if take_back(i, job):
                atomic_add(job + _REFERENCES, -1)
        wait_for(job + _DONE, items)
        if atomic_add(job + _REFERENCES, -1) == 1:
            free(job)
        return True

    def handler(pointer):
        frame = address_of(pointer)
        if answer_metadata(frame) or stage(frame) != STAGE_EXECUTE:
            return 0
        mode = flush_subnormals()  # a plan may do the work of few tokens
        plan_address = plan(frame)
        restore_subnormals(mode)
        if plan_address == BAD_ARGUMENTS:
            return make_error(frame, INVALID_ARGUMENT, bad_arguments())
        if plan_address == NO_MEMORY:
            return make_error(frame, RESOURCE_EXHAUSTED, no_memory())
        items = load_i64(plan_address, PLAN_ITEMS)
        threads = min(load_i64(plan_address, PLAN_THREADS), items)
        if threads > 1:
            threads = min(threads, num_threads(frame))
        is_done = items == 0 or run(frame, plan_address, items, max(threads, 1))
        finish(frame, plan_address)
        return 0 if is_done else make_error(frame, RESOURCE_EXHAUSTED, no_memory())

    handler.__qualname__ = f"{name}_handler"
    handler_address, handler_code = compile_function(handler, types.intp, (name,))
    jax.ffi.register_ffi_target(name, _capsule(handler_address), platform="cpu", api_version=1)
    return [task_code, handler_code]


def _capsule(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
