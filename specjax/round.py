"""One speculative round, pure: draft, verify, accept, commit, roll back."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import cache as kv
from specjax import numerics, transforms, truncation
from specjax import sampling as s
from specjax.types import (
    Context,
    Drafter,
    DraftView,
    Finish,
    ModelFn,
    Params,
    Proposal,
    Purpose,
    RoundInfo,
    RoundKeys,
    RoundState,
    Rule,
    Status,
    Verdict,
)


def speculative_round(
    params: dict[str, Params],
    state: RoundState,
    *,
    target_fn: ModelFn,
    drafter: Drafter,
    rule: Rule,
    gamma: int,
    width: int,
    vocab_size: int,
    check: bool = False,
) -> tuple[RoundState, RoundInfo]:
    """Run one round on every running row; the others keep their state.

    Args:
        params: ``{"target": ..., "draft": ...}``.
        state: the loop's state.
        target_fn, drafter, rule: the parts.
        gamma: K, drafted tokens per round.
        width: W >= K + 1, rows of the target's step; rows past K + 1 are padding.
        vocab_size: V, the vocabulary in use; further logits are dropped.
        check: compare the invariants and set status bits.

    Returns:
        The new state and what the round did.
    """
    running = state.finish == Finish.RUNNING
    keys = round_keys(state, gamma, rule)
    context = transforms.begin(
        state.sampling, state.history, state.tokens, state.prompt_length, state.num_tokens, state.eos
    )
    proposal, draft_state = _draft(params, state, drafter, gamma, rule.greedy, keys, context)

    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_tokens - 1, 0)[:, None], axis=1)
    block = jnp.concatenate([last, proposal.tokens], axis=1)
    block = jnp.pad(block, ((0, 0), (0, width - gamma - 1)))
    out = target_fn(params["target"], block, state.cache, logits="all")
    assert out.logits is not None
    all_logits = out.logits[..., :vocab_size]
    raw = all_logits[:, : gamma + 1]
    logits, states = transforms.shape_block(raw, state.sampling, context, proposal.tokens)
    verdict = rule.verify(logits, proposal, state.sampling, keys)

    state = replace(state, draft_on=state.draft_on & (proposal.finite | ~running))
    emitted, num_emitted, finish, status = _cut(state, proposal, verdict, raw, logits, running)
    new = _commit(state, proposal, verdict, emitted, num_emitted)
    new = _record_logprobs(new, all_logits, logits, emitted, at=state.num_tokens)
    new = replace(
        new,
        history=transforms.commit(state.history, states, emitted, num_emitted),
        finish=finish,
        status=status | jnp.where(running & ~proposal.finite, int(Status.DRAFT_NOT_FINITE), 0),
        round=state.round + running,
        cache=kv.rollback(out.cache, jnp.where(running, new.num_tokens - 1, state.cache.length)),
        draft=drafter.rollback(draft_state, jnp.maximum(new.num_tokens, 1)),
    )
    if check:
        new = replace(new, status=new.status | _broken(state, new, drafter, running, num_emitted, vocab_size, width))
        new = replace(new, status=new.status | _forbidden(new, logits, emitted, num_emitted))
    return new, RoundInfo(proposal, logits, verdict, emitted, num_emitted)


def round_keys(state: RoundState, gamma: int, rule: Rule) -> RoundKeys:
    """Return the keys of a round's draws; unused ones cost nothing once compiled."""
    fresh = s.fold(state.key, state.round)
    base = s.purpose_key(state.key, Purpose.COUPLED) if rule.coupled else s.purpose_key(fresh, Purpose.DRAFT)
    first = state.num_tokens if rule.coupled else jnp.zeros_like(state.num_tokens)
    place = jnp.stack([s.fold(base, first + i) for i in range(gamma + 1)], axis=1)
    return RoundKeys(round=fresh, place=place)


def _draft(
    params: dict[str, Params],
    state: RoundState,
    drafter: Drafter,
    gamma: int,
    greedy: bool,
    keys: RoundKeys,
    context: Context | None,
) -> tuple[Proposal, object]:
    num_tokens = jnp.maximum(state.num_tokens, 1)
    sampling = s.for_draft(state.sampling)
    view = DraftView(tokens=state.tokens, num_tokens=num_tokens, sampling=sampling, keys=keys, context=context)
    proposal, draft_state = drafter.propose(params["draft"], state.draft, view, gamma, greedy)
    on = state.draft_on
    if drafter.max_positions is not None:
        # Past its own context a draft is not asked; what it computes there counts for nothing.
        on = on & (num_tokens + gamma <= drafter.max_positions)
    finite = proposal.finite | ~on
    return (
        replace(proposal, num_drafted=jnp.where(on & finite, proposal.num_drafted, 0), finite=finite),
        draft_state,
    )


