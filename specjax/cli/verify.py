"""``specjax verify``: prove on a pair and its settings that nothing is lost."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from specjax.cli.common import PairOptions, flat, note, prepare_jax, progress_bar, unset
from specjax.cli.sampling_options import SamplingOptions
from specjax.errors import UsageError
from specjax.outputs import RowWriter

_LOST = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(SamplingOptions, PairOptions):
    """Prove that speculative decoding loses nothing on this pair with these settings. Exit 1 if it does.

    The stages stand in the order in which one would trust them; docs/verify.md says what each compares.
    """

    prompts: Annotated[tuple[str, ...], arg(metavar="[PROMPT ...]", help_behavior_hint=""), Positional] = ()
    """Raw texts to compare on, two or more, before the options or after -- (default: a few built-in ones)."""
    quick: bool = False
    """Fewer prompts and draws: about two minutes instead of ten."""
    gamma: Annotated[int | Literal["auto"] | None, unset("N|auto")] = None
    """Tokens drafted per round (default: that of the pair, else 4)."""
    width: Annotated[int | None, unset("N")] = None
    """Rows of every target step (default: what is fastest)."""
    rule: Annotated[str, arg(metavar="rejection|block|coupled")] = "rejection"
    """How drafts are accepted."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Of the random draws."""
    output: Annotated[str | None, unset("FILE|-")] = None
    """Where the report goes as JSON; - is standard output, and the table goes to standard error."""
    overwrite: bool = False
    """Replace an output that exists."""

    def run(self) -> int:
        """Prove; 1 when something is lost."""
        if self.draft == "none":
            raise UsageError("--draft none: there is nothing to verify; give a draft.")
        if self.output is None:
            return self._finish(self._prove())
        with RowWriter(self.output, overwrite=self.overwrite, report=note) as writer:
            report = self._prove()
            writer.write(report)
        return self._finish(report)

    def _prove(self) -> dict[str, Any]:
        prepare_jax()
        from specjax import __version__
        from specjax.proof import STAGES, prove

        settings = self.sampling()
        pair = self.load(require_draft=True)
        with progress_bar(len(STAGES), "verify") as update:
            begun: list[str] = []

            def on_stage(name: str) -> None:
                update(1 if begun else 0, name)
                begun.append(name)

            report = prove(
                pair,
                list(self.prompts) or None,
                sampling=settings,
                gamma=self.gamma,
                width=self.width,
                rule=self.rule,
                seed=self.seed,
                quick=self.quick,
                ban_sequence=flat("--ban-sequence", self.ban_sequence),
                on_stage=on_stage,
            )
        return {"specjax": __version__, **report}

    def _finish(self, report: dict[str, Any]) -> int:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(stderr=self.output == "-", highlight=False)
        table = Table("stage", "", "what was seen", "seconds", box=box.SIMPLE, pad_edge=False)
        for stage in report["stages"]:
            passed = "[green]passed[/]" if stage["passed"] else "[red]LOSS[/]"
            table.add_row(stage["name"], passed, escape(stage["saw"]), f"{stage['seconds']:.1f}")
        wide = console.options.update(max_width=10_000)
        console.width = max(console.width, console.measure(table, options=wide).maximum)  # wrapped rather than cut
        settings = report["settings"]
        console.print(
            f"target {settings['target']}, draft {settings['draft']}, {settings['dtype']}, gamma {settings['gamma']}, "
            f"rule {settings['rule']}",
            markup=False,
            soft_wrap=True,
        )
        console.print(table)
        for stage in report["stages"]:
            for line in stage["details"]:
                console.print(f"{stage['name']}: {line}", markup=False, soft_wrap=True)
        lost = [stage["name"] for stage in report["stages"] if not stage["passed"]]
        verdict = f"a loss: {', '.join(lost)}" if lost else "lossless as far as these comparisons can see"
        console.print(f"verdict: {verdict}", markup=False)
        return _LOST if lost else 0
