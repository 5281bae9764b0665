"""A job: rows in, parts out, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from specjax.api import Call, Output
from specjax.distributed import ALONE, Processes
from specjax.errors import SpecjaxError
from specjax.jobs import manifest as m
from specjax.jobs.parts import Parts, RowName, read_parts, record_name
from specjax.jobs.place import COMPLETE, Place
from specjax.jobs.totals import Totals
from specjax.pair import Pair
from specjax.requests import Options
from specjax.rows import BadRow, Row

RUNNING, STOPPED = "running", "stopped"
RESUME = "the same command with --resume goes on"


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What came of a job.

    Attributes:
        manifest: as it stands in the output.
        stopped: it was asked to stop before its last row.
        new_rows: rows that this run wrote.
    """

    manifest: dict[str, Any]
    stopped: bool
    new_rows: int

    @property
    def failed(self) -> int:
        """Rows that ended in an error, of all runs."""
        return self.manifest["rows"]["failed"]


def run_job(
    pair: Pair,
    rows: Sequence[Row | BadRow],
    place: Place,
    options: Options,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_output: Callable[[Output], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
    processes: Processes = ALONE,
) -> JobResult:
    """Answer every row that the output does not hold yet, and write a manifest of the whole.

    Args:
        pair: from ``specjax.load``.
        rows: from ``specjax.rows.read_rows``.
        place: where they go.
        options: settings of the generation.
        stop: asked between chunks of rounds; True ends the run with what is finished, to be resumed.
        on_output: called with each row once it is taken into a part.
        on_tokens: called with the number of new tokens after each chunk.
        processes: those that run this job together: each writes the rows that it is dealt, the first one the manifest.

    Raises:
        UsageError: an option that cannot be honoured, or an output of another job.
        SpecjaxError: the disk is full, or the output cannot be written; the parts written before are whole.

    Example:
        run_job(pair, read_rows("rows.jsonl"), Place("out.jsonl", resume=True), Options(max_new_tokens=64))
    """

    def look(count: int) -> None:
        run.parts.tick()
        if on_tokens:
            on_tokens(count)

    call = Call(pair, options, on_tokens=look)
    job = m.identity(pair, options, rows)
    processes.refuse_differences("models, options or input", m.fingerprint(job))
    if place.found is not None:
        m.refuse_another(place.found, job, place.name)
    if place.complete and place.found is not None:
        processes.barrier("complete")
        if processes.first:
            place.tidy()
        return JobResult(place.found, False, 0)
    run = _Run(place, job, len(rows) * options.samples, call, processes)
    try:
        for output in call.run(rows, done=frozenset(run.done), stop=stop):
            run.take(output.record(numbered=options.samples > 1))
            if on_output:
                on_output(output)
        return run.end()
    except BaseException as error:
        run.break_off()
        if isinstance(error, SpecjaxError) and run.parts.written:
            raise SpecjaxError(f"{error} {run.parts.written} rows are whole in {place.parts}: {RESUME}.") from error
        raise


class _Run:
    """One run of a job, from its first row to its manifest."""

    def __init__(self, place: Place, job: dict[str, Any], expected: int, call: Call, processes: Processes):
        self.done: set[RowName] = set()
        self._processes = processes
        self._place, self._job, self._expected, self._call = place, job, expected, call
        self._totals = Totals()
        self._before = place.found or {}
        if place.found is not None:
            read_parts(place.parts, self._read)
        self._read_rows, self._read_tokens = self._totals.rows, self._totals.stats["num_tokens"]
        self._began, self._started = time.perf_counter(), _now()
        # All have read what is there before the first one changes it.
        processes.refuse_differences("finished rows (they need one output that all can read)", str(sorted(self.done)))
        if processes.first:
            place.begin(self._manifest(RUNNING))
        processes.barrier("begun")
        self.parts = Parts(place.parts, processes.index)

    def take(self, record: dict[str, Any]) -> None:
        """Take a finished row."""
        self._totals.add(record)
        if self._processes.deals(record_name(record)):
            self.parts.add(record)

    def end(self) -> JobResult:
        """Write what is left, and the manifest."""
        self.parts.flush()
        self._processes.barrier("flushed")
        stopped = self._totals.rows < self._expected
        manifest = self._manifest(STOPPED if stopped else COMPLETE)
        if self._processes.first:
            (self._place.stop if stopped else self._place.finish)(manifest)
        self._processes.barrier("written")
        return JobResult(manifest, stopped, self._totals.rows - self._read_rows)

    def break_off(self) -> None:
        """Keep what can be kept; what ended the run is the error to report, not what goes wrong here."""
        with contextlib.suppress(SpecjaxError):
            self.parts.flush()
        if self._processes.first:
            with contextlib.suppress(SpecjaxError):
                self._place.stop(self._manifest(STOPPED))

    def _read(self, record: dict[str, Any]) -> None:
        name = record_name(record)
        if name in self.done:
            raise SpecjaxError(
                f"{self._place.parts} holds row {name[0]}, sample {name[1]} twice: two runs wrote to it at once. Delete"
                " one of its parts, or --overwrite."
            )
        self.done.add(name)
        self._totals.add(record)

    def _manifest(self, status: str) -> dict[str, Any]:
        totals, stats = self._totals, self._totals.stats
        before, faults = self._before.get("wasted", {}), self._before.get("faults", {})
        return {
            "schema": m.SCHEMA,
            "status": status,
            "fingerprint": m.fingerprint(self._job),
            "identity": self._job,
            "versions": m.versions(),
            "rows": {
                "expected": self._expected,
                "done": totals.rows,
                "failed": totals.failed,
                "finish_reason": dict(sorted(totals.finish.items())),
            },
            "acceptance": stats,
            "faults": {name: faults.get(name, 0) + count for name, count in self._call.faults().items()},
            "wasted": {name: before.get(name, 0) + count for name, count in self._call.wasted().items()},
            "runs": [*self._before.get("runs", []), self._speed(stats["num_tokens"])],
        }

    def _speed(self, num_tokens: int) -> dict[str, Any]:
        """Describe this run: loading is not in it, compiling is."""
        seconds = time.perf_counter() - self._began
        rows, tokens = self._totals.rows - self._read_rows, num_tokens - self._read_tokens
        rates = {"rows_per_second": rows / max(seconds, 1e-9), "tokens_per_second": tokens / max(seconds, 1e-9)}
        return {"started": self._started, "seconds": seconds, "rows": rows, "num_tokens": tokens, **rates}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