def _cut(
    state: RoundState,
    proposal: Proposal,
    verdict: Verdict,
    raw: Float[Array, "B K1 V"],
    logits: Float[Array, "B K1 V"],
    running: jax.Array,
) -> tuple[Int[Array, "B K1"], Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
    """Return the block of new tokens, how many of them are committed, and each row's finish and status.

    The cut falls after the first EOS, at the limit, or before the first token whose raw logits are not finite or whose
    transforms leave nothing.
    """
    places = jnp.arange(logits.shape[1])
    accepted = verdict.num_accepted[:, None]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(places < accepted, drafts, verdict.next_token[:, None])

    room = state.limit - state.num_tokens
    count = jnp.minimum(verdict.num_accepted + 1, room)
    is_eos = jnp.any(emitted[:, :, None] == state.eos[:, None, :], axis=-1) & (places < count[:, None])
    ends = jnp.any(is_eos, axis=1)
    count = jnp.where(ends, jnp.argmax(is_eos, axis=1) + 1, count)

    # The largest logit is NaN if any is, infinite if one is +inf, -inf if none is left.
    wild = ~jnp.isfinite(jnp.max(raw, axis=-1))
    bad = (wild | jnp.isneginf(jnp.max(logits, axis=-1))) & (places < count[:, None])
    broken = jnp.any(bad, axis=1)
    count = jnp.where(broken, jnp.argmax(bad, axis=1), count)
    not_finite = jnp.take_along_axis(wild, jnp.minimum(count, places[-1])[:, None], axis=1)[:, 0]
    fault = jnp.where(not_finite, int(Status.TARGET_NOT_FINITE), int(Status.NOTHING_ALLOWED))

    finish = jnp.where(room <= count, int(Finish.LENGTH), int(Finish.RUNNING))
    finish = jnp.where(ends, int(Finish.EOS), finish)
    finish = jnp.where(broken, int(Finish.ERROR), finish)
    status = state.status | jnp.where(running & broken, fault, 0)
    return emitted, jnp.where(running, count, 0), jnp.where(running, finish, state.finish), status


def _commit(
    state: RoundState,
    proposal: Proposal,
    verdict: Verdict,
    emitted: Int[Array, "B K1"],
    num_emitted: Int[Array, " B"],
) -> RoundState:
    """Append the new tokens and their records; what lies past ``num_tokens`` afterwards is not valid."""
    places = jnp.broadcast_to(jnp.arange(emitted.shape[1], dtype=jnp.int8), emitted.shape)
    drafted = jnp.broadcast_to(proposal.num_drafted[:, None].astype(jnp.int8), emitted.shape)
    at = state.num_tokens
    return replace(
        state,
        tokens=_append(state.tokens, emitted, at),
        num_tokens=at + num_emitted,
        place=_append(state.place, places, at),
        accepted=_append(state.accepted, places < verdict.num_accepted[:, None], at),
        drafted=_append(state.drafted, drafted, at),
    )


def _record_logprobs(
    state: RoundState,
    raw: Float[Array, "B W V"],
    shaped: Float[Array, "B K1 V"],
    emitted: Int[Array, "B K1"],
    at: Int[Array, " B"],
) -> RoundState:
    """Append the log-probabilities of a block where they are asked for."""
    if state.logprobs is None or state.sampled_logprobs is None:
        return state
    size = emitted.shape[1]
    # Over all W rows, so that the bits do not depend on gamma.
    norm = numerics.log_sum_exp(raw)[:, :size]
    raw = raw[:, :size]
    sampled = jnp.log(s.distribution(shaped, state.sampling).probs)
    state = replace(
        state,
        logprobs=_append(state.logprobs, _chosen(raw, emitted) - norm[..., 0], at),
        sampled_logprobs=_append(state.sampled_logprobs, _chosen(sampled, emitted), at),
    )
    if state.top_ids is None or state.top_logprobs is None:
        return state
    values, ids = truncation.largest(raw.reshape(-1, raw.shape[-1]), state.top_ids.shape[-1])
    values, ids = (x.reshape(*emitted.shape, -1) for x in (values, ids))
    return replace(
        state, top_ids=_append(state.top_ids, ids, at), top_logprobs=_append(state.top_logprobs, values - norm, at)
    )


def _chosen(values: Float[Array, "B K1 V"], ids: Int[Array, "B K1"]) -> Float[Array, "B K1"]:
    return jnp.take_along_axis(values, ids[..., None], axis=-1)[..., 0]


def _append(buffer: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    def write(b: jax.Array, n: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(b, n.astype(b.dtype), (i, *(0,) * (b.ndim - 1)))

    return jax.vmap(write)(buffer, new, at)


def _broken(old, new: RoundState, drafter: Drafter, running, num_emitted, vocab_size: int, width: int) -> jax.Array:
    """Return status bits for what an invariant forbids."""

    def bit(flag: Status, wrong: jax.Array) -> jax.Array:
        return jnp.where(wrong, int(flag), 0)

    bits = bit(Status.TARGET_CACHE_LENGTH, running & (new.cache.length != new.num_tokens - 1))
    length = drafter.length(new.draft)
    if length is not None:
        short = (length < new.num_tokens - 2) | (length > new.num_tokens - 1)
        bits |= bit(Status.DRAFT_CACHE_LENGTH, running & short)
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


def _forbidden(new: RoundState, logits: jax.Array, emitted: jax.Array, num_emitted: jax.Array) -> jax.Array:
    """Return status bits for transforms that were not in force, or that count what is not there."""
    visible = jnp.arange(emitted.shape[1]) < num_emitted[:, None]
    banned = jnp.any(visible & jnp.isneginf(_chosen(logits, emitted)), axis=1)
    bits = jnp.where(banned, int(Status.TOKEN_FORBIDDEN), 0)
    if new.history.counts is not None:
        miscounted = jnp.sum(new.history.counts, axis=1) != new.num_tokens - new.prompt_length
        bits |= jnp.where(miscounted, int(Status.HISTORY), 0)
    return bits
