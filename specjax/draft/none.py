"""No draft: plain decoding, the yardstick. The same program family with gamma = 0."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import Drafter, DraftView, Proposal


def no_drafter() -> Drafter:
    """Return the source that never drafts a token."""
    return Drafter(init=_init, propose=_propose, rollback=_rollback)


def _init(params, tokens, num_tokens, capacity):
    del params, tokens, num_tokens, capacity
    return ()


def _propose(params, state, view: DraftView, gamma: int, greedy: bool):
    del params, greedy
    batch = view.tokens.shape[0]
    proposal = Proposal(
        tokens=jnp.zeros((batch, gamma), jnp.int32),
        probs=None,
        num_drafted=jnp.zeros((batch,), jnp.int32),
        finite=jnp.ones((batch,), jnp.bool_),
    )
    return proposal, state


def _rollback(state, num_tokens):
    del num_tokens
    return state
