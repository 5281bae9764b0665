"""Filling a cache with prompts: no logits, the first token comes from the first round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax import cache as kv
from specjax.types import Cache, ModelFn, Params

# A long prompt runs in pieces of this many tokens, with a traced count of pieces.
PIECE = 256
# A prompt is padded to the smallest of these, then to multiples of the last by doubling: one program per bucket.
SMALLEST_BUCKET = 32


def bucket(num_tokens: int) -> int:
    """Return the padded length of a prompt: the smallest power of two, at least 32, that holds it."""
    return max(SMALLEST_BUCKET, 1 << max(num_tokens - 1, 0).bit_length())


def prefill(
    model_fn: ModelFn, params: Params, tokens: Int[Array, "B T"], num_tokens: Int[Array, " B"], capacity: int
) -> Cache:
    """Return a cache that holds every prompt token but the last one.

    Args:
        model_fn: the model.
        params: its parameters.
        tokens: [B, T], padded; T is a ``bucket``.
        num_tokens: [B], valid tokens of each row, at least 1.
        capacity: positions to allocate, at least T.

    Returns:
        A cache with ``length = num_tokens - 1``.
    """
    piece = min(tokens.shape[1], PIECE)
    held = num_tokens - 1
    pieces = (jnp.max(held) + piece - 1) // piece

    def step(i: jax.Array, cache: Cache) -> Cache:
        part = lax.dynamic_slice_in_dim(tokens, i * piece, piece, axis=1)
        return model_fn(params, part, cache, logits="none").cache

    cache = lax.fori_loop(0, pieces, step, model_fn.init_cache(tokens.shape[0], max(capacity, tokens.shape[1])))
    return kv.rollback(cache, held)
