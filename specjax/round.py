"""One speculative round, pure: draft, verify, accept, commit, roll back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax import cache as kv
from specjax import numerics, round_check, transforms, vocabulary
from specjax import sampling as s
from specjax.types import (
    Context,
    Controller,
    ControlView,
    Drafter,
    DraftView,
    Finish,
    ModelFn,
    ModelOutput,
    Observed,
    Outcome,
    Params,
    Proposal,
    Purpose,
    RoundInfo,
    RoundKeys,
    RoundState,
    Rule,
    Status,
    TargetView,
    Verdict,
)


@dataclass(frozen=True)
class Parts:
    """A round's static choices.

    Attributes:
        target_fn, drafter, rule: the parts.
        gamma: K, the most tokens drafted per round.
        widths: rows of the target's step that are compiled, ascending, the last at least K + 1: a round takes the
            smallest that holds its drafts. Rows past them are padding.
        vocab_size: V, the vocabulary in use; further logits are dropped.
        exact: no bit of the target's results may depend on the draft; there is one width.
        controller: chooses gamma, or None: each row drafts what ``RoundState.gamma`` says.
        check: compare the invariants and set status bits.
    """

    target_fn: ModelFn
    drafter: Drafter
    rule: Rule
    gamma: int
    widths: tuple[int, ...]
    vocab_size: int
    exact: bool = False
    controller: Controller | None = None
    check: bool = False


def speculative_round(
    params: dict[str, Params], state: RoundState, parts: Parts
) -> tuple[RoundState, RoundInfo | None]:
    """Run one round on every running row; the others keep their state.

    Args:
        params: ``{"target": ..., "draft": ...}``, and "costs" where the controller wants them.
        state: the loop's state.
        parts: the static choices.

    Returns:
        The new state and what the round did; None where there are several widths.
    """
    old = state
    view = _control_view(params, state, parts)
    gamma = _gamma(state, view, parts)
    keys = round_keys(state, parts.gamma, parts.rule)
    context = transforms.begin(
        state.sampling, state.history, state.tokens, state.prompt_length, state.num_tokens, state.eos
    )
    state, proposal = _draft(params, state, gamma, keys, context, parts)
    begun = _Begun(proposal, keys, context)
    if len(parts.widths) == 1:
        index = jnp.int32(0)
        state, info = _verify(params, state, begun, parts, parts.widths[0])
        accepted, emitted = info.verdict.num_accepted, info.num_emitted
    else:
        info = None
        index = jnp.searchsorted(jnp.asarray(parts.widths), jnp.max(proposal.num_drafted) + 1).astype(jnp.int32)
        state, accepted, emitted = _verify_at(params, state, begun, parts, index)
    if parts.controller is not None:
        steps = jnp.max(gamma) if proposal.steps is None else proposal.steps
        outcome = Outcome(gamma, steps, proposal.num_drafted, accepted, emitted, index)
        state = replace(state, control=parts.controller.update(state.control, view, outcome))
    if parts.check:
        broken = round_check.broken(old, state, gamma, emitted, parts.drafter, parts.vocab_size, parts.widths[-1])
        state = replace(state, status=state.status | broken)
    return state, info


def round_keys(state: RoundState, gamma: int, rule: Rule) -> RoundKeys:
    """Return the keys of a round's draws; unused ones cost nothing once compiled."""
    fresh = s.fold(state.key, state.round)
    base = s.purpose_key(state.key, Purpose.COUPLED) if rule.coupled else s.purpose_key(fresh, Purpose.DRAFT)
    first = state.num_tokens if rule.coupled else jnp.zeros_like(state.num_tokens)
    place = jax.vmap(lambda i: s.fold(base, first + i), out_axes=1)(jnp.arange(gamma + 1))
    return RoundKeys(round=fresh, place=place)


