"""Records of choosing gamma round by round. A part of ``specjax.types``; shape letters as there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
from jaxtyping import Array, Bool, Int


@flax.struct.dataclass
class ControlView:
    """What a controller sees before a round.

    Attributes:
        running: [B] bool; the other rows count for nothing.
        num_new: [B] int32, new tokens so far.
        room: [B] int32, how many more the row's limit allows.
        round: [B] int32, rounds the row has run.
        lag: [B] int32, entries that the draft's cache lacks.
        allowed: [B] int32, 0..K: the most the row may draft.
        costs: ``params["costs"]``, or None.
    """

    running: Bool[Array, " B"]
    num_new: Int[Array, " B"]
    room: Int[Array, " B"]
    round: Int[Array, " B"]
    lag: Int[Array, " B"]
    allowed: Int[Array, " B"]
    costs: Any


@flax.struct.dataclass
class Outcome:
    """What a round did, for the controller.

    Attributes:
        gamma: [B] int32, as chosen (0 in rows that did not run).
        steps: int32, the draft steps that ran.
        num_drafted, num_accepted, num_emitted: [B] int32.
        width_index: int32, which of the program's widths verified the round.
    """

    gamma: Int[Array, " B"]
    steps: Int[Array, ""]
    num_drafted: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    num_emitted: Int[Array, " B"]
    width_index: Int[Array, ""]


class Controller(NamedTuple):
    """Chooses each row's gamma, round by round: pure functions over a state whose every leaf leads with the batch axis.

    What it chooses may depend on everything that was committed, never on draws of the round to come: then no law
    changes.

    Attributes:
        init: ``batch -> control``, of rows that have run no round.
        choose: ``(control, ControlView) -> [B]`` int32; the round masks it to what each row may draft.
        update: ``(control, ControlView, Outcome) -> control``.
    """

    init: Callable[[int], Any]
    choose: Callable[[Any, ControlView], jax.Array]
    update: Callable[[Any, ControlView, Outcome], Any]
