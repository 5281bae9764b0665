"""n-gram lookup where a row has a match, another source where it has none: row by row, in one program."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.draft.ngram import lookup, ngram_drafter
from specjax.types import Drafter, DraftView, Proposal


def mixed_drafter(other: Drafter, max_n: int = 3, min_n: int = 1) -> Drafter:
    """Return a source that looks up first and asks ``other`` for the rows without a match.

    Where every row has a match ``other`` runs no step; its cache lags behind and catches up when it is asked again.
    A looked-up draft has a one-hot q.

    Args:
        other: the source of the other rows, such as ``model_drafter(...)``.
        max_n: longest suffix looked up.
        min_n: shortest one.

    Raises:
        ValueError: unless 1 <= min_n <= max_n, or ``other`` runs a part of the target: that part covers its own drafts.
    """
    ngram_drafter(max_n, min_n)  # refuses lengths out of range
    if other.on_target:
        raise ValueError("mixed: got a source that runs a part of the target; expected one with a model of its own.")

    def propose(params, state, view: DraftView, gamma: int, greedy: bool):
        found = lookup(view, gamma, min_n, max_n)
        matched = found.num_drafted > 0
        allowed = view.gamma
        if other.max_positions is not None:
            allowed = jnp.where(view.num_tokens + gamma <= other.max_positions, allowed, 0)
        asked = replace(view, gamma=jnp.where(matched, 0, allowed), may_lag=True)
        drafted, state = other.propose(params, state, asked, gamma, greedy)
        return _join(matched, found, drafted, jnp.max(asked.gamma)), state

    return Drafter(
        init=other.init,
        propose=propose,
        rollback=other.rollback,
        length=other.length,
        lazy=True,
        observe=other.observe,
    )


def _join(matched: jax.Array, found: Proposal, drafted: Proposal, steps: jax.Array) -> Proposal:
    """Take the rows that matched from ``found``, the others from ``drafted``."""
    probs = drafted.probs
    if probs is not None:
        one_hot = jax.nn.one_hot(found.tokens, probs.shape[-1], dtype=probs.dtype)
        probs = jnp.where(matched[:, None, None], one_hot, probs)
    return Proposal(
        tokens=jnp.where(matched[:, None], found.tokens, drafted.tokens),
        probs=probs,
        num_drafted=jnp.where(matched, found.num_drafted, drafted.num_drafted),
        finite=matched | drafted.finite,
        steps=steps,
    )
