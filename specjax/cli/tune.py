"""``specjax tune``: measure what drafting and verifying cost here, for ``--gamma auto``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from specjax.cli.common import PairOptions, flat, note, prepare_jax, progress_bar, unset
from specjax.errors import UsageError

if TYPE_CHECKING:
    from specjax.tune import CostTable

_LONGEST = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune(PairOptions):
    """Measure what rounds of a pair cost on this machine, print it, and keep it for --gamma auto.

    Run nothing else meanwhile. Costs are kept in the cache folder, for each batch size, width and rule.
    """

    batch_size: Annotated[
        tuple[tuple[int, ...], ...], arg(metavar="N [N ...]", help_behavior_hint=""), UseAppendAction
    ] = ()
    """Rows at once, as they will be in generate (default: 1 and 8)."""
    width: Annotated[int | None, unset("N")] = None
    """For generate --width N (default: the widths that auto chooses among)."""
    rule: Annotated[str, arg(metavar="rejection|block|coupled|greedy")] = "rejection"
    """Of the rows that sample; greedy rows are measured too."""
    rounds: Annotated[int, arg(metavar="N")] = 25
    """Rounds that each number stands on."""

    def run(self) -> int:
        """Measure and print a table for each batch size."""
        sizes = flat("--batch-size", self.batch_size) or [1, 8]
        if low := [size for size in sizes if size < 1]:
            raise UsageError(f"--batch-size is {low[0]}; expected at least 1.")
        for name, value in (("--rounds", self.rounds), ("--width", self.width)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; expected at least 1.")
        prepare_jax()
        from specjax.tune import path_of, tune, write

        pair = self.load(require_draft=True)
        if pair.draft.name == "none":
            raise UsageError("There is no draft to measure: give --draft.")
        tables = []
        with progress_bar(None, "tune") as update:
            for size in sizes:
                for greedy in (True, False) if self.rule != "greedy" else (True,):
                    update(0, f"batch size {size}, {'greedy' if greedy else self.rule}")
                    tables.append(
                        tune(pair, batch_size=size, rule="greedy" if greedy else self.rule, width=self.width,
                             rounds=self.rounds, longest=_LONGEST)
                    )  # fmt: skip
        _show(tables, pair.target.name, pair.draft.name)
        for table in tables:
            if not write(table):
                raise UsageError(f"The cache folder cannot be written: {path_of(table.key).parent}. Set SPECJAX_CACHE.")
        note(f"kept in {path_of(tables[0].key).parent}")
        return 0


def _show(tables: list[CostTable], target: str, draft: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(
        box=box.SIMPLE,
        pad_edge=False,
        caption_justify="left",
        caption="a round without drafts in ms; the rest as shares of it",
    )
    for heading in ("batch", "rule", "plain\nms", "draft\nstep", "round at each\nwidth", "an entry to\ncatch up"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for table in tables:
        plain = table.verify_seconds[0]
        rest = zip(table.widths, table.verify_seconds, strict=True)
        shown.add_row(
            str(table.key["batch_size"]),
            str(table.key["rule"]),
            f"{plain * 1e3:.1f}",
            f"{table.draft_seconds[1] / plain:.3f}" if len(table.draft_seconds) > 1 else "-",
            ", ".join(f"{width}: {seconds / plain:.2f}" for width, seconds in rest),
            f"{table.catch_up_seconds / plain:.3f}",
        )
    console = Console(highlight=False)
    console.print(f"target {target}, draft {draft}", markup=False, soft_wrap=True)
    console.print(shown)
