"""A program whose device fails when told to: through the calls an engine makes, as a real one would."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import jax

from specjax.generate import Program
from specjax.types import RoundState

MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes."
INTERNAL = "INTERNAL: the device is not well."


class Faulty:
    """Wraps a program; counts its steps, rows and restored rows from 0.

    Args:
        program: the real one.
        fail: which steps raise, after their donated buffers are gone.
        message: what they say.
        change: called with (number of the step, state) before each step; returns the state to run.
        fail_row, fail_restored: called with the prompt; True raises.
    """

    def __init__(
        self,
        program: Program,
        *,
        fail: Container[int] = (),
        message: str = INTERNAL,
        change: Callable[[int, RoundState], RoundState] | None = None,
        fail_row: Callable[[Any], bool] = lambda prompt: False,
        fail_restored: Callable[[Any], bool] = lambda prompt: False,
    ):
        self._program, self._fail, self._message, self._change = program, fail, message, change
        self._fail_row, self._fail_restored = fail_row, fail_restored
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def step(self, params, state, limit):
        number, self.steps = self.steps, self.steps + 1
        if number in self._fail:
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise jax.errors.JaxRuntimeError(self._message)
        if self._change:
            state = self._change(number, state)
        return self._program.step(params, state, limit)

    def row(self, params, prompt, prefix=None):
        if self._fail_row(prompt):
            raise jax.errors.JaxRuntimeError(self._message)
        return self._program.row(params, prompt, prefix)

    def restored(self, params, prompt, saved, prefix=None):
        if self._fail_restored(prompt):
            raise jax.errors.JaxRuntimeError(self._message)
        return self._program.restored(params, prompt, saved, prefix)


def longer(cache: Any, row: int, by: int) -> Any:
    """Return a cache that claims to hold more (or less) of one row than it does."""
    return replace(cache, length=cache.length.at[row].add(by))
