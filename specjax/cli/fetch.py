"""``specjax fetch``: get a model that is known by name."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from specjax.cli.common import Common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(Common):
    """Get a model that is known by name into the cache folder; print its folder."""

    name: Annotated[str, arg(metavar="NAME"), Positional]
    """The model, as smollm2-135m; an unknown name lists those that are known."""

    def run(self) -> int:
        """Fetch, and print the folder."""
        from specjax.checkpoint import fetch

        print(fetch(self.name, progress=True))
        return 0
