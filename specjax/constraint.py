"""Constraints on what may be generated: pure functions that run inside the loop (``specjax.types.Constraint``)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.types import Constraint


def automaton(table: Any, start: int = 0) -> Constraint:
    """Return the constraint that a finite automaton over token ids sets.

    Args:
        table: [S, V] integers: from state s, token v leads to state ``table[s, v]``; -1 where v may not come. The table
            becomes part of the compiled program, so S x V is meant to be small.
        start: the first state.

    Raises:
        ValueError: a table of another form, or a state that is not there.

    Example:
        # a, then any number of b: states 0 and 1 over the tokens (a, b)
        specjax.generate(pair, prompts, constraint=automaton([[1, -1], [-1, 1]]))
    """
    table = np.asarray(table)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise ValueError(f"table has shape {table.shape} and dtype {table.dtype}; expected integers [S, V].")
    if table.min() < -1 or table.max() >= len(table) or not 0 <= start < len(table):
        raise ValueError(f"table or start names a state outside 0..{len(table) - 1}; only -1 forbids a token.")
    following = table.astype(np.int32)

    def init():
        return jnp.asarray(start, jnp.int32)

    def step(state, token):
        rows = jnp.asarray(following)
        after = jnp.where(token < 0, state, rows[state, jnp.maximum(token, 0)])
        # Only a forbidden token gives -1, and none of those is emitted: what follows it does not matter.
        after = jnp.maximum(after, 0)
        return rows[after] >= 0, after

    return Constraint(init, step)
