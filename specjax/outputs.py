"""Rows out: JSON Lines written as they come, under their final name only when all are there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from specjax.errors import SpecjaxError, UsageError


def json_line(record: Any) -> str:
    """Return a record as one line of compact JSON, without the line feed.

    The line is ASCII: readers that also split at U+2028, U+2029 or U+0085 see one record, half a surrogate pair
    can be written, and no terminal's encoding matters. A number that JSON has no word for (NaN, infinities, as
    the log-probability of an impossible token) becomes null.

    Example:
        >>> json_line({"id": 1, "logprobs": [-0.5, float("-inf")]})
        '{"id":1,"logprobs":[-0.5,null]}'
    """
    try:
        return _encode(record)
    except ValueError:
        return _encode(_finite(record))


def result_row(
    row_id: int | str | None,
    *,
    text: str | None,
    ids: Sequence[int],
    finish_reason: str,
    stats: dict[str, Any],
    error: str | None = None,
    sample: int | None = None,
    **log_probabilities: Any,
) -> dict[str, Any]:
    """Return the record of one row of ``generate``, its fields in their documented order.

    Args:
        row_id: the row's id; None for a line that does not tell it.
        text: None without a tokenizer, and for a row that could not begin.
        ids: the new tokens.
        finish_reason: "eos", "stop", "length", "error" or "cancelled".
        stats: as ``specjax.stats`` gives them.
        error: what went wrong; left out if None, as is ``sample``.
        sample: number of the sample, where several were asked for.
        **log_probabilities: ``logprobs``, ``sampled_logprobs``, ``top_logprobs``; those that are None are left out.
    """
    head: dict[str, Any] = {"id": row_id} if sample is None else {"id": row_id, "sample": sample}
    some = {name: value for name, value in log_probabilities.items() if value is not None}
    tail = {"stats": stats} if error is None else {"error": error, "stats": stats}
    return {**head, "text": text, "ids": list(ids), "finish_reason": finish_reason, **some, **tail}


def _encode(record: Any) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """Return an array or a NumPy number as Python has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON.")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(value.tolist()) if hasattr(value, "tolist") else value


class RowWriter:
    """Writes rows to a file or to standard output; a context manager.

    Rows go to ``NAME.partial`` beside the output, each one whole and at once, and the file gets its name when
    all is written. When something ends the work before that, the rows written so far stay in ``NAME.partial``
    and ``report`` says so: nothing written is lost, nothing half-written has the final name.

    Args:
        path: the output; ``-`` or None is standard output. A device or a pipe is written to directly.
        overwrite: replace an output that exists; it is there unchanged until then.
        report: called with one line when rows are left in ``NAME.partial``; standard error by default.

    Attributes:
        count: rows written.

    Raises:
        UsageError: the output exists, rows of an interrupted run are in its place, or it cannot be written.

    Example:
        with RowWriter("out.jsonl", overwrite=False) as writer:
            writer.write({"id": 1, "text": "Yes."})
    """

    def __init__(
        self, path: str | Path | None, *, overwrite: bool = False, report: Callable[[str], None] | None = None
    ) -> None:
        self.count = 0
        self._overwrite = overwrite
        self._report = report or (lambda line: print(line, file=sys.stderr))
        self._final: Path | None = None
        self._partial: Path | None = None
        self._size = 0
        self._fd: int | None = None
        if path is None or str(path) == "-":
            self._name = "standard output"
            self._stdout = True
        else:
            self._name = str(path)
            self._stdout = False
            self._fd = self._open(Path(path))

    def write(self, record: Any) -> None:
        """Write one row, whole: it is in the file when this returns.

        Raises:
            SpecjaxError: the disk is full, or the reader of a pipe is gone.
            ValueError: the writer is closed.
        """
        if self._fd is None and not self._stdout:
            raise ValueError(f"The output {self._name} is closed.")
        line = (json_line(record) + "\n").encode("ascii")
        try:
            if self._fd is None:
                _write_stdout(line)
            else:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._drop_half_a_row()
            raise SpecjaxError(f"Cannot write to {self._name}: {_reason(error)} (after {self.count} rows).") from error
        except BaseException:
            self._drop_half_a_row()
            raise
        self._size += len(line)
        self.count += 1

    def close(self) -> None:
        """Give the file its name.

        Raises:
            SpecjaxError: it cannot be completed; the rows stay in ``NAME.partial``.
        """
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if self._final is None or self._partial is None:
            os.close(fd)
            return
        try:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            if not self._overwrite and self._final.exists():
                raise FileExistsError(17, "it was made by someone else meanwhile")
            os.replace(self._partial, self._final)
        except OSError as error:
            raise SpecjaxError(f"Cannot complete {self._name}: {_reason(error)}. {self._kept()}") from error

    def abandon(self) -> None:
        """Stop before all is written: keep what is there as ``NAME.partial`` and report it."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        if self._partial is None:
            return
        if self.count:
            self._report(self._kept())
        else:
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _open(self, path: Path) -> int:
        """Open the file to write to, so that a wrong output is known before any work is done."""
        final = Path(os.path.realpath(path))  # a link stays, the file it names is replaced
        try:
            mode = path.stat().st_mode if path.exists() else None
            if mode is not None and stat.S_ISDIR(mode):
                raise UsageError(f"The output {path} is a folder: give the name of a file.")
            if mode is not None and not stat.S_ISREG(mode):
                return os.open(path, os.O_WRONLY)
            if mode is not None and not self._overwrite:
                raise UsageError(f"The output {path} exists: pass --overwrite to replace it, or give another name.")
            if not final.parent.is_dir():
                raise UsageError(f"The output's folder {final.parent} does not exist: make it first.")
            partial = final.with_name(final.name + ".partial")
            if self._overwrite:
                partial.unlink(missing_ok=True)
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError as error:
            raise UsageError(
                f"{path}.partial holds rows of an interrupted run: move it away, or pass --overwrite to drop it."
            ) from error
        except OSError as error:
            raise UsageError(f"Cannot write the output {path}: {_reason(error)}.") from error
        self._final, self._partial = final, partial
        return fd

    def _drop_half_a_row(self) -> None:
        if self._partial is not None and self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)

    def _kept(self) -> str:
        return f"Rows finished so far ({self.count}) are kept in {self._partial}."


def write_text(path: Path, text: str) -> None:
    """Write a whole file under a temporary name and rename it.

    Raises:
        SpecjaxError: the disk would not take it.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text)
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise SpecjaxError(f"Cannot write {path}: {_reason(error)}.") from error


def _write_stdout(line: bytes) -> None:
    try:
        sys.stdout.write(line.decode("ascii"))
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # else the interpreter tries again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
