"""From shards to batches, in an order that can be stopped and resumed: grain, one stream for each source of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.distill.config import MixSpec
from specjax.distill.packing import LABELS, SEGMENTS, TOKENS, positions
from specjax.errors import UsageError

SOURCES = ("data", "teacher", "student")


def require_grain() -> Any:
    """Return grain.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import grain
    except ImportError as error:
        raise UsageError("Training needs grain: pip install 'specjax[train]'.") from error
    return grain


class Batches:
    """Batches of rows from a mix of sources.

    The source of each row of each step follows from (seed, step) alone, and each source's order from the seed and how
    many of its rows were taken, so that a resumed run sees what an uninterrupted one would.

    Args:
        rows: B.
        seed: of orders and of the mix.
        mixes: by their starts.
        steps: of the whole run, which the starts are shares of.
        epochs: passes over each source but the student's; 0: without end.
    """

    def __init__(self, rows: int, *, seed: int, mixes: Sequence[MixSpec], steps: int, epochs: int = 0):
        self._rows, self._seed, self._mixes, self._steps, self._epochs = rows, seed, mixes, steps, epochs
        self._streams: dict[str, Any] = {}
        self._grain = require_grain()

    def put(self, name: str, source: Any, *, draw: int = 0) -> None:
        """Set a source of rows, anything with a length and items int32 [3, T]; ``draw`` numbers the student's draws.

        Raises:
            UsageError: it has no rows.
        """
        if not len(source):
            raise UsageError(f"There are no rows of source {name!r} to train on.")
        epochs = None if name == "student" or not self._epochs else self._epochs
        order = self._grain.MapDataset.source(source).seed(self._seed + 1000 * SOURCES.index(name) + 7919 * draw)
        self._streams[name] = iter(order.shuffle().repeat(epochs).to_iter_dataset())

    def mix(self, step: int) -> MixSpec:
        """Return the mix in force at a step, from 0."""
        return [mix for mix in self._mixes if mix.start * self._steps <= step][-1]

    def needs(self, name: str, step: int) -> bool:
        """Say whether a step may take rows of a source."""
        return getattr(self.mix(step), name) > 0

    def batch(self, step: int) -> dict[str, np.ndarray] | None:
        """Return the rows of a step, from 0; None when the data has run out.

        Returns:
            ``tokens``, ``segment``, ``position`` int32 [B, T] and ``mask`` float32 [B, T], 1 where the token that
            follows is trained on.
        """
        shares = np.asarray([getattr(self.mix(step), name) for name in SOURCES], float)
        chosen = np.random.default_rng([self._seed, step]).choice(len(SOURCES), self._rows, p=shares / shares.sum())
        try:
            rows = np.stack([next(self._streams[SOURCES[i]]) for i in chosen])
        except StopIteration:
            return None
        return as_batch(rows)

    def state(self) -> dict[str, Any]:
        """Return where each stream stands, for JSON."""
        return {name: stream.get_state() for name, stream in self._streams.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken."""
        for name, place in state.items():
            self._streams[name].set_state(place)


def as_batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows [B, 3, T] as the step takes them."""
    segment = np.ascontiguousarray(rows[:, SEGMENTS])
    return {
        "tokens": np.ascontiguousarray(rows[:, TOKENS]),
        "segment": segment,
        "position": positions(segment),
        "mask": rows[:, LABELS].astype(np.float32),
    }
