"""``specjax check``: do a target and a draft fit?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from specjax.cli.common import Common, prepare_jax, unset

if TYPE_CHECKING:
    from specjax.fit import Findings

_STYLE = {"ok": "green", "note": "", "warning": "yellow", "error": "red"}
_DOES_NOT_FIT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Common):
    """Compare a target and a draft: tokenizers id by id, vocabularies, contexts, sizes. Exit 2 if they do not fit."""

    target: Annotated[str | None, unset("WHERE")] = None
    """The model that decides, as for generate (default: that of the pair)."""
    draft: Annotated[str | None, unset("WHERE")] = None
    """The draft (default: that of the pair, else ngram)."""
    pair: Annotated[str | None, unset("NAME|FILE.toml")] = None
    """A target and its draft by name, or from a file."""

    def run(self) -> int:
        """Show a table of findings; 2 when the two do not fit."""
        prepare_jax()
        from specjax import fit, head_folder
        from specjax.pair import model_in
        from specjax.pair_names import names_of

        names = names_of(self.target, self.draft, self.pair)
        target = fit.describe(names.target, progress=True)
        where = model_in(names.draft)
        if where is None:
            found = fit.no_model(names.draft, target)
        elif head_folder.is_head(where):
            found = head_folder.compare(target, head_folder.load_head(where, weights=False))
        else:
            found = fit.compare(target, fit.describe(where, progress=True))
        _show(found, names.target, names.draft)
        return _DOES_NOT_FIT if found.errors else 0


def _show(found: Findings, target: str, draft: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "target", "draft", "", "finding")
    for item in found.items:
        short = item.message if item.level in ("ok", "note") else "see below"
        level = f"[{style}]{item.level}[/]" if (style := _STYLE[item.level]) else item.level
        table.add_row(item.what, escape(item.target), escape(item.draft), level, escape(short))
    console = Console(highlight=False)
    wide = console.options.update(max_width=10_000)
    console.width = max(console.width, console.measure(table, options=wide).maximum)  # wrapped rather than cut
    console.print(f"target {target}, draft {draft}", markup=False, soft_wrap=True)
    console.print(table)
    for message in found.errors + found.warnings:
        console.print(message, markup=False, soft_wrap=True)
    console.print(found.verdict, markup=False)
