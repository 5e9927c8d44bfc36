"""The engine behind its socket, in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from engine_fakes import alphabet, make_engine

from jaxserve.cache.page_hashes import hash_pages, namespace_hash
from jaxserve.config import EngineConfig
from jaxserve.engine_link import check_address, engine_command, make_private_folder, open_socket, parse_config
from jaxserve.engine_loop import EngineLoop
from jaxserve.messages import (
    AbortRequest,
    AddRequest,
    CacheEvents,
    EngineFailed,
    EngineReady,
    FlushCache,
    Heartbeat,
    OutputBatch,
    Shutdown,
    decode_from_engine,
    encode,
)
from jaxserve.sampling_params import SamplingParams

HERE = Path(__file__).parent


class FrontEnd:
    """The other end of the socket."""

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket
        self.child: subprocess.Popen[bytes] | None = None

    def send(self, message: object) -> None:
        self.socket.send(encode(message))

    def add(self, request_id: str = "r", **options) -> None:
        self.send(AddRequest(request_id=request_id, prompt=[1, 2, 3], params=SamplingParams(**options)))

    def receive(self, timeout_s: float = 60.0):
        end = time.monotonic() + timeout_s
        while not self.socket.poll(500):
            assert time.monotonic() < end, f"no message within {timeout_s} s"
            assert self.child is None or self.child.poll() is None, "the process ended without a word"
        return decode_from_engine(self.socket.recv())

    def wait_for(self, kind, timeout_s: float = 60.0):
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            message = self.receive(timeout_s)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, EngineFailed), message.reason
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def outputs_until_end(self, request_id: str = "r"):
        outputs = []
        while not (outputs and outputs[-1].finish_reason):
            batch = self.wait_for(OutputBatch)
            outputs += [out for out in batch.outputs if out.request_id == request_id]
        return outputs


@contextlib.contextmanager
def bound():
    folder = make_private_folder()
    address = f"ipc://{folder}/engine"
    with zmq.Context() as context, open_socket(context, address, bind=True) as socket:
        socket.set(zmq.LINGER, 0)
        yield FrontEnd(socket), address
    shutil.rmtree(folder)


@contextlib.contextmanager
def process(mode: str = "scripted", *more: str):
    with bound() as (front, address):
        arguments = engine_command(EngineConfig(), address)[3:]
        child = subprocess.Popen([sys.executable, str(HERE / "scripted_process.py"), mode, *arguments, *more])
        front.child = child
        try:
            yield front, child
        finally:
            child.kill()
            child.wait()


@contextlib.contextmanager
def loop_in_thread(**options):
    with bound() as (front, address), zmq.Context() as context:
        socket = open_socket(context, address, bind=False)
        loop = EngineLoop(make_engine(**options), socket)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield front, loop
        finally:
            loop.stop(0.0)
            thread.join(10)
            socket.close()


def unhurried(work) -> int:
    """Messages travel while steps run: what must meet a running request would otherwise find it ended."""
    time.sleep(0.005)
    return alphabet(work)


LONG = {"script": unhurried, "max_model_len": 4000, "num_pages": 2000}  # room for 20 s of steps


def test_a_request_travels_there_and_back():
    with loop_in_thread(**LONG) as (front, _):
        assert front.receive() == EngineReady(make_engine(**LONG).model)
        front.add(max_tokens=5)
        outputs = front.outputs_until_end()
        assert "".join(out.text for out in outputs) == "abcde"
        front.add("x")
        front.send(AbortRequest("x"))
        assert front.outputs_until_end("x")[-1].finish_reason == "abort"


def test_cached_pages_are_told_if_asked_for():
    prompt = list(range(10))
    with loop_in_thread(kv_events=True) as (front, _):
        front.wait_for(EngineReady)
        front.send(AddRequest(request_id="r", prompt=prompt, params=SamplingParams(max_tokens=2)))
        told = front.wait_for(CacheEvents)
        expected = hash_pages(namespace_hash(""), np.array(prompt, np.int32), 4)
        assert told.stored == expected and told.evicted == []
        # What a running request holds is not forgotten, so the request has to end first.
        front.send(AddRequest(request_id="s", prompt=[99], params=SamplingParams(max_tokens=1)))
        unfinished = {"r", "s"}
        while "s" in unfinished:
            done = front.wait_for(OutputBatch).outputs
            unfinished -= {output.request_id for output in done if output.finish_reason}
        front.send(FlushCache())
        assert set(front.wait_for(CacheEvents).evicted) >= set(expected)


def test_outputs_of_one_step_come_as_one_batch():
    with loop_in_thread(**LONG) as (front, _):
        front.wait_for(EngineReady)
        for k in range(8):
            front.add(f"{k}", max_tokens=20)
        sizes = []
        while sum(sizes) < 8 * 20:
            sizes.append(len(front.wait_for(OutputBatch).outputs))
        # Requests that arrive while steps run join one by one, so how many of them a step answers is a matter of time.
        while (stats := front.wait_for(Heartbeat).stats).num_output_tokens < 8 * 20:
            pass
        assert len(sizes) <= stats.num_steps < 8 * 20


def test_malformed_messages_are_dropped_and_a_readable_request_is_answered():
    with loop_in_thread() as (front, _):
        front.wait_for(EngineReady)
        good = msgspec.msgpack.decode(encode(AddRequest(request_id="q", prompt=[1], params=SamplingParams())))
        bad = {**good, "params": {"temperature": -1.0}}
        for junk in (
            b"", b"\xc1", b"\x93\x01", os.urandom(200), encode({"type": "Reboot"}), encode([1, 2]),
            encode({**good, "prompt": "text"}) [:-1], encode(bad),
        ):  # fmt: skip
            front.socket.send(junk)
        refused = front.outputs_until_end("q")[-1]
        assert refused.finish_reason == "error" and "temperature" in refused.error
        front.add(max_tokens=2)
        assert front.outputs_until_end()[-1].finish_reason == "length"


def test_heartbeats_while_idle_and_while_busy():
    with loop_in_thread(**LONG) as (front, _):
        front.wait_for(EngineReady)
        for work in (None, "busy"):
            if work:
                front.add(work, max_tokens=3000)
            times = []
            while len(times) < 4:
                front.wait_for(Heartbeat)
                times.append(time.monotonic())
            assert max(b - a for a, b in itertools.pairwise(times)) < 1.0


def test_shutdown_message_drains():
    with loop_in_thread() as (front, _):
        front.wait_for(EngineReady)
        front.add(max_tokens=30)
        front.send(Shutdown(drain_s=30.0))
        assert front.outputs_until_end()[-1].finish_reason == "length"
        front.wait_for(Heartbeat)


def test_process_serves_and_sigterm_drains():
    with process() as (front, child):
        assert front.wait_for(EngineReady).model.name == "scripted"
        front.add(max_tokens=300)
        front.wait_for(OutputBatch)
        os.kill(child.pid, signal.SIGINT)  # not for the engine
        os.kill(child.pid, signal.SIGTERM)
        front.add("late")
        ends = {}
        while len(ends) < 2:
            for out in front.wait_for(OutputBatch).outputs:
                if out.finish_reason:
                    ends[out.request_id] = out
        assert ends["r"].finish_reason == "length" and ends["r"].num_output_tokens == 300
        assert ends["late"].parameter == "engine"
        assert child.wait(20) == 0


def test_a_second_sigterm_ends_at_once():
    with process() as (front, child):
        front.wait_for(EngineReady)
        front.add(max_tokens=3000)
        front.wait_for(OutputBatch)
        os.kill(child.pid, signal.SIGTERM)
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGTERM)
        assert front.outputs_until_end()[-1].finish_reason == "abort"
        assert child.wait(20) == 0


def test_an_idle_process_sleeps():
    with process() as (front, child):
        front.wait_for(EngineReady)
        front.wait_for(Heartbeat)
        before = _cpu_seconds(child.pid)
        time.sleep(2.0)
        assert _cpu_seconds(child.pid) - before <= 0.1


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_checkpoint_that_cannot_be_loaded_is_reported():
    with process("broken") as (front, child):
        assert "output.weight" in front.wait_for(EngineFailed).reason
        assert child.wait(20) == 1


def test_a_crash_is_reported():
    with process("crashing") as (front, child):
        front.wait_for(EngineReady)
        front.add(max_tokens=100)
        assert "the device is gone" in front.wait_for(EngineFailed).reason
        assert child.wait(20) == 1


def test_the_process_ends_with_its_parent():
    """A grandchild: its parent is killed, nobody tells it."""
    with bound() as (front, address):
        script = (
            "import subprocess, sys, time; from jaxserve.config import EngineConfig;"
            "from jaxserve.engine_link import engine_command;"
            "child = subprocess.Popen([sys.executable, sys.argv[1], 'scripted',"
            " *engine_command(EngineConfig(), sys.argv[2])[3:]]);"
            "print(child.pid, flush=True); time.sleep(600)"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", script, str(HERE / "scripted_process.py"), address], stdout=subprocess.PIPE
        )
        pid = int(parent.stdout.readline())
        front.wait_for(EngineReady)
        parent.kill()
        parent.communicate()
        for _ in range(50):
            if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
                return
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the engine outlived its parent by 5 s")


def test_command_line_mistakes():
    command = [sys.executable, "-m", "jaxserve.engine_process"]
    for options, words in (
        (["--config", '{"max_num_rows": 0}', "--socket", "ipc:///x/y"], "max_num_rows"),
        (["--config", "{}", "--socket", "tcp://0.0.0.0:1"], "tcp://0.0.0.0:1"),
        (["--config", "/nowhere.json", "--socket", "ipc:///x/y"], "/nowhere.json"),
    ):
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_sockets_live_in_private_folders(tmp_path):
    folder = make_private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    check_address(f"ipc://{folder}/s")
    folder.chmod(0o750)
    with pytest.raises(ValueError, match="mode 0700"):
        check_address(f"ipc://{folder}/s")
    folder.rmdir()
    with pytest.raises(ValueError, match="cannot be used"):
        check_address(f"ipc://{folder}/s")


def test_configurations_travel_whole(tmp_path):
    config = EngineConfig(model="x", dtype="float32", num_pages=77, overlap=False, page_size=8)
    text = engine_command(config, "ipc:///a/b")[4]
    assert parse_config(text) == config
    packed = tmp_path / "c.msgpack"
    packed.write_bytes(msgspec.msgpack.encode(dataclasses.asdict(config)))
    assert parse_config(str(packed)) == config
    with pytest.raises(ValueError, match="dtype"):
        parse_config('{"dtype": "float8"}')
