"""What the command says of checkpoints that must not be served: file and tensor by name, one line, exit status 1."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import cli

LLAMA = Path(__file__).parents[1] / "fixtures" / "tiny" / "llama"
FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {FIRST: names[::2], SECOND: names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def truncated_shard(folder: Path) -> None:
    shard(folder)
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[: len(data) // 2])


def index_that_names_another_shard(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    name = min(index["weight_map"])
    index["weight_map"][name] = SECOND if index["weight_map"][name] == FIRST else FIRST
    (folder / INDEX).write_text(json.dumps(index))


def broken_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text('{"weight_map": ')


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / FIRST).unlink()


def missing_head(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))


def nan_weights(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors[name].__setitem__((3, 4), np.nan))


def unknown_rope(folder: Path) -> None:
    configure(folder, rope_scaling={"rope_type": "spiral", "factor": 2.0}, rope_parameters=None)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    # Read as a pickle this would make a file.
    code = f"cposix\nsystem\n(S'touch {folder}/ran'\ntR."
    (folder / "pytorch_model.bin").write_bytes(code.encode())


def surplus(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.7.extra.weight": np.zeros(3, np.float32)}))


def misshapen(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.zeros(65, np.float32)}))


def remote_code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    configure(folder, architectures=["EvilForCausalLM"], auto_map={"AutoModelForCausalLM": "evil.Model"})


BAD = [
    (truncated_shard, (SECOND, "tensor 'model.", "truncated")),
    (index_that_names_another_shard, (SECOND, "tensor 'lm_head.weight'", "missing")),
    (broken_index, (INDEX, "not valid JSON")),
    (missing_shard, (FIRST, "the shard is missing")),
    (missing_head, ("missing: lm_head.weight",)),
    (nan_weights, ("model.safetensors", "model.layers.1.mlp.down_proj.weight", "NaN")),
    (unknown_rope, ("config.json", "rope type: got 'spiral'; allowed: default")),
    (pickled, ("only pickled weights (pytorch_model.bin)",)),
    (surplus, ("model.safetensors", "left over: model.layers.7.extra.weight")),
    (misshapen, ("model.safetensors", "model.norm.weight is [65], allowed [64]")),
    (remote_code, ("config.json", "architecture: got 'EvilForCausalLM'")),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(LLAMA / name, folder / name)
    return folder


@pytest.mark.parametrize(("damage", "said"), BAD, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("command", ["run", "convert"])
def test_refused_with_file_and_tensor(
    command: str,
    damage: Callable[[Path], None],
    said: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`run` loads a model as `serve` and `chat` do; nothing is compiled, printed or left behind."""
    damage(folder)
    target = folder.parent / "out"
    arguments = [command, str(folder), *(["Hello"] if command == "run" else [str(target)]), "--check-weights"]
    monkeypatch.setattr(sys, "argv", ["jaxserve", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capfd.readouterr()
    assert end.value.code == 1
    line = err.strip().splitlines()[-1]
    assert line.startswith("jaxserve: ") and str(folder) in line
    for part in said:
        assert part in line, line
    assert "Traceback" not in err and not out.strip()
    assert not target.exists() and not (folder / "ran").exists()


def test_the_engine_process_says_the_same(folder: Path, tmp_path: Path) -> None:
    """As the server starts it: exit status 1, and the reason in its log."""
    missing_head(folder)
    socket = tmp_path / "s"
    socket.mkdir(mode=0o700)
    config = json.dumps({"model": str(folder)})
    command = [sys.executable, "-m", "jaxserve.engine_process", "--config", config, "--socket", f"ipc://{socket}/e"]
    code = (
        "import subprocess, sys, zmq\n"
        "front = zmq.Context().socket(zmq.PAIR)\n"
        f"front.bind('ipc://{socket}/e')\n"
        f"sys.exit(subprocess.run({command!r}).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "missing: lm_head.weight" in done.stderr and str(folder) in done.stderr
