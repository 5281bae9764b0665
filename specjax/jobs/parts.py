"""Finished rows as parts: each one a file of whole rows, and what is done is read back from them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from specjax.errors import SpecjaxError
from specjax.jobs.folder import Folder
from specjax.outputs import json_line
from specjax.rows import stable_id

# A part is written when it has so many rows, or its first row has waited so long.
ROWS = 256
SECONDS = 5.0
_NAME = re.compile(r"part-(\d{5})-(\d{5,})\.jsonl")

RowName = tuple[str, int]


def record_name(record: dict[str, Any]) -> RowName:
    """Return what a written row is known by, as ``specjax.rows.row_name`` does of a row read."""
    line = str(record.get("error", "")).partition(":")[0]
    return (line if record["id"] is None else stable_id(record["id"]), record.get("sample", 0))


def part_names(folder: Folder) -> list[str]:
    """Return the names of a folder's parts, in the order in which each process wrote them."""
    found = [match for match in map(_NAME.fullmatch, folder.names()) if match]
    return [match[0] for match in sorted(found, key=lambda match: (int(match[1]), int(match[2])))]


def read_parts(folder: Folder, take: Callable[[dict[str, Any]], None]) -> None:
    """Hand every row of every part to ``take``.

    Raises:
        SpecjaxError: a part cannot be read.
    """
    for name in part_names(folder):
        for line, raw in enumerate(folder.read(name).split(b"\n"), 1):
            if not raw:
                continue
            try:
                record = json.loads(raw)
                whole = {"id", "finish_reason", "stats"} <= set(record)
            except (ValueError, TypeError):
                whole = False
            if not whole:
                raise SpecjaxError(
                    f"{folder}/{name} line {line} is no row of an output: delete the part to have its rows again."
                )
            take(record)


class Parts:
    """Writes rows as parts.

    Args:
        folder: where; it exists.
        process: P, the number of this process.

    Attributes:
        written: rows in parts that are written.
    """

    def __init__(self, folder: Folder, process: int = 0):
        self.written = 0
        self._folder, self._process = folder, process
        counts = [int(match[2]) for match in map(_NAME.fullmatch, folder.names()) if match and int(match[1]) == process]
        self._next = max(counts, default=-1) + 1
        self._lines: list[str] = []
        self._since = 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Take a row; write a part when it is due.

        Raises:
            SpecjaxError: the part cannot be written; the row is kept for the next attempt.
        """
        if not self._lines:
            self._since = time.monotonic()
        self._lines.append(json_line(record))
        if len(self._lines) >= ROWS:
            self.flush()

    def tick(self) -> None:
        """Write a part when its first row has waited long enough."""
        if self._lines and time.monotonic() - self._since >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows taken so far as a part.

        Raises:
            SpecjaxError: it cannot be written; the rows are kept for the next attempt.
        """
        if not self._lines:
            return
        name = f"part-{self._process:05d}-{self._next:05d}.jsonl"
        self._folder.write(name, "".join(line + "\n" for line in self._lines).encode("ascii"))
        self.written += len(self._lines)
        self._lines.clear()
        self._next += 1
