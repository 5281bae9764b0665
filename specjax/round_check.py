"""The invariants of a round, as status bits: what ``check=True`` compiles in."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Drafter, Finish, RoundState, Status


def broken(
    old: RoundState,
    new: RoundState,
    gamma: jax.Array,
    num_emitted: jax.Array,
    drafter: Drafter,
    vocab_size: int,
    width: int,
) -> jax.Array:
    """Return status bits [B] for what an invariant forbids after a round; ``gamma`` [B]: what each row might draft."""
    running = old.finish == Finish.RUNNING

    def bit(flag: Status, wrong: jax.Array) -> jax.Array:
        return jnp.where(wrong, int(flag), 0)

    bits = bit(Status.TARGET_CACHE_LENGTH, running & (new.cache.length != new.num_tokens - 1))
    length = drafter.length(new.draft)
    if length is not None:
        wrong = length > new.num_tokens - 1
        if not drafter.lazy:
            wrong |= (gamma > 0) & (length < new.num_tokens - 2)
        bits |= bit(Status.DRAFT_CACHE_LENGTH, running & wrong)
    positions = jnp.arange(new.tokens.shape[1])
    output = (positions >= new.prompt_length[:, None]) & (positions < new.num_tokens[:, None])
    wild = output & ((new.tokens < 0) | (new.tokens >= vocab_size))
    bits |= bit(Status.TOKEN_OUT_OF_RANGE, jnp.any(wild, axis=1))
    inner = output & (positions < new.num_tokens[:, None] - 1)
    early = inner & jnp.any(new.tokens[:, :, None] == new.eos[:, None, :], axis=-1)
    bits |= bit(Status.AFTER_END, jnp.any(early, axis=1) | (new.num_tokens > new.limit) & running)
    bits |= bit(Status.AFTER_END, ~running & (num_emitted > 0))
    bits |= bit(Status.CACHE_OVERRUN, old.num_tokens - 1 + width > new.tokens.shape[1])
    return bits


def forbidden(new: RoundState, logits: jax.Array, emitted: jax.Array, num_emitted: jax.Array) -> jax.Array:
    """Return status bits for transforms that were not in force, or that count what is not there."""
    visible = jnp.arange(emitted.shape[1]) < num_emitted[:, None]
    banned = jnp.any(visible & jnp.isneginf(jnp.take_along_axis(logits, emitted[..., None], axis=-1)[..., 0]), axis=1)
    bits = jnp.where(banned, int(Status.TOKEN_FORBIDDEN), 0)
    if new.history.counts is not None:
        miscounted = jnp.sum(new.history.counts, axis=1) != new.num_tokens - new.prompt_length
        bits |= jnp.where(miscounted, int(Status.HISTORY), 0)
    return bits
