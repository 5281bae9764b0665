"""Files and folders on disk: the cache folder, atomic writes, one maker at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specjax.errors import CheckpointError


class MissingCheckpoint(CheckpointError):
    """A checkpoint that is not there: a path that does not exist, or an id that the hub does not give."""


class NetworkError(CheckpointError):
    """A model that is not here and cannot be fetched, because the network does not answer."""


def cache_folder() -> Path:
    """Return the folder for fetched and converted models (not created here).

    ``$SPECJAX_CACHE``, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``.
    """
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "specjax"
    return Path.home() / ".cache" / "specjax"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). Copy or download the file again.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected an object.")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, indented, as UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def staging_prefix(final: Path) -> str:
    """Return how the names of folders begin that ``staged`` leaves behind when the process is killed."""
    return f".{final.name}.tmp-"


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Give an empty folder beside ``final`` that becomes ``final`` when the block ends well.

    Every file is on disk before the rename, so ``final`` is complete or absent; on any exception the
    folder is removed.

    Raises:
        CheckpointError: ``final`` exists, at the start or at the end.
    """
    if final.exists():
        raise CheckpointError(f"{final} exists already. Choose another folder, or remove it first.")
    final.parent.mkdir(parents=True, exist_ok=True)
    temp = final.parent / f"{staging_prefix(final)}{secrets.token_hex(6)}"
    temp.mkdir()
    try:
        yield temp
        _sync_tree(temp)
        try:
            if final.exists():  # rename() would replace an empty folder
                raise FileExistsError
            temp.rename(final)
        except OSError as error:
            if final.exists():
                raise CheckpointError(f"{final} exists already. Choose another folder, or remove it first.") from error
            raise
        _sync_path(final.parent)
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def make_once(final: Path, make: Callable[[Path], None], *, on_wait: Callable[[], None] = lambda: None) -> Path:
    """Return ``final``, made by ``make(empty_folder)`` if it is not there; safe under concurrent calls.

    Temporary folders of makers that were killed are removed. Where locks do not work (some network file
    systems) two makers may work at once, and the first rename wins.

    Args:
        final: the folder wanted.
        make: fills the folder it is given; an exception leaves nothing behind.
        on_wait: called once when another process is making the folder.
    """
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = open(final.parent / f".{final.name}.lock", "a")  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(
            f"The cache folder {final.parent} cannot be written ({error.strerror or error}). "
            "Set SPECJAX_CACHE to a folder that can."
        ) from error
    with lock:
        locked = _lock(lock.fileno(), on_wait)
        if final.is_dir():
            return final
        if locked:
            for stale in final.parent.glob(staging_prefix(final) + "*"):
                shutil.rmtree(stale, ignore_errors=True)
        try:
            with staged(final) as temp:
                make(temp)
        except CheckpointError:
            if not locked and final.is_dir():
                return final
            raise
    return final


def _lock(fd: int, on_wait: Callable[[], None]) -> bool:
    """Take an exclusive lock, waiting for it; False where the system has none."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        on_wait()
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_EX)
    return True


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        # A folder cannot be synced everywhere; a file can, and its failure is a full or broken disk.
        if path.is_file():
            raise
    finally:
        os.close(fd)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            _sync_path(Path(root) / name)
        _sync_path(Path(root))
