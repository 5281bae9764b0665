"""What one draft step of a model does once it has logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from specjax import sampling as s
from specjax import transforms, vocabulary
from specjax.types import Context, DraftView


def no_probs(view: DraftView, gamma: int, vocab_size: int, greedy: bool) -> jax.Array | None:
    """Return the buffer of q, [B, K, V], before anything is drafted; None where every draft is an argmax."""
    return None if greedy else vocabulary.keep(jnp.zeros((view.tokens.shape[0], gamma, vocab_size), jnp.float32))


def choose(
    logits: jax.Array, view: DraftView, context: Context | None, probs: jax.Array | None, place: jax.Array
) -> tuple[jax.Array, jax.Array | None, Context | None, jax.Array]:
    """Draw the draft at a place of the block.

    Args:
        logits: [B, V] float32, of the vocabulary in use.
        view: the rows' settings and keys.
        context: of this place.
        probs: [B, K, V], or None: every row takes its argmax, and q is one-hot.
        place: 0..K-1, traced.

    Returns:
        The tokens [B]; q with their distributions written; the context of the next place; and [B] bool, False where
        the transforms leave nothing of what the draft scores: such a token, and those after it, must not count.
    """
    shaped = transforms.shape(logits, view.sampling, context)
    if probs is None:
        token = vocabulary.argmax(shaped)
    else:
        q = s.distribution(shaped[:, None], view.sampling)
        token = s.draw(q.log_weights[:, 0], view.keys.place[:, place], few=q.few)
        probs = lax.dynamic_update_slice(probs, q.probs, (0, place, 0))
    context = None if context is None else transforms.advance(view.sampling, context, token)
    return token, probs, context, ~jnp.isneginf(jnp.max(shaped, axis=-1))
