"""``specjax bench``: plain against speculative decoding, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from specjax.cli.bench_table import show, spread_text
from specjax.cli.common import PairOptions, flat, prepare_jax, progress_bar, unset
from specjax.cli.sampling_options import SamplingOptions
from specjax.errors import UsageError
from specjax.outputs import json_line, write_text

if TYPE_CHECKING:
    from specjax.bench_suite import Suite

Gammas = Annotated[
    tuple[tuple[int | Literal["auto"], ...], ...],
    arg(metavar="N|auto [N|auto ...]", help_behavior_hint=""),
    UseAppendAction,
]
# Options that a suite takes the place of, by its own names.
_IN_SUITE = {
    "texts": "texts", "gamma": "gammas", "repeats": "repeats", "max_new_tokens": "max_new_tokens",
    "ignore_eos": "ignore_eos", "width": "width", "batch_size": "batch_sizes", "seed": "seed", "rule": "rules",
    "temperature": "temperatures", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "dtype": "dtype",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(SamplingOptions, PairOptions):
    """Measure plain against speculative decoding, in turns, and print a table.

    A draft that cannot be used, or a prompt that fails, is an error here.
    """

    texts: Annotated[tuple[str, ...], arg(metavar="[PROMPT ...]", help_behavior_hint=""), Positional] = ()
    """What to decode, before the options or after --; a chat where the model has a template."""
    prompts_file: Annotated[str | None, arg(name="prompts", metavar="FILE", help_behavior_hint="")] = None
    """Prompts as JSON Lines, instead of PROMPT: rows as in 'generate --input', or Spec-Bench's questions."""
    limit: Annotated[int | None, unset("N")] = None
    """Only the first N prompts."""
    suite: Annotated[str | None, unset("NAME|FILE.toml")] = None
    """What to measure, from a file: quick, sweep, spec-bench, or one like those; its models and prompts can be given as
    options."""
    gamma: Gammas = ()
    """Draft lengths to measure, or auto: chosen round by round (default: that of the pair, else 4)."""
    repeats: Annotated[int, arg(metavar="N")] = 5
    """Pairs of timed runs, after one of each that compiles."""
    max_new_tokens: Annotated[int, arg(metavar="N")] = 128
    """The most tokens to generate per prompt."""
    ignore_eos: bool = False
    """Go on past the model's end of text."""
    width: Annotated[int | None, unset("N")] = None
    """Rows of every target step on both sides, more than gamma (default: what is fastest for each)."""
    batch_size: Annotated[int, arg(metavar="N")] = 1
    """Rows at once."""
    rule: Annotated[str, arg(metavar="rejection|block|coupled|greedy")] = "rejection"
    """How drafts are accepted; under rejection, rows at temperature 0 are greedy."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Of the random draws."""
    output: Annotated[str | None, unset("FILE|-")] = None
    """Where the report goes as JSON; - is standard output, and the table goes to standard error."""
    csv: Annotated[str | None, unset("FILE")] = None
    """Write every timed run as a line of CSV too."""
    html: Annotated[str | None, unset("FILE")] = None
    """Write the report as one page with plots too (extra: bench)."""
    compare: Annotated[tuple[str, ...], arg(metavar="A.json B.json", help_behavior_hint="")] = ()
    """Measure nothing: compare two reports that --output wrote; exit 1 when B is slower than A in any figure."""
    speed_only: bool = False
    """Leave out latencies, the parts of a round, what the machine can, and the sums of min(p, q)."""
    resume: bool = False
    """Go on with what an interrupted run of the same settings measured for the same --output."""
    overwrite: bool = False
    """Replace an output that exists."""

    def run(self) -> int:
        """Measure, print the table, write the report."""
        if self.compare:
            return self._compare()
        if self.resume and (self.overwrite or self.output in (None, "-")):
            raise UsageError("--resume needs --output FILE, and no --overwrite.")
        self._refuse_what_exists()
        prepare_jax()
        report = self._measure(self._suite())
        if self.output is not None:
            line = json_line(report)
            if self.output == "-":
                print(line)
            else:
                write_text(Path(self.output), line + "\n")
                self._partial.unlink(missing_ok=True)
        show(report, to_stderr=self.output == "-")
        self._write_more(report)
        return 0

    @property
    def _partial(self) -> Path:
        """Where measurements are kept until all are made."""
        return Path(f"{self.output}.partial")

    def _suite(self) -> Suite:
        """Return what to measure.

        Raises:
            UsageError: an option that a suite takes the place of was given beside one.
        """
        import msgspec

        from specjax.bench_suite import Suite, SuitePair, read_suite

        given: dict[str, Any] = {}
        if self.prompts_file is not None:
            given["prompts"] = self.prompts_file
        if self.limit is not None:
            given["limit"] = self.limit
        if any(name is not None for name in (self.target, self.draft, self.pair)):
            given["pairs"] = (SuitePair(self.target, self.draft, self.pair),)
        if self.suite is None:
            names = ("texts", "repeats", "max_new_tokens", "ignore_eos", "width", "seed", "top_k", "top_p", "min_p",
                     "dtype")  # fmt: skip
            given |= {name: getattr(self, name) for name in names}
            return Suite(
                gammas=tuple(flat("--gamma", self.gamma)), batch_sizes=(self.batch_size,), rules=(self.rule,),
                temperatures=(self.temperature,), **given,
            )  # fmt: skip
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, theirs in _IN_SUITE.items():
            if getattr(self, name) != defaults[name]:
                shown = "PROMPT" if name == "texts" else f"--{name.replace('_', '-')}"
                raise UsageError(f"got {shown} and --suite; a suite says it itself, with {theirs}.")
        if self.prompts_file is not None:
            given["texts"] = ()
        return msgspec.structs.replace(read_suite(self.suite), **given)

    def _refuse_what_exists(self) -> None:
        """Refuse, before anything is measured, what could not be written after it."""
        for option, path in (("--output", self.output), ("--csv", self.csv), ("--html", self.html)):
            if path in (None, "-"):
                continue
            if Path(path).exists() and not self.overwrite:
                raise UsageError(f"{option} {path} exists; pass --overwrite to replace it.")
            if not Path(path).resolve().parent.is_dir():
                raise UsageError(f"{option} {path}: its folder does not exist.")
        if self.html is not None:
            from specjax.report_page import require_plots

            require_plots()

    def _write_more(self, report: dict[str, Any]) -> None:
        if self.csv is not None:
            from specjax.report import to_csv

            write_text(Path(self.csv), to_csv(report))
        if self.html is not None:
            from specjax.report_page import to_html

            write_text(Path(self.html), to_html(report))

    def _compare(self) -> int:
        """Print what became of each figure."""
        from rich.console import Console
        from rich.table import Table

        from specjax.report import compare, read_report

        if len(self.compare) != 2:
            raise UsageError(f"--compare takes two reports, A.json B.json; got {len(self.compare)}.")
        found = compare(*(read_report(path) for path in self.compare))
        several = len({row["setting"] for row in found}) > 1
        table = Table(*(["setting"] if several else []), "γ", "figure", "A", "B", "B / A", "verdict")
        for row in found:
            old, new = (spread_text(row[name], 2) for name in ("old", "new"))
            first = [row["setting"]] if several else []
            table.add_row(*first, row["gamma"], row["figure"], old, new, f"{row['change']:.2f}", row["verdict"])
        Console(highlight=False).print(table)
        return 1 if any(row["verdict"] == "slower" for row in found) else 0

    def _measure(self, suite: Suite) -> dict[str, Any]:
        from specjax.bench import MORE
        from specjax.bench_suite import run_suite

        if self.overwrite and self.output not in (None, "-"):
            self._partial.unlink(missing_ok=True)
        clock = _Clock()
        with progress_bar(None, "bench") as update:
            return run_suite(
                suite,
                form={"attention": self.attention, "scan_layers": self.scan_layers, "progress": True},
                sampling=self.sampling(),
                options={"ban_sequence": flat("--ban-sequence", self.ban_sequence)},
                more=() if self.speed_only else MORE,
                kept_in=None if self.output in (None, "-") else self._partial,
                resume=self.resume,
                on_run=lambda left, words: update(0, f"{words}; {clock.left(left)}"),
            )


class _Clock:
    """Says how long the runs to come will take, if they take as long as those before."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._runs = 0

    def left(self, runs: int) -> str:
        """Return the time left in words; called before each run."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            return f"{runs} runs to go"
        self._runs += 1
        minutes = (now - self._began) / self._runs * runs / 60
        return f"{runs} runs to go, about {minutes:.0f} min"
