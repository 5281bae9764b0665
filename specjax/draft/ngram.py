"""n-gram lookup (prompt lookup decoding): propose what followed the last n tokens when they stood here before."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import Drafter, DraftView, Proposal


def ngram_drafter(max_n: int = 3, min_n: int = 1) -> Drafter:
    """Return a deterministic source over the row's own prompt and output.

    The longest match wins, of equally long ones the most recent; the drafted span ends where its source ends, at
    the row's newest token. A row without a match drafts nothing.

    Args:
        max_n: longest suffix looked up.
        min_n: shortest one.

    Raises:
        ValueError: unless 1 <= min_n <= max_n.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"n-gram lengths: got min_n={min_n}, max_n={max_n}; expected 1 <= min_n <= max_n.")

    def propose(params, state, view: DraftView, gamma: int, greedy: bool):
        del params, greedy
        return lookup(view, gamma, min_n, max_n), state

    return Drafter(init=_init, propose=propose, rollback=_rollback, free=True)


def lookup(view: DraftView, gamma: int, min_n: int, max_n: int) -> Proposal:
    """Return what followed each row's newest tokens when they stood in it before; K = ``gamma``."""
    tokens, count = view.tokens, view.num_tokens
    batch, capacity = tokens.shape
    ends = jnp.arange(capacity)  # position after a candidate match
    # matched[b, e]: how many tokens before e equal the row's last ones, up to max_n.
    matched = jnp.zeros((batch, capacity), jnp.int32)
    alive = (ends < count[:, None]) & (ends > 0)
    for n in range(1, max_n + 1):
        last = jnp.take_along_axis(tokens, jnp.maximum(count - n, 0)[:, None], axis=1)
        before = jnp.pad(tokens, ((0, 0), (n, 0)))[:, :capacity]
        alive = alive & (before == last) & (ends >= n) & (count >= n)[:, None]
        matched = matched + alive
    usable = matched >= min_n
    # Longest first, then most recent.
    best = jnp.argmax(jnp.where(usable, matched * capacity + ends, -1), axis=1)
    found = jnp.take_along_axis(usable, best[:, None], axis=1)[:, 0]
    places = jnp.minimum(best[:, None] + jnp.arange(gamma), capacity - 1)
    span = jnp.where(found, jnp.minimum(count - best, view.gamma), 0)
    return Proposal(
        tokens=jnp.take_along_axis(tokens, places, axis=1),
        probs=None,
        num_drafted=span.astype(jnp.int32),
        finite=jnp.ones((batch,), jnp.bool_),
    )


def _init(params, tokens, num_tokens, capacity):
    del params, tokens, num_tokens, capacity
    return ()


def _rollback(state, num_tokens):
    del num_tokens
    return state
