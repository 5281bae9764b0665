"""Where a job's rows go: a folder of parts, or a single file made of parts in a folder beside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from specjax.errors import SpecjaxError, UsageError
from specjax.jobs import manifest as m
from specjax.jobs.folder import Folder, is_remote, open_folder, remote_path
from specjax.jobs.parts import part_names

PUBLISHING = "publishing"
COMPLETE = "complete"


def is_stream(path: str | Path | None) -> bool:
    """Say whether rows are written straight to a path: standard output, a device or a pipe."""
    if path is None or str(path) == "-":
        return True
    if is_remote(path):
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def names_a_folder(path: str | Path) -> bool:
    """Say whether an output is a folder: it is one, or it ends in "/", or its name has no suffix."""
    text = str(path)
    if not is_remote(path) and os.path.exists(path):
        return os.path.isdir(path)
    return text.endswith("/") or not Path(text).suffix


class Place:
    """An output, checked before any work; nothing is changed until ``begin``.

    Args:
        path: a folder, or a file: then its parts are in ``FILE.parts`` until it is complete, and its manifest
            stays beside it as ``FILE.manifest.json``.
        resume: go on with what is there.
        overwrite: replace what is there.

    Attributes:
        name: as the caller calls it.
        parts: the folder of the parts.
        found: the manifest of the run to go on with, or None.
        complete: the file of that run is complete already.

    Raises:
        UsageError: something is there and neither flag is given, or the place cannot be written.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, overwrite: bool = False):
        if resume and overwrite:
            raise UsageError("got both --resume and --overwrite; give one of them.")
        self.name = str(path)
        self._overwrite = overwrite
        self._final = None if names_a_folder(path) else _real(path)
        self.parts = open_folder(str(path).rstrip("/") if self._final is None else f"{self._final}.parts")
        self._refuse_no_parent()
        self.found = m.read_manifest(self.parts) if self.parts.exists() and not overwrite else None
        self.complete = False
        if not overwrite:
            self._refuse_what_is_there(resume)

    def begin(self, manifest: dict[str, Any]) -> None:
        """Make the folder, and put the manifest into it.

        Raises:
            UsageError: it cannot be written, or another run is writing to it.
        """
        self.parts.make()
        try:
            if self._overwrite:
                self.parts.remove([m.NAME, *part_names(self.parts)])
            m.write_manifest(self.parts, {**manifest, "replace": self._replace()})
        except SpecjaxError as error:
            raise UsageError(f"Cannot write the output: {error}") from error

    def finish(self, manifest: dict[str, Any]) -> None:
        """Complete the output: write the manifest, and a single file from its parts.

        Raises:
            SpecjaxError: it cannot be completed; the parts stay.
        """
        if self._final is None:
            m.write_manifest(self.parts, manifest)
            self.parts.release()
            return
        names = part_names(self.parts)
        if self._exists() and not self._replace():
            raise SpecjaxError(
                f"Cannot complete {self.name}: it was made by someone else meanwhile. Its rows are kept in"
                f" {self.parts}: move the file away, and --resume completes it."
            )
        m.write_manifest(self.parts, {**manifest, "status": PUBLISHING, "replace": self._replace()})
        self.parts.join(names, self._final)
        beside, name = self._beside()
        m.write_manifest(beside, manifest, name)
        self.parts.remove([m.NAME, *names])
        self.parts.drop()
        self.parts.release()

    def tidy(self) -> None:
        """Remove parts that a run which died after completing the file has left."""
        if self.complete and self.parts.exists():
            self.parts.remove([m.NAME, *part_names(self.parts)])
            self.parts.drop()

    def stop(self, manifest: dict[str, Any]) -> None:
        """Leave the parts for a later run; nothing is left where there are none.

        Raises:
            SpecjaxError: the manifest cannot be written.
        """
        try:
            if part_names(self.parts):
                m.write_manifest(self.parts, {**manifest, "replace": self._replace()})
            else:
                self.parts.remove([m.NAME])
                self.parts.drop()
        finally:
            self.parts.release()

    def _replace(self) -> bool:
        """Say whether a file that stands in the output's place may go."""
        return self._overwrite or bool(self.found and (self.found.get("replace") or self.found["status"] == PUBLISHING))

    def _refuse_no_parent(self) -> None:
        if is_remote(self.name):
            return
        parent = self.parts.path.parent
        if not parent.is_dir():
            raise UsageError(f"The output's folder {parent} does not exist: make it first.")
        if not os.access(self.parts.path if self.parts.exists() else parent, os.W_OK):
            raise UsageError(f"Cannot write the output {self.name}: no permission to write there.")

    def _refuse_what_is_there(self, resume: bool) -> None:
        if self._final is not None and self._exists() and not self._replace():
            beside, name = self._beside()
            found = m.read_manifest(beside, name)
            if not (resume and found):
                why = "it has no manifest, so --resume cannot tell whose rows it holds: " if resume else ""
                raise UsageError(
                    f"The output {self.name} exists: {why}pass --overwrite to replace it, or give another name."
                )
            self.found, self.complete = found, True
            return
        if self.found is not None and not resume:
            raise UsageError(
                f"{self.parts} holds {'a job' if self._final is None else 'rows of an interrupted run'}: pass --resume"
                " to go on with it, or --overwrite to drop it."
            )
        if self.found is None and self.parts.names():
            raise UsageError(
                f"The folder {self.parts} is not empty and has no {m.NAME}: give another one, or --overwrite to write"
                " among what is there."
            )

    def _exists(self) -> bool:
        assert self._final is not None
        return remote_path(self._final).exists() if is_remote(self._final) else os.path.exists(self._final)

    def _beside(self) -> tuple[Folder, str]:
        """Return where the manifest of a complete file is."""
        assert self._final is not None
        folder, _, name = self._final.rpartition("/")
        return open_folder(folder or "/"), f"{name}.manifest.json"


def _real(path: str | Path) -> str:
    """Return the file's own name: a link stays, the file it names is written."""
    return str(path) if is_remote(path) else os.path.realpath(path)
