"""Helpers that stay awake between calls: nothing is lost, however many calls there are at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from jaxserve.pallas_kernels.backend import cpu_ffi_available

if not cpu_ffi_available()[0]:
    pytest.skip(cpu_ffi_available()[1], allow_module_level=True)

# Four threads at once, more than there are helpers; half of the calls are too small to be shared.
CALLS = """
import threading
import jax, jax.numpy as jnp, numpy as np
from jaxserve.pallas_kernels.matmul.cpu_ffi import linear_cpu
random = np.random.default_rng(0)
product, failures = jax.jit(linear_cpu), []
def work(seed):
    for outputs in (8, 4096):
        x, w = (np.float32(random.standard_normal(shape)) for shape in ((3, 64), (outputs, 64)))
        want = x @ w.T
        for _ in range(100):
            if not np.allclose(product(jnp.asarray(x), jnp.asarray(w)), want, atol=1e-4):
                failures.append((seed, outputs))
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
from jaxserve.pallas_kernels.cpu_ffi.helpers import count_jobs
offered, taken = count_jobs()
assert 0 <= taken <= offered and (offered > 0) == any(t.name.startswith("jaxserve-cpu") for t in threading.enumerate())
print("done", sum(thread.name.startswith("jaxserve-cpu") for thread in threading.enumerate()))
"""

# Helpers that sleep after each job are woken by the next call, which takes its own core away from them. On two cores,
# since where there are many nobody does.
CORES = (
    "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])"
    + CALLS
    + """
own = os.sched_getaffinity(0)
helpers = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("jaxserve-cpu")]
for cores in map(os.sched_getaffinity, helpers):
    assert cores <= own and len(cores) >= len(own) - 1, (cores, own)
print(sum(len(os.sched_getaffinity(helper)) < len(own) for helper in helpers))
"""
)
# What others have chosen stays: all threads on one core, and what a child does after a fork.
CHOSEN = (
    CORES
    + """
before = [os.sched_getaffinity(helper) for helper in helpers]
if not os.fork():
    os.sched_setaffinity(0, set(own) - before[0] or own)
    from jaxserve.pallas_kernels.cpu_ffi import helpers as module
    for i in range(len(helpers)):
        module.offer(i, 1), module.take_back(i, 1)
    os._exit(0)
os.wait()
assert before == [os.sched_getaffinity(helper) for helper in helpers]
(core, *_) = own
for thread in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(thread, {core})
work(5)
assert all(os.sched_getaffinity(helper) == {core} for helper in helpers) and not failures
"""
)
# One core has no helper to place, and other systems place it themselves.
needs_two_cores = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="helpers are placed on Linux with two cores"
)


def run(code: str, spin_us: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAXSERVE_CPU_SPIN_US": spin_us}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("spin_us", ["0", "100", "20000"])
def test_calls_from_many_threads_are_all_right(spin_us: str) -> None:
    done = run(CALLS, spin_us)
    assert done.stdout.split() == ["done", str(len(os.sched_getaffinity(0)) - 1)], done.stderr[-2000:]


@needs_two_cores
def test_a_helper_keeps_off_the_core_of_who_calls_it() -> None:
    done = run(CORES, "0")
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 0, done.stderr[-2000:]


@needs_two_cores
@pytest.mark.parametrize("spin_us", ["0", "200"])
def test_cores_that_others_chose_for_a_helper_stay(spin_us: str) -> None:
    done = run(CHOSEN, spin_us)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("spin_us", ["-1", "soon", "2000000"])
def test_a_time_that_is_none_is_refused(spin_us: str) -> None:
    done = run("from jaxserve.pallas_kernels.cpu_ffi.helpers import start_helpers; start_helpers()", spin_us)
    assert done.returncode and f"JAXSERVE_CPU_SPIN_US: got {spin_us!r}" in done.stderr
