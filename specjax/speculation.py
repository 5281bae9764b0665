"""What a call asks of speculation, resolved: K, the widths to compile, who chooses gamma."""

from __future__ import annotations

import dataclasses
from typing import Literal

from specjax.gamma import auto_controller
from specjax.types import Controller

AUTO: Literal["auto"] = "auto"
DEFAULT_GAMMA = 4
AUTO_GAMMA = 7  # the most that "auto" drafts
_AUTO_MIDDLE = 3

Gamma = int | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Speculation of one program.

    Attributes:
        gamma: K, the most tokens drafted per round.
        widths: rows of the target's step to compile.
        exact: one width was asked for.
        controller: chooses gamma, or None.
    """

    gamma: int
    widths: tuple[int, ...]
    exact: bool
    controller: Controller | None


def plan(gamma: Gamma | None, pair_gamma: int | None, draft: str, width: int | None, dtype: str) -> Plan:
    """Resolve what was asked: the draft length of the call, of the pair, or 4; none without a draft.

    Args:
        gamma: of the call.
        pair_gamma: the pair's own.
        draft: its name.
        width: the one width asked for, or None.
        dtype: of the target's weights.
    """
    asked = next(value for value in (gamma, pair_gamma, DEFAULT_GAMMA) if value is not None)
    auto = asked == AUTO and draft != "none"
    if draft == "none":
        asked = 0
    elif asked == AUTO:
        asked = AUTO_GAMMA if width is None else min(AUTO_GAMMA, width - 1)
    assert isinstance(asked, int)
    if width is not None:
        widths = (width,)
    elif auto:
        widths = tuple(sorted({default_width(d, dtype) for d in (0, _AUTO_MIDDLE, asked)}))
    else:
        widths = (default_width(asked, dtype),)
    return Plan(asked, widths, width is not None, auto_controller(asked, widths) if auto else None)


def default_width(gamma: int, dtype: str) -> int:
    """Return the rows of a target step: gamma + 1, but two for a lone bfloat16 row, which costs more than two."""
    return max(gamma + 1, 2 if dtype == "bfloat16" else 1)
