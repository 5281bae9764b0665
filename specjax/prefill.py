"""Filling a cache with prompts: no logits, the first token comes from the first round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from specjax import cache as kv
from specjax.types import Cache, ModelFn, Observed, Params

# A long prompt runs in pieces of this many tokens, with a traced count of pieces.
PIECE = 256
# A prompt is padded to a multiple of this, past one piece to a power of two of pieces: one program per bucket.
SMALLEST_BUCKET = 32


def bucket(num_tokens: int) -> int:
    """Return the padded length of a prompt: up to a piece by steps, for their cost is that of their length; past it by
    doubling, for pieces that hold nothing do not run."""
    if num_tokens <= PIECE:
        return max(-(-num_tokens // SMALLEST_BUCKET), 1) * SMALLEST_BUCKET
    return 1 << (num_tokens - 1).bit_length()


@flax.struct.dataclass
class Prefix:
    """The cache of a text that many prompts begin with.

    Attributes:
        cache: one row.
        num_pieces: [] int32, how many of its pieces a prompt begins with.
        features: [1, P, D] of the text, for a draft source that observes; else None.
    """

    cache: Cache
    num_pieces: jax.Array | np.integer
    features: jax.Array | None = None


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
    return observed(model_fn, params, tokens, num_tokens, capacity, prefix)[0]


def observed(
    model_fn: ModelFn,
    params: Params,
    tokens: Int[Array, "B T"],
    num_tokens: Int[Array, " B"],
    capacity: int,
    prefix: Prefix | None = None,
    observe: Callable[[Any, Observed], Any] | None = None,
    seen: Any = (),
) -> tuple[Cache, Any]:
    """Do what ``prefill`` does, and show every piece with its features to a draft source.

    Args:
        model_fn, params, tokens, num_tokens, capacity, prefix: as for ``prefill``; the prefix has features where
            ``observe`` is given.
        observe: ``(state, Observed) -> state``, or None.
        seen: its state.

    Returns:
        The cache, and the state after the last piece.
    """
    piece = min(tokens.shape[1], PIECE)
    held = num_tokens - 1
    pieces = (jnp.max(held) + piece - 1) // piece

    def look(i: jax.Array, seen: Any, features: jax.Array | None) -> Any:
        if observe is None:
            return seen
        assert features is not None
        features = jnp.broadcast_to(features, (tokens.shape[0], *features.shape[1:]))
        part = lax.dynamic_slice_in_dim(tokens, i * piece, piece, axis=1)
        return observe(seen, Observed(part, features, jnp.full_like(held, i * piece), num_tokens))

    def step(i: jax.Array, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        cache, seen = carry
        part = lax.dynamic_slice_in_dim(tokens, i * piece, piece, axis=1)
        out = model_fn(params, part, cache, logits="none", features=observe is not None)
        return out.cache, look(i, seen, out.features)

    def again(i: jax.Array, seen: Any) -> Any:
        assert prefix is not None
        assert prefix.features is not None
        return look(i, seen, lax.dynamic_slice_in_dim(prefix.features, i * piece, piece, axis=1))

    cache, first = model_fn.init_cache(tokens.shape[0], max(capacity, tokens.shape[1])), jnp.int32(0)
    if prefix is not None and piece == PIECE:
        cache, first = _copied(cache, prefix), prefix.num_pieces
        if observe is not None:
            seen = lax.fori_loop(0, first, again, seen)
    cache, seen = lax.fori_loop(first, pieces, step, (cache, seen))
    return kv.rollback(cache, held), seen


def whole(
    model_fn: ModelFn, params: Params, tokens: Int[Array, "1 T"], num_tokens: Int[Array, " 1"], *, features: bool
) -> tuple[Cache, jax.Array | None]:
    """Prefill a text that many prompts begin with; return the cache, and the features [1, T, D] where asked for."""
    filled = functools.partial(observed, model_fn, params, tokens, num_tokens, tokens.shape[1], None)
    if not features:
        return filled()[0], None

    def keep(held: jax.Array, seen: Observed) -> jax.Array:
        return lax.dynamic_update_slice(held, seen.features, (0, seen.start[0], 0))

    shown = functools.partial(model_fn, logits="none", features=True)
    like = jax.eval_shape(shown, params, tokens, model_fn.init_cache(*tokens.shape)).features
    return filled(keep, jnp.zeros(like.shape, like.dtype))


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