def _control_view(params: dict[str, Params], state: RoundState, parts: Parts) -> ControlView:
    drafter, running = parts.drafter, state.finish == Finish.RUNNING
    num_tokens = jnp.maximum(state.num_tokens, 1)
    on = running & state.draft_on
    if drafter.max_positions is not None:
        # Past its own context a draft is not asked.
        on = on & (num_tokens + parts.gamma <= drafter.max_positions)
    length = drafter.length(state.draft)
    lag = jnp.zeros_like(num_tokens) if length is None else jnp.maximum(num_tokens - 2 - length, 0)
    return ControlView(
        running=running,
        num_new=state.num_tokens - state.prompt_length,
        room=state.limit - state.num_tokens,
        round=state.round,
        lag=lag,
        allowed=jnp.where(on, jnp.minimum(state.gamma, parts.gamma), 0),
        costs=params.get("costs"),
    )


def _gamma(state: RoundState, view: ControlView, parts: Parts) -> Int[Array, " B"]:
    """Return how many tokens each row may draft now."""
    if parts.controller is None:
        return view.allowed
    return jnp.clip(parts.controller.choose(state.control, view), 0, view.allowed)


def _draft(
    params: dict[str, Params],
    state: RoundState,
    gamma: Int[Array, " B"],
    keys: RoundKeys,
    context: Context | None,
    parts: Parts,
) -> tuple[RoundState, Proposal]:
    drafter = parts.drafter
    target = None
    if drafter.on_target:
        target = TargetView(params["target"], state.cache, width=parts.widths[-1], exact=parts.exact)
    view = DraftView(
        tokens=state.tokens,
        num_tokens=jnp.maximum(state.num_tokens, 1),
        sampling=s.for_draft(state.sampling),
        keys=keys,
        gamma=gamma,
        context=context,
        target=target,
        may_lag=parts.controller is not None,
    )
    proposal, draft_state = drafter.propose(params["draft"], state.draft, view, parts.gamma, parts.rule.greedy)
    asked = gamma > 0
    finite = proposal.finite | ~asked
    cache = state.cache if proposal.begun is None else proposal.begun.cache
    state = replace(
        state,
        draft=draft_state,
        draft_on=state.draft_on & finite,
        status=state.status | jnp.where(finite, 0, int(Status.DRAFT_NOT_FINITE)),
        cache=cache,
    )
    num_drafted = jnp.where(finite, jnp.minimum(proposal.num_drafted, gamma), 0)
    return state, replace(proposal, num_drafted=num_drafted, finite=finite)


@flax.struct.dataclass
class _Begun:
    """A round after drafting: what verification needs besides the state."""

    proposal: Proposal
    keys: RoundKeys
    context: Context | None


def _verify_at(
    params: dict[str, Params], state: RoundState, begun: _Begun, parts: Parts, index: jax.Array
) -> tuple[RoundState, jax.Array, jax.Array]:
    """Verify at one of the widths; return the new state, the accepted drafts and the committed tokens, [B] each.

    One loop of at most one trip for each width: a ``lax.switch`` copies every cache it touches in every round (on CPU
    with jax < 0.11), a loop does not.
    """
    zeros = jnp.zeros_like(begun.proposal.num_drafted)
    carry = (state, zeros, zeros)
    for i, width in enumerate(parts.widths):

        def once(pending, width=width):
            new, info = _verify(params, pending[1][0], begun, parts, width)
            return jnp.bool_(False), (new, info.verdict.num_accepted, info.num_emitted)

        carry = lax.while_loop(lambda pending: pending[0], once, (index == i, carry))[1]
    return carry


