"""The rejection rule (Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318, Algorithm 2).

Accept draft i with probability min(1, p_i / q_i). At the first rejection draw from (p - q)_+ normalised; after
a wholly accepted block draw the bonus from the next p. A row at temperature 0 has one-hot p, which makes the same
rule greedy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import sampling as s
from specjax.types import Proposal, Purpose, RoundKeys, RowSampling, Rule, Verdict
from specjax.verify.greedy import leading
from specjax.vocabulary import take


def verify(logits: Float[Array, "B K1 V"], proposal: Proposal, sampling: RowSampling, keys: RoundKeys) -> Verdict:
    """Decide one block; see ``specjax.types.Rule``."""
    target = s.distribution(logits, sampling)
    gamma = proposal.tokens.shape[1]
    p_drafted = take(target.probs[:, :gamma], proposal.tokens)
    q_drafted = jnp.ones_like(p_drafted)
    if proposal.probs is not None:
        q_drafted = take(proposal.probs, proposal.tokens)
    u = s.uniforms(s.purpose_key(keys.round, Purpose.ACCEPT), gamma)
    num_accepted = leading(u * q_drafted < p_drafted, proposal.num_drafted)
    return Verdict(num_accepted, extra_token(target, proposal, num_accepted, keys))


def extra_token(
    target: s.Distribution,
    proposal: Proposal,
    num_accepted: Int[Array, " B"],
    keys: RoundKeys,
    scale: Float[Array, " B"] | None = None,
) -> Int[Array, " B"]:
    """Draw the token that follows the accepted ones: from (scale * p - q)_+, or p after a wholly accepted block.

    Args:
        target: p, [B, K+1, V].
        proposal: the drafts and their q.
        num_accepted: [B].
        keys: this round's.
        scale: [B] factor of p in the residual (the block rule's); 1 when None.
    """
    log_weights, purpose = extra_weights(target, proposal, num_accepted, scale)
    return s.draw(log_weights, s.fold(keys.round, purpose), few=target.few)


def extra_weights(
    target: s.Distribution,
    proposal: Proposal,
    num_accepted: Int[Array, " B"],
    scale: Float[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], Int[Array, " B"]]:
    """Return what ``extra_token`` draws from, as log weights, and the purpose of that draw."""
    rejected = num_accepted < proposal.num_drafted
    here = num_accepted[:, None, None]
    p = jnp.take_along_axis(target.probs, here, axis=1)[:, 0]
    log_weights = jnp.take_along_axis(target.log_weights, here, axis=1)[:, 0]
    if proposal.tokens.shape[1]:
        scaled = p if scale is None else scale[:, None] * p
        left = _residual(scaled, log_weights, proposal, num_accepted)
        log_weights = jnp.where(rejected[:, None], left, log_weights)
    return log_weights, jnp.where(rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))


def _residual(p: jax.Array, log_weights: jax.Array, proposal: Proposal, place: jax.Array) -> jax.Array:
    """Return log (p - q)_+ [B, V] at the rejected place, p scaled or not; log p where rounding leaves nothing."""
    gamma, vocab = proposal.tokens.shape[1], p.shape[-1]
    place = jnp.minimum(place, gamma - 1)[:, None]
    if proposal.probs is None:
        # q is one-hot: the residual is p without the draft.
        drafted = jnp.take_along_axis(proposal.tokens, place, axis=1)
        left = jnp.where(jnp.arange(vocab) == drafted, -jnp.inf, log_weights)
    else:
        q = jnp.take_along_axis(proposal.probs, place[..., None], axis=1)[:, 0]
        left = jnp.log(jnp.maximum(p - q, 0.0))
    empty = jnp.all(jnp.isneginf(left), axis=-1, keepdims=True)
    return jnp.where(empty, log_weights, left)


RULE = Rule(name="rejection", verify=verify)
