"""The writing half of ``specjax generate``: rows to standard output as they come, or a job that can be resumed."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from specjax.cli.common import Meter, note, prepare_jax, progress_bar, summary
from specjax.errors import UsageError
from specjax.outputs import RowWriter
from specjax.rows import BadRow, Row, read_rows

if TYPE_CHECKING:
    from specjax.api import Output
    from specjax.cli.generate import Generate
    from specjax.distributed import Processes
    from specjax.jobs import Place
    from specjax.pair import Pair

STOPPED, INTERRUPTED = 75, 130


def write_rows(command: Generate, processes: Processes) -> int:
    """Answer a command's rows; return its exit code."""
    rows = read_rows(command.input) if command.input is not None else None
    prepare_jax()
    from specjax.jobs.place import Place, is_stream

    if is_stream(command.output):
        if command.resume:
            raise UsageError(f"--resume: {command.output} keeps no rows; give --output FILE or DIR.")
        return _stream(command, rows)
    place = Place(str(command.output), resume=command.resume, overwrite=command.overwrite)
    return _job(command, rows, place, processes)


class _Progress:
    """Moves a bar and counts, as rows and tokens come."""

    def __init__(self, update: Any) -> None:
        self.meter = Meter()
        self._update = update

    def tokens(self, count: int) -> None:
        self.meter.add(count)
        self._update(0, f"{self.meter.rate:.1f} tokens/s")

    def row(self, output: Output) -> None:
        del output
        self._update(1, f"{self.meter.rate:.1f} tokens/s")


def _stream(command: Generate, rows: list[Row | BadRow] | None) -> int:
    """Write each row as it finishes, straight to standard output, a device or a pipe."""
    from specjax.api import generate
    from specjax.jobs.totals import Totals

    totals = Totals()
    with RowWriter(command.output, report=note) as writer, command.tracing() as trace:
        options = command.options()
        pair = command.load(require_draft=command.require_draft, mesh=command.mesh)
        asked = _rows(command, rows, pair)
        with progress_bar(len(asked) * command.samples, "rows") as update:
            progress = _Progress(update)

            def on_output(output: Output) -> None:
                record = output.record(numbered=command.samples > 1)
                writer.write(record)
                totals.add(record)
                progress.row(output)

            generate(pair, asked, on_output=on_output, on_tokens=progress.tokens, trace=trace, **options)
    note(f"{_counted(totals.rows, totals.failed)}; {summary(totals.stats, progress.meter)}")
    return 1 if totals.failed else 0


def _job(command: Generate, rows: list[Row | BadRow] | None, place: Place, processes: Processes) -> int:
    """Run a job; a signal ends it with what is finished."""
    from specjax.jobs import run_job
    from specjax.jobs.signals import StopSignals
    from specjax.requests import Options

    many = processes.count > 1
    with StopSignals(processes.stopper() if many else None) as stop, command.tracing() as trace:
        options = Options(**command.options(), trace=trace)
        pair = command.load(require_draft=command.require_draft, mesh=command.mesh or processes.mesh)
        asked = _rows(command, rows, pair)
        with progress_bar(len(asked) * command.samples, "rows") as update:
            progress = _Progress(update)
            stop.wait()
            result = run_job(
                pair, asked, place, options, stop=stop, on_output=progress.row, on_tokens=progress.tokens,
                processes=processes,
            )  # fmt: skip
    counts, stats = result.manifest["rows"], result.manifest["acceptance"]
    if result.stopped:
        note(
            f"stopped: {counts['done']} of {counts['expected']} rows are finished and kept; the same command with"
            " --resume goes on."
        )
        return INTERRUPTED if stop.number == signal.SIGINT else STOPPED
    before = counts["done"] - result.new_rows
    done = _counted(counts["done"], counts["failed"]) + (f", {before} of them by earlier runs" if before else "")
    note(f"{done}; {summary(stats, progress.meter)}")
    return 1 if result.failed else 0


def _rows(command: Generate, rows: list[Row | BadRow] | None, pair: Pair) -> list[Row | BadRow]:
    from specjax.requests import as_rows

    return as_rows(list(command.prompts), pair.target, raw=command.raw) if rows is None else rows


def _counted(rows: int, failed: int) -> str:
    return f"{rows} rows" + (f", {failed} of them failed (see their error)" if failed else "")