def _verify(
    params: dict[str, Params], state: RoundState, begun: _Begun, parts: Parts, width: int
) -> tuple[RoundState, RoundInfo]:
    """Score the drafts that fit into ``width`` rows, judge them, commit, roll back."""
    gamma = min(parts.gamma, width - 1)
    running = state.finish == Finish.RUNNING
    proposal = begun.proposal
    probs = None if proposal.probs is None else proposal.probs[:, :gamma]
    proposal = replace(proposal, tokens=proposal.tokens[:, :gamma], probs=probs)
    keys = replace(begun.keys, place=begun.keys.place[:, : gamma + 1])
    block = _block(state, proposal, width)
    out = _score(params, state, proposal, block, parts)
    assert out.logits is not None
    all_logits = out.logits[..., : parts.vocab_size]
    raw = all_logits[:, : gamma + 1]
    logits, states = transforms.shape_block(raw, state.sampling, begun.context, proposal.tokens)
    verdict = parts.rule.verify(logits, proposal, state.sampling, keys)
    emitted, num_emitted, finish, status = _cut(state, proposal, verdict, raw, logits, running)
    new = _commit(state, proposal, verdict, emitted, num_emitted)
    new = _record_logprobs(new, all_logits, logits, emitted, at=state.num_tokens)
    new = replace(
        new,
        history=transforms.commit(state.history, states, emitted, num_emitted),
        finish=finish,
        status=status,
        round=state.round + running,
        cache=kv.rollback(out.cache, jnp.where(running, new.num_tokens - 1, state.cache.length)),
        draft=_drafts_state(params, state, new.num_tokens, block, out, parts),
    )
    if parts.check:
        new = replace(new, status=new.status | round_check.forbidden(new, logits, emitted, num_emitted))
    return new, RoundInfo(proposal, logits, verdict, emitted, num_emitted)


def _block(state: RoundState, proposal: Proposal, width: int) -> Int[Array, "B W"]:
    """Return what the target runs over: the last token, the drafts, and padding."""
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_tokens - 1, 0)[:, None], axis=1)
    block = jnp.concatenate([last, proposal.tokens], axis=1)
    return jnp.pad(block, ((0, 0), (0, width - block.shape[1])))


def _score(
    params: dict[str, Params], state: RoundState, proposal: Proposal, block: Int[Array, "B W"], parts: Parts
) -> ModelOutput:
    """Run the target over a block, or the part of it that drafting has left."""
    begun, target = proposal.begun, params["target"]
    if begun is not None:
        rest, hidden = (begun.layers, len(state.cache.k)), begun.hidden[:, : block.shape[1]]
        return parts.target_fn(target, block, state.cache, logits="all", layers=rest, hidden=hidden)
    if parts.drafter.observe is not None:
        return parts.target_fn(target, block, state.cache, logits="all", features=True)
    return parts.target_fn(target, block, state.cache, logits="all")


def _drafts_state(
    params: dict[str, Params], old: RoundState, num_tokens: jax.Array, block: jax.Array, out: ModelOutput, parts: Parts
) -> Any:
    """Return the draft source's state after a round: what it observes of the block, and nothing past ``num_tokens``."""
    draft, num_tokens = old.draft, jnp.maximum(num_tokens, 1)
    if parts.drafter.observe is not None:
        assert out.features is not None
        seen = Observed(block, out.features, old.cache.length, num_tokens)
        draft = parts.drafter.observe(params["draft"], draft, seen)
    return parts.drafter.rollback(draft, num_tokens)


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
        logprobs=_append(state.logprobs, vocabulary.take(raw, emitted) - norm[..., 0], at),
        sampled_logprobs=_append(state.sampled_logprobs, vocabulary.take(sampled, emitted), at),
    )
    if state.top_ids is None or state.top_logprobs is None:
        return state
    values, ids = vocabulary.largest(raw.reshape(-1, raw.shape[-1]), state.top_ids.shape[-1])
    values, ids = (x.reshape(*emitted.shape, -1) for x in (values, ids))
    return replace(
        state, top_ids=_append(state.top_ids, ids, at), top_logprobs=_append(state.top_logprobs, values - norm, at)
    )


def _append(buffer: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    def write(b: jax.Array, n: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(b, n.astype(b.dtype), (i, *(0,) * (b.ndim - 1)))

    return jax.vmap(write)(buffer, new, at)
