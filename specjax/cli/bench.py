"""``specjax bench``: plain against speculative decoding, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from specjax.cli.common import PairOptions, flat, note, number, prepare_jax, progress_bar, unset
from specjax.cli.sampling_options import SAMPLING_NAMES, SamplingOptions
from specjax.errors import UsageError
from specjax.outputs import RowWriter, write_text

if TYPE_CHECKING:
    from rich.table import Table

Gammas = Annotated[
    tuple[tuple[int | Literal["auto"], ...], ...],
    arg(metavar="N|auto [N|auto ...]", help_behavior_hint=""),
    UseAppendAction,
]
_SETTINGS = ("target", "draft", "pair", "prompts_file", "limit", "max_new_tokens", "dtype", "width", "repeats",
             "ignore_eos", "batch_size", "seed", *SAMPLING_NAMES)  # fmt: skip


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
    overwrite: bool = False
    """Replace an output that exists."""

    def run(self) -> int:
        """Measure, print the table, write the report."""
        if self.compare:
            return self._compare()
        if bool(self.texts) == (self.prompts_file is not None):
            both = "got both PROMPT and --prompts; give one of them."
            raise UsageError(both if self.texts else "no prompt: give PROMPT, or --prompts FILE.")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit is {self.limit}; expected at least 1.")
        self._refuse_what_exists()
        if self.output is None:
            report = self._measure()
            self._print(report)
        else:
            with RowWriter(self.output, overwrite=self.overwrite, report=note) as writer:
                report = self._measure()
                self._print(report)
                writer.write(report)
        self._write_more(report)
        return 0

    def _refuse_what_exists(self) -> None:
        """Refuse, before anything is measured, what could not be written after it."""
        for option, path in (("--csv", self.csv), ("--html", self.html)):
            if path is None:
                continue
            if Path(path).exists() and not self.overwrite:
                raise UsageError(f"{option} {path} exists; pass --overwrite to replace it.")
            if not Path(path).resolve().parent.is_dir():
                raise UsageError(f"{option} {path}: its folder does not exist.")
        if self.html is not None:
            from specjax.report import require_plots

            require_plots()

    def _write_more(self, report: dict[str, Any]) -> None:
        from specjax.report import to_csv, to_html

        if self.csv is not None:
            write_text(Path(self.csv), to_csv(report))
        if self.html is not None:
            write_text(Path(self.html), to_html(report))

    def _compare(self) -> int:
        """Print what became of each figure."""
        from rich.console import Console
        from rich.table import Table

        from specjax.report import compare, read_report

        if len(self.compare) != 2:
            raise UsageError(f"--compare takes two reports, A.json B.json; got {len(self.compare)}.")
        found = compare(*(read_report(path) for path in self.compare))
        table = Table("γ", "figure", "A", "B", "B / A", "verdict")
        for row in found:
            old, new = (_spread(row[name], 2) for name in ("old", "new"))
            table.add_row(row["gamma"], row["figure"], old, new, f"{row['change']:.2f}", row["verdict"])
        Console(highlight=False).print(table)
        return 1 if any(row["verdict"] == "slower" for row in found) else 0

    def _measure(self) -> dict[str, Any]:
        prepare_jax()
        from specjax import __version__
        from specjax.bench import bench, from_texts, read_prompts

        sampling = self.sampling()
        gammas = flat("--gamma", self.gamma)
        began = time.perf_counter()
        pair = self.load(require_draft=True)
        load_seconds = time.perf_counter() - began
        if self.prompts_file is not None:
            prompts = read_prompts(self.prompts_file, pair.target)[: self.limit]
        else:
            prompts = from_texts(self.texts, pair.target)[: self.limit]
        with progress_bar(None, "bench") as update:
            report = bench(
                pair,
                prompts,
                gammas=gammas,
                repeats=self.repeats,
                on_run=lambda words: update(0, words),
                sampling=sampling,
                ban_sequence=flat("--ban-sequence", self.ban_sequence),
                max_new_tokens=self.max_new_tokens,
                ignore_eos=self.ignore_eos,
                width=self.width,
                batch_size=self.batch_size,
                seed=self.seed,
            )
        settings = {name.removesuffix("_file"): getattr(self, name) for name in _SETTINGS}
        settings |= {"target": pair.target.name, "draft": pair.draft.name}
        head = {"schema": report["schema"], "specjax": __version__, "settings": settings, "load_seconds": load_seconds}
        return {**head, **report}

    def _print(self, report: dict[str, Any]) -> None:
        from rich.console import Console

        console = Console(stderr=self.output == "-", highlight=False)
        table = _table(report)
        wide = console.options.update(max_width=10_000)
        console.width = max(console.width, console.measure(table, options=wide).maximum)  # wrapped rather than cut
        here, settings = report["environment"], report["settings"]
        console.print(
            f"target {settings['target']}, draft {settings['draft']}, {here['dtype']}, "
            f"{len(report['prompts'])} prompts, batch size {settings['batch_size']}, "
            f"temperature {settings['temperature']:g}, {settings['repeats']} pairs of runs",
            markup=False,
            soft_wrap=True,
        )
        console.print(
            f"jax {here['jax']}, {here['num_devices']} x {here['device']} ({here['processor']}, {here['num_cpus']} CPU)"
            f", loaded in {report['load_seconds']:.1f} s",
            markup=False,
            soft_wrap=True,
        )
        console.print(table)
        for result in report["results"]:
            for found in result["equality"]["divergences"]:
                console.print(
                    f"gamma {result['gamma']}: prompt {found['id']!r} first differs from plain at new token "
                    f"{found['position'] + 1}",
                    markup=False,
                    soft_wrap=True,
                )


def _table(report: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE,
        pad_edge=False,
        caption_justify="left",
        caption="median (min to max) of the runs; whole: prefill and decoding; decode: without prefill",
    )
    for heading in ("γ", "plain\ntok/s", "speculative\ntok/s", "ratio\nwhole", "ratio\ndecode", "mean\nlength",
                    "accep-\ntance", "by position", "tokens\n/pass", "equal to\nplain", "compile\ns"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "by position" else "right", no_wrap=True)
    for result in report["results"]:
        equality = result["equality"]
        compared = equality["num_compared"]
        table.add_row(
            str(result["gamma"]),
            _spread(result["plain"]["tokens_per_second"], 1),
            _spread(result["speculative"]["tokens_per_second"], 1),
            _spread(result["ratio"], 2),
            _spread(result["decode_ratio"], 2),
            number(result["mean_acceptance_length"]),
            number(result["acceptance_rate"]),
            " ".join(number(rate).removeprefix("0") for rate in result["acceptance_per_position"]),
            number(result["tokens_per_target_pass"]),
            f"{equality['num_equal']}/{compared}" if compared else "in law",
            f"{result['plain']['compile_seconds']:.1f} + {result['speculative']['compile_seconds']:.1f}",
        )
    return table


def _spread(values: dict[str, float] | None, places: int) -> str:
    if values is None:
        return "-"
    low, high = (f"{values[name]:.{places}f}" for name in ("min", "max"))
    return f"{values['median']:.{places}f}\n({low} to {high})"
