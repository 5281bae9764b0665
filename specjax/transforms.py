"""What changes the logits before they are sampled: bias and bans, then penalties. One way for target and draft.

The order is logit bias, bans, allow-list, banned sequences, minimum new tokens and the constraint's mask; then the
repetition, presence and frequency penalties. Temperature, min-p, top-k and top-p follow in ``specjax.sampling``.

A ``Context`` is what they look at. It starts from a row's committed tokens and moves on by one drafted token at a
time, so that position i of a block sees the drafts before it; nothing of it is kept but what ``commit`` is given, so
rejected drafts are forgotten.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.types import Constraint, Context, History, Penalties, RowSampling


def init_history(
    sampling: RowSampling, tokens: Int[Array, "B T"], num_tokens: Int[Array, " B"], vocab_size: int
) -> History:
    """Return the history of rows that have a prompt and no output.

    Args:
        sampling: the rows' settings.
        tokens: [B, T] padded prompts.
        num_tokens: [B], their lengths.
        vocab_size: V.
    """
    batch = tokens.shape[0]
    counts = in_prompt = state = None
    if sampling.penalties is not None:
        counts = jnp.zeros((batch, vocab_size), jnp.int32)
        valid = jnp.arange(tokens.shape[1]) < num_tokens[:, None]
        places = jnp.where(valid, tokens, vocab_size)  # out of range: dropped
        in_prompt = jnp.zeros((batch, vocab_size), jnp.bool_).at[_rows(places), places].set(True, mode="drop")
    if sampling.constraint is not None:
        first = sampling.constraint.init()
        state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *jnp.shape(leaf))), first)
    return History(counts=counts, in_prompt=in_prompt, constraint=state)


def replay(
    sampling: RowSampling,
    history: History,
    tokens: Int[Array, "B T"],
    prompt_length: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
) -> History:
    """Return the history of rows whose output stands in ``tokens``, from that of their prompts."""
    if history.counts is not None:
        places = jnp.arange(tokens.shape[1])
        output = (places >= prompt_length[:, None]) & (places < num_tokens[:, None])
        ids = jnp.where(output, tokens, history.counts.shape[1])  # out of range: dropped
        history = replace(history, counts=history.counts.at[_rows(ids), ids].add(1, mode="drop"))
    if sampling.constraint is not None:
        constraint = sampling.constraint

        def give(i: jax.Array, state: Any) -> Any:
            """Give each row the token before its i-th new one; its newest one is given by the next round."""
            place = jnp.maximum(prompt_length + i - 1, 0)
            token = jnp.where(i == 0, -1, jnp.take_along_axis(tokens, place[:, None], axis=1)[:, 0])
            new = _step(constraint, state, token)[1]
            goes_on = i < num_tokens - prompt_length
            return jax.tree.map(lambda a, b: jnp.where(goes_on.reshape(-1, *[1] * (a.ndim - 1)), b, a), state, new)

        count = jnp.max(num_tokens - prompt_length)
        history = replace(history, constraint=jax.lax.fori_loop(0, count, give, history.constraint))
    return history


def begin(
    sampling: RowSampling,
    history: History,
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
    eos: Int[Array, "B E"],
) -> Context | None:
    """Return the context of the position after the committed tokens; None where no transform looks at any."""
    parts = (sampling.sequences, sampling.min_new, sampling.penalties, sampling.constraint)
    if all(part is None for part in parts):
        return None
    window = allowed = None
    if sampling.sequences is not None:
        places = num_tokens[:, None] - jnp.arange(sampling.sequences.shape[-1] - 1, 0, -1)
        window = jnp.where(places >= 0, jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1), -1)
    if sampling.constraint is not None:
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
        newest = jnp.where(num_tokens > prompt_length, newest, -1)
        allowed, state = _step(sampling.constraint, history.constraint, newest)
        history = replace(history, constraint=state)
    return Context(history=history, allowed=allowed, window=window, num_new=num_tokens - prompt_length, eos=eos)


def advance(sampling: RowSampling, context: Context, token: Int[Array, " B"]) -> Context:
    """Return the context of the next position, ``token`` standing at this one."""
    history, allowed, window = context.history, context.allowed, context.window
    if history.counts is not None:
        history = replace(history, counts=history.counts.at[jnp.arange(token.shape[0]), token].add(1))
    if window is not None:
        window = jnp.concatenate([window[:, 1:], token[:, None]], axis=1)
    if sampling.constraint is not None:
        allowed, state = _step(sampling.constraint, history.constraint, token)
        history = replace(history, constraint=state)
    return replace(context, history=history, allowed=allowed, window=window, num_new=context.num_new + 1)


def shape(logits: Float[Array, "B V"], sampling: RowSampling, context: Context | None) -> Float[Array, "B V"]:
    """Return the logits of one position with bias, bans and penalties applied; -inf for what may not come.

    Args:
        logits: the model's, [B, V].
        sampling: the rows' settings.
        context: of this position; None where none of these transforms is in use.

    Raises:
        ValueError: the constraint's mask is not one of the vocabulary in use.
    """
    if sampling.bias is not None:
        logits = logits + sampling.bias
    if context is None:
        return logits
    if sampling.sequences is not None and context.window is not None:
        logits = _drop(logits, _completing(sampling.sequences, context.window, logits.shape[-1]))
    if sampling.min_new is not None:
        early = (context.num_new < sampling.min_new)[:, None] & (context.eos >= 0)
        logits = _drop(logits, jnp.where(early, context.eos, logits.shape[-1]))
    if context.allowed is not None:
        if context.allowed.shape != logits.shape:
            got, expected = context.allowed.shape[1:], logits.shape[1:]
            raise ValueError(f"The constraint's mask has the shape {got}; expected {expected}, the vocabulary in use.")
        logits = jnp.where(context.allowed, logits, -jnp.inf)
    if sampling.penalties is not None:
        logits = _penalised(logits, sampling.penalties, context.history)
    return logits


def shape_block(
    logits: Float[Array, "B K1 V"], sampling: RowSampling, context: Context | None, drafts: Int[Array, "B K"]
) -> tuple[Float[Array, "B K1 V"], Any]:
    """Return the logits of a block, each position seeing the drafts before it.

    Args:
        logits: the target's, [B, K+1, V].
        sampling: the rows' settings.
        context: of the block's first position.
        drafts: [B, K].

    Returns:
        The logits, and the constraint's states [K+1, B, ...]: entry i has been given the drafts before position i.
    """
    if context is None:
        return (logits if sampling.bias is None else logits + sampling.bias[:, None]), None

    def step(context: Context, xs: tuple[jax.Array, jax.Array]):
        scores, token = xs
        return advance(sampling, context, token), (shape(scores, sampling, context), context.history.constraint)

    following = jnp.pad(drafts, ((0, 0), (0, 1)))  # what stands at the last position does not matter
    _, (shaped, states) = lax.scan(step, context, (jnp.moveaxis(logits, 1, 0), following.T))
    return jnp.moveaxis(shaped, 0, 1), states


def commit(history: History, states: Any, emitted: Int[Array, "B K1"], num_emitted: Int[Array, " B"]) -> History:
    """Return the history with a round's new tokens, and nothing of what it rejected.

    Args:
        history: before the round.
        states: the constraint's states from ``shape_block``.
        emitted, num_emitted: the block of new tokens, and how many of them count.
    """
    if history.counts is not None:
        counted = (jnp.arange(emitted.shape[1]) < num_emitted[:, None]).astype(jnp.int32)
        history = replace(history, counts=history.counts.at[_rows(emitted), emitted].add(counted))
    if states is not None:
        # The newest token has not been given to the constraint yet: the next round does.
        last = jnp.maximum(num_emitted - 1, 0)

        def pick(old: jax.Array, new: jax.Array) -> jax.Array:
            new = new[last, jnp.arange(last.shape[0])]
            went_on = (num_emitted > 0).reshape(-1, *[1] * (old.ndim - 1))
            return jnp.where(went_on, new, old)

        history = replace(history, constraint=jax.tree.map(pick, history.constraint, states))
    return history


def _penalised(logits: jax.Array, penalties: Penalties, history: History) -> jax.Array:
    assert history.counts is not None
    assert history.in_prompt is not None
    repetition, presence, frequency = (
        x[:, None] for x in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    in_output = history.counts > 0
    weaker = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_output | history.in_prompt, weaker, logits)
    return logits - jnp.where(in_output, presence + frequency * history.counts, 0.0)


def _completing(sequences: jax.Array, window: jax.Array, vocab: int) -> jax.Array:
    """Return the ids [B, N] that would complete a banned sequence; V where none would."""
    before, last = sequences[..., :-1], sequences[..., -1]
    met = jnp.all((before == -1) | (before == window[:, None]), axis=-1) & (last >= 0)
    return jnp.where(met, last, vocab)


def _drop(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Ban ids [B, N]; those out of range do nothing."""
    return logits.at[_rows(ids), ids].set(-jnp.inf, mode="drop")


def _rows(ids: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(ids.shape[0])[:, None], ids.shape)


def _step(constraint: Constraint, state: Any, token: jax.Array) -> tuple[jax.Array, Any]:
    return jax.vmap(constraint.step)(state, token)
