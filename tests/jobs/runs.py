"""Jobs on the toy, run here: rows, outputs read back, and the same job undisturbed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from letters import HOT, pair

from specjax.jobs import JobResult, Place, run_job
from specjax.requests import Options
from specjax.rows import parse_rows

ROWS = [
    {"id": f"r{i}", "prompt": "abcdefgh"[: 1 + i % 7], "max_new_tokens": 1 + 7 * i % 23, "temperature": i % 3 / 2}
    for i in range(24)
]
OPTIONS: dict[str, Any] = {"gamma": 3, "batch_size": 4, "chunk": 2, "sampling": HOT}


def rows_of(rows: Sequence[dict[str, Any]] = ROWS) -> list:
    """Return dicts as rows, as a file of them would be read."""
    return parse_rows("".join(json.dumps(row) + "\n" for row in rows).encode())


def run(path: Path | str, rows: Sequence[dict[str, Any]] = ROWS, *, of=None, resume=False, overwrite=False,
        stop: Callable[[], bool] = lambda: False, on_output=None, **options: Any) -> JobResult:  # fmt: skip
    """Run a job."""
    place = Place(path, resume=resume, overwrite=overwrite)
    return run_job(of or pair(), rows_of(rows), place, Options(**{**OPTIONS, **options}), stop=stop,
                   on_output=on_output)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, or of all parts of a folder."""
    files = sorted(path.glob("part-*.jsonl")) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_text().split("\n") if line]


def answers(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, int], tuple]:
    """Return what a resumed run must repeat, by id and sample; each of them once."""
    found = {(row["id"], row.get("sample", 0)): (row["ids"], row["text"], row["finish_reason"]) for row in rows}
    assert len(found) == len(rows), "a row stands twice in the output"
    return found


class Stopper:
    """Says stop once ``count`` rows are there."""

    def __init__(self, count: int):
        self.left = count

    def row(self, output: Any) -> None:
        """Take a row."""
        self.left -= 1

    def __call__(self) -> bool:
        return self.left <= 0
