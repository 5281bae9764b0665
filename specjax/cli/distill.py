"""``specjax distill``: train a draft that fits its target."""

from __future__ import annotations

import dataclasses
import signal
from typing import Annotated

from tyro.conf import arg

from specjax.cli.common import Common, note, prepare_jax, unset

STOPPED, INTERRUPTED = 75, 130


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(Common):
    """Train a draft for a target as a recipe says, validate it by real decoding, and print its folder.

    The folder is a WHERE for --draft. docs/distillation.md describes recipes, losses and data.
    """

    config: Annotated[str, arg(metavar="NAME|FILE.toml")]
    """The recipe: a file, or the name of one that ships."""
    data: Annotated[str | None, unset("FILE")] = None
    """Prompts and texts as JSON Lines, instead of the recipe's."""
    teacher: Annotated[str | None, unset("WHERE|none")] = None
    """The target, instead of the recipe's."""
    output: Annotated[str | None, unset("DIR")] = None
    """The run's folder, instead of the recipe's."""
    resume: bool = False
    """Go on from the newest checkpoint in the run's folder."""
    overwrite: bool = False
    """Begin anew in a folder that is in use."""

    def run(self) -> int:
        """Train, and print the folder of the draft."""
        prepare_jax()
        from specjax.distill import distill, read_recipe
        from specjax.jobs.signals import StopSignals

        recipe = read_recipe(self.config, data=self.data, teacher=self.teacher, output=self.output)
        with StopSignals() as stop:
            stop.wait()
            outcome = distill(recipe, resume=self.resume, overwrite=self.overwrite, say=note, bar=True, stop=stop)
        if outcome is None:
            return INTERRUPTED if stop.number == signal.SIGINT else STOPPED
        print(outcome.folder)
        return 0
