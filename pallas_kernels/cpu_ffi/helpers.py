"""Threads that stay awake between the calls of a step, so that a product need not wait for one to wake up.

A decode step of a small model is a hundred calls of 20 to 100 microseconds each. Waking a thread of XLA's pool takes as
long as such a call (an idle virtual CPU has to be interrupted first), so the second core would come when the work is
done. These helpers look for work for SPIN_US after their last, offering their core to whoever wants it as they do
(sched_yield), and only then sleep.

A helper must not wait for the core that its caller computes on, as one that looks for work there would: the system
finds it waiting and another core idle only now and then, and a step is over by then. So whoever offers a job to a
helper that sleeps, or was last seen on the caller's core, takes that core out of those that the helper may use, unless
somebody has changed the caller's own since the start. (On Linux, with few cores: among many one helper is hardly
missed, and each would have to be told.)

A helper has a mailbox for one job. Whoever put a job there may take it back as long as the helper has not; a mailbox
that is taken is not waited for, XLA's pool serves instead. So a helper that is late, busy or (after a fork) gone costs
nothing but its help.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading

import llvmlite.binding as llvm
from jaxserve.pallas_kernels.cpu_ffi.call_frame import (
    address_of,
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_swap,
    call_task,
    clock_gettime,
    copy_bytes,
    jit,
    load_i64,
    pause,
    sched_getaffinity,
    sched_getcpu,
    sched_setaffinity,
    sched_yield,
    sem_post,
    sem_wait,
    stack,
    store_i64,
    symbol_address,
    zero_bytes,
)
from jaxserve.pallas_kernels.cpu_ffi.object_cache import compile_function
from numba import types

# How long a helper looks for work before it sleeps: longer than what XLA does between two products of a step, and than
# it takes from one program to the next. 0: it sleeps at once (for machines with more engines than cores).
SPIN_US = 200
SPIN_VARIABLE = "JAXSERVE_CPU_SPIN_US"
_SPINS_BEFORE_YIELD = 32
_IS_LINUX = sys.platform == "linux"
_MAX_CORES = 8  # of a process whose helpers keep off their caller's

# A helper's record: its mailbox, whether it sleeps, how long it looks (nanoseconds), what it sleeps on (sem_t); the
# core on which it looked last, its thread, the core that it may not use (-1: none), and whether that is being changed.
_MAILBOX, _IS_ASLEEP, _SPIN_NS, _SEMAPHORE = 0, 64, 128, 192
_CORE, _THREAD, _AVOIDED, _IS_MOVING = 256, 264, 272, 280
_OFFERED, _TAKEN_BACK, _RECORD_BYTES = 320, 328, 384  # numbers of jobs
_MASK_BYTES = 128  # of a cpu_set_t
# Before the records their number, on a cache line of its own, and the cores of this process (cpu_set_t).
_COUNT, _CORES, _RECORDS = 0, 64, 192
# In a job: the C function that works on it.
JOB_ENTRY = 0

_SYMBOL = "jaxserve_cpu_helpers"
_team = symbol_address(_SYMBOL)


@functools.cache
def start_helpers() -> None:
    """Start one helper for each core of this process but one. They end with the process.

    Raises ValueError for a JAXSERVE_CPU_SPIN_US that is not a number from 0 to 1,000,000.
    """
    count, spin_us = max(0, _num_cores() - 1), _spin_us()
    size = _RECORDS + count * _RECORD_BYTES
    _keep.append(memory := ctypes.create_string_buffer(size + 64))
    base = (ctypes.addressof(memory) + 63) // 64 * 64
    _int64(base + _COUNT).value = count
    (ctypes.c_ubyte * _MASK_BYTES).from_address(base + _CORES)[:] = _core_mask()
    if hasattr(os, "register_at_fork"):  # a child has no helpers, and its parent's are none of its business
        os.register_at_fork(after_in_child=lambda: ctypes.memset(base + _CORES, 0, _MASK_BYTES))
    llvm.add_symbol(_SYMBOL, base)
    libc = ctypes.CDLL(None, use_errno=True)
    address, code = compile_function(_serve, types.void, ("helper",))
    _keep.append(code)
    serve = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    for i in range(count):
        record = base + _RECORDS + i * _RECORD_BYTES
        _records.append(record)
        _int64(record + _AVOIDED).value = -1
        if libc.sem_init(ctypes.c_void_p(record + _SEMAPHORE), 0, 0):
            raise OSError(ctypes.get_errno(), "sem_init")
    set_spin_us(spin_us)
    for i, record in enumerate(_records):
        thread = threading.Thread(target=serve, args=(record,), name=f"jaxserve-cpu-{i}", daemon=True)
        thread.start()
        _int64(record + _THREAD).value = thread.native_id or -1  # 0 would be the caller


def set_spin_us(spin_us: int) -> None:
    """How long the helpers that were started look for work from now on; for benchmarks."""
    for record in _records:
        _int64(record + _SPIN_NS).value = 1000 * spin_us


def count_jobs() -> tuple[int, int]:
    """How many jobs helpers were offered since the start, and how many of those they took before their callers, who do
    them alone otherwise, took them back."""
    taken_back, offered = (sum(_int64(record + at).value for record in _records) for at in (_TAKEN_BACK, _OFFERED))
    return offered, offered - taken_back


_int64 = ctypes.c_int64.from_address
_records: list[int] = []  # addresses
_keep: list[object] = []  # memory and code that threads use until the process ends


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _core_mask() -> bytes:
    """The cores of this process as a cpu_set_t; zeros where helpers stay where the system puts them."""
    cores = os.sched_getaffinity(0) if _IS_LINUX else set()
    if len(cores) > _MAX_CORES or max(cores, default=0) >= 8 * _MASK_BYTES:
        return bytes(_MASK_BYTES)
    return sum(1 << core for core in cores).to_bytes(_MASK_BYTES, "little")


def _spin_us() -> int:
    text = os.environ.get(SPIN_VARIABLE, str(SPIN_US))
    if not text.isdecimal() or not 0 <= int(text) <= 1_000_000:
        raise ValueError(f"{SPIN_VARIABLE}: got {text!r}; allowed: microseconds, 0 to 1000000")
    return int(text)


@jit
def _now_ns():
    spec = stack(16)
    clock_gettime(1, spec)  # CLOCK_MONOTONIC
    return load_i64(spec, 0) * 1_000_000_000 + load_i64(spec, 8)


if _IS_LINUX:

    @jit
    def _core():
        return sched_getcpu() & 0xFFFFFFFF  # of an int

    @jit
    def _is_free(cores):
        """Whether the calling thread may use the cores that the process had at the start, and no others."""
        present, is_same = stack(_MASK_BYTES), True
        zero_bytes(present, _MASK_BYTES)
        sched_getaffinity(0, _MASK_BYTES, present)
        for place in range(0, _MASK_BYTES, 8):
            is_same = is_same and load_i64(present, place) == load_i64(cores, place)
        return is_same

    @jit
    def _keep_away(record, core):
        """Take `core`, the caller's, out of those that a helper may use."""
        cores, place, bit = _team() + _CORES, core // 64 * 8, 1 << (core % 64)
        if load_i64(record, _AVOIDED) == core or place >= _MASK_BYTES or load_i64(cores, place) & bit == 0:
            return
        if not _is_free(cores) or not atomic_replace(record + _IS_MOVING, 0, 1):
            return
        mask = stack(_MASK_BYTES)
        copy_bytes(mask, cores, _MASK_BYTES)
        store_i64(mask, place, load_i64(cores, place) & ~bit)
        if sched_setaffinity(load_i64(record, _THREAD), _MASK_BYTES, mask) & 0xFFFFFFFF == 0:
            store_i64(record, _AVOIDED, core)
        atomic_swap(record + _IS_MOVING, 0)

