"""Between the scores of a head that knows some tokens only, and the whole vocabulary.

A head scores M listed ids, and X ids of each row's own prompt that the list leaves out. No id comes twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def unlisted(tokens: jax.Array, num_tokens: jax.Array, ids: jax.Array, count: int, vocab: int) -> jax.Array:
    """Return up to ``count`` different ids of each prompt that are not listed, ascending; V past them."""
    valid = jnp.arange(tokens.shape[1]) < num_tokens[:, None]
    there = jnp.zeros((tokens.shape[0], vocab), jnp.bool_)
    row = jnp.arange(tokens.shape[0])[:, None]
    there = there.at[row, jnp.where(valid, tokens, vocab)].set(True, mode="drop")
    there = there.at[:, ids].set(False)
    return jax.vmap(lambda own: jnp.nonzero(own, size=count, fill_value=vocab)[0])(there).astype(jnp.int32)


def whole(scores: jax.Array, ids: jax.Array | None, prompt_ids: jax.Array | None, vocab: int) -> jax.Array:
    """Return logits [B, V]: scores at the ids that they are of, -inf elsewhere. No id comes twice."""
    if ids is None:
        return scores
    batch, listed = scores.shape[0], ids.shape[0]
    logits = jnp.full((batch, vocab), -jnp.inf, jnp.float32).at[:, ids].set(scores[:, :listed])
    if prompt_ids is None:
        return logits
    return logits.at[jnp.arange(batch)[:, None], prompt_ids].set(scores[:, listed:], mode="drop")


def id_at(ids: jax.Array | None, prompt_ids: jax.Array | None, place: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the ids that the places of scores stand for."""
    if ids is None:
        return place
    found = ids[jnp.minimum(place, ids.shape[0] - 1)]
    if prompt_ids is None:
        return found
    further = jnp.take_along_axis(prompt_ids, jnp.maximum(place - ids.shape[0], 0)[:, None], axis=1)[:, 0]
    return jnp.where(place < ids.shape[0], found, further)
