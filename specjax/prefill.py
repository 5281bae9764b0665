"""Filling a cache with prompts: no logits, the first token comes from the first round."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
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


@flax.struct.dataclass
class Prefix:
    """The cache of a text that many prompts begin with.

    Attributes:
        cache: one row.
        num_pieces: [] int32, how many of its pieces a prompt begins with.
    """

    cache: Cache
    num_pieces: jax.Array | np.integer


def prefill(
    model_fn: ModelFn,
    params: Params,
    tokens: Int[Array, "B T"],
    num_tokens: Int[Array, " B"],
    capacity: int,
    prefix: Prefix | None = None,
) -> Cache:
    """Return a cache that holds every prompt token but the last one.

    Args:
        model_fn: the model.
        params: its parameters.
        tokens: [B, T], padded; T is a ``bucket``.
        num_tokens: [B], valid tokens of each row, at least 1.
        capacity: positions to allocate, at least T.
        prefix: whole pieces that need not be computed again. The same pieces are computed without it, so no bit
            depends on it; T must be more than one piece where it is used.

    Returns:
        A cache with ``length = num_tokens - 1``.
    """
    piece = min(tokens.shape[1], PIECE)
    held = num_tokens - 1
    pieces = (jnp.max(held) + piece - 1) // piece

    def step(i: jax.Array, cache: Cache) -> Cache:
        part = lax.dynamic_slice_in_dim(tokens, i * piece, piece, axis=1)
        return model_fn(params, part, cache, logits="none").cache

    cache, first = model_fn.init_cache(tokens.shape[0], max(capacity, tokens.shape[1])), jnp.int32(0)
    if prefix is not None and piece == PIECE:
        cache, first = _copied(cache, prefix), prefix.num_pieces
    return kv.rollback(lax.fori_loop(first, pieces, step, cache), held)


def _copied(cache: Cache, prefix: Prefix) -> Cache:
    """Copy a prefix's entries into every row of an empty cache."""

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        part = part[..., : whole.shape[-2], :]  # positions
        part = jnp.broadcast_to(part, (whole.shape[0], *part.shape[1:])).astype(whole.dtype)
        return lax.dynamic_update_slice(whole, part, (0,) * whole.ndim)

    return Cache(
        k=jax.tree.map(put, cache.k, prefix.cache.k),
        v=jax.tree.map(put, cache.v, prefix.cache.v),
        length=jnp.full_like(cache.length, prefix.num_pieces * PIECE),
    )