else:

    @jit
    def _core():
        return -1

    @jit
    def _keep_away(record, core):
        pass


def _serve(pointer):
    """Work on one job after the other, for good."""
    record = address_of(pointer)
    while True:
        job = _take(record)
        call_task(load_i64(job, JOB_ENTRY), job)


@jit
def _take(record):
    """Wait for a job in the mailbox and empty it."""
    until, spins = _now_ns() + load_i64(record, _SPIN_NS), 0
    while True:
        if atomic_load(record + _MAILBOX) != 0:
            job = atomic_swap(record + _MAILBOX, 0)
            if job != 0:  # else it was taken back
                return job
        pause()
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            continue
        spins = 0
        sched_yield()
        store_i64(record, _CORE, _core())
        if _now_ns() < until:
            continue
        atomic_swap(record + _IS_ASLEEP, 1)
        if atomic_load(record + _MAILBOX) == 0:
            sem_wait(record + _SEMAPHORE)  # may return for nothing
        atomic_swap(record + _IS_ASLEEP, 0)
        until = _now_ns() + load_i64(record, _SPIN_NS)


@jit
def num_helpers():
    return load_i64(_team(), _COUNT)


@jit
def offer(i, job):
    """Put `job` into the mailbox of helper i. False: there is another one in it."""
    record = _team() + _RECORDS + i * _RECORD_BYTES
    if not atomic_replace(record + _MAILBOX, 0, job):
        return False
    atomic_add(record + _OFFERED, 1)
    core = _core()
    if atomic_swap(record + _IS_ASLEEP, 0) != 0:
        _keep_away(record, core)
        sem_post(record + _SEMAPHORE)
    elif load_i64(record, _CORE) == core:
        _keep_away(record, core)
    return True


@jit
def take_back(i, job):
    """Whether `job` still lay in the mailbox of helper i, which is then empty."""
    record = _team() + _RECORDS + i * _RECORD_BYTES
    is_back = atomic_replace(record + _MAILBOX, job, 0)
    if is_back:
        atomic_add(record + _TAKEN_BACK, 1)
    return is_back
