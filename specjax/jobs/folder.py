"""Folders of whole files, on a disk or in a bucket: a file is there complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import SpecjaxError, UsageError

REMOTE = ("gs://", "s3://", "az://")
_TEMPORARY = ".tmp"


def is_remote(path: object) -> bool:
    """Say whether a path names a bucket."""
    return str(path).startswith(REMOTE)


def open_folder(path: str | Path) -> Folder:
    """Return the folder at a path; nothing is made yet."""
    return RemoteFolder(str(path)) if is_remote(path) else Folder(Path(path))


class Folder:
    """A folder on a disk. Files are written under a temporary name, synced and renamed.

    Args:
        path: where; it need not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self._held: int | None = None

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Say whether it is there."""
        return self.path.is_dir()

    def names(self) -> list[str]:
        """Return the names in it, sorted, without half-written files; none where it does not exist."""
        if not self.exists():
            return []
        return sorted(name for name in os.listdir(self.path) if not name.endswith(_TEMPORARY))

    def make(self) -> None:
        """Make it, drop half-written files, and hold it against a second run until ``release``.

        Raises:
            UsageError: it cannot be made, or another run holds it.
        """
        try:
            self.path.mkdir(exist_ok=True)
            for name in os.listdir(self.path):
                if name.endswith(_TEMPORARY):
                    (self.path / name).unlink(missing_ok=True)
            self._hold()
        except OSError as error:
            raise UsageError(f"Cannot write the output {self}: {reason(error)}.") from error

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all.

        Raises:
            SpecjaxError: the disk is full, or the folder cannot be written.
        """
        temporary = self.path / (name + _TEMPORARY)
        try:
            with open(temporary, "wb") as file:
                write_all(file.fileno(), data)
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)
            self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise SpecjaxError(f"Cannot write {self.path / name}: {reason(error)}.") from error

    def join(self, names: Sequence[str], final: str | Path) -> None:
        """Write files one after another into one file elsewhere on the same disk, whole or not at all.

        Raises:
            SpecjaxError: the disk is full, or it cannot be written.
        """
        temporary = self.path / ("joined" + _TEMPORARY)
        try:
            with open(temporary, "wb") as file:
                for name in names:
                    with open(self.path / name, "rb") as part:
                        shutil.copyfileobj(part, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, final)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise SpecjaxError(f"Cannot write {final}: {reason(error)}.") from error

    def remove(self, names: Sequence[str]) -> None:
        """Remove files.

        Raises:
            SpecjaxError: one cannot be removed.
        """
        try:
            for name in names:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise SpecjaxError(f"Cannot remove files of {self}: {reason(error)}.") from error

    def drop(self) -> None:
        """Remove the folder if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def release(self) -> None:
        """Let others write to it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _hold(self) -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        self._held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UsageError(f"Another run is writing to {self}: wait for its end, or give another output.") from error
        except OSError:  # a disk without locks, as some network disks are
            self.release()

    def _sync(self) -> None:
        """Make the renaming itself survive a loss of power."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class RemoteFolder(Folder):
    """A folder in a bucket: one object per file, and an object appears whole."""

    def __init__(self, path: str):
        super().__init__(Path(path))
        self._name = path.rstrip("/")
        self._remote = remote_path(self._name)

    def __str__(self) -> str:
        return self._name

    def exists(self) -> bool:
        """Say whether it is there."""
        with _remote_errors(self._name):
            return self._remote.exists()

    def names(self) -> list[str]:
        """Return the names in it, sorted; none where it does not exist."""
        with _remote_errors(self._name):
            return sorted(item.name for item in self._remote.iterdir()) if self._remote.exists() else []

    def make(self) -> None:
        """Make it. A bucket has no locks: run one job at a time on it."""
        with _remote_errors(self._name):
            self._remote.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes:
        """Return an object's bytes."""
        with _remote_errors(self._name):
            return (self._remote / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write an object.

        Raises:
            SpecjaxError: the bucket refuses it.
        """
        with _remote_errors(f"{self._name}/{name}"):
            (self._remote / name).write_bytes(data)

    def join(self, names: Sequence[str], final: str | Path) -> None:
        """Write objects one after another into one.

        Raises:
            SpecjaxError: the bucket refuses it.
        """
        with _remote_errors(str(final)), remote_path(str(final)).open("wb") as file:
            for name in names:
                file.write((self._remote / name).read_bytes())

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects."""
        with _remote_errors(self._name):
            for name in names:
                (self._remote / name).unlink(missing_ok=True)

    def drop(self) -> None:
        """A bucket has no empty folders."""


def remote_path(path: str) -> Any:
    """Return a path in a bucket, as etils.epath has it."""
    from etils import epath

    return epath.Path(path)


def read_remote(path: str) -> bytes:
    """Return an object's bytes.

    Raises:
        UsageError: it is not there, or cannot be reached.
    """
    if not is_remote(path):
        raise UsageError(f"Cannot read {path}: expected a file, or a name that begins with {', '.join(REMOTE)}.")
    try:
        with _remote_errors(path):
            return remote_path(path).read_bytes()
    except SpecjaxError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def _remote_errors(name: str) -> Iterator[None]:
    """Say in one line what a bucket's client says, whichever client it is."""
    try:
        yield
    except SpecjaxError:
        raise
    except ImportError as error:
        raise UsageError(f"Cannot reach {name}: {error}. Install gcsfs (gs://), s3fs or adlfs.") from error
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise SpecjaxError(f"Cannot reach {name}: {lines[0]}") from error


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def reason(error: OSError) -> str:
    """Return what the system says."""
    return error.strerror or type(error).__name__
