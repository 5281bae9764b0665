"""The block rule (Sun et al. 2403.10444, Algorithm 2): judge the drafts together; never fewer expected tokens.

With pi_0 = 1 and pi_i = min(1, pi_{i-1} p_i(d_i) / q_i(d_i)), draft i is a candidate end with probability
h_i = S_i / (S_i + 1 - pi_i), S_i = sum_x (pi_i p_{i+1}(x) - q_{i+1}(x))_+ (h_n = pi_n at the row's last draft n). The
block ends at the largest i whose own uniform is below h_i; the token after it is drawn from
(pi_i p_{i+1} - q_{i+1})_+ normalised, or from p_{n+1} when all are kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import sampling as s
from specjax.numerics import row_sum
from specjax.types import Proposal, Purpose, RoundKeys, RowSampling, Rule, Verdict
from specjax.verify.rejection import extra_token
from specjax.vocabulary import take


def verify(logits: Float[Array, "B K1 V"], proposal: Proposal, sampling: RowSampling, keys: RoundKeys) -> Verdict:
    """Decide one block; see ``specjax.types.Rule``."""
    target = s.distribution(logits, sampling)
    batch, gamma = proposal.tokens.shape
    if gamma == 0:
        none = jnp.zeros((batch,), jnp.int32)
        return Verdict(none, extra_token(target, proposal, none, keys))
    pi = prefix_weights(target.probs, proposal)
    end = end_probability(target.probs, proposal, pi)
    u = s.uniforms(s.purpose_key(keys.round, Purpose.ACCEPT), gamma)
    places = jnp.arange(1, gamma + 1)
    candidates = (u < end) & (places <= proposal.num_drafted[:, None])
    num_accepted = jnp.max(jnp.where(candidates, places, 0), axis=1).astype(jnp.int32)
    return Verdict(num_accepted, extra_token(target, proposal, num_accepted, keys, scale_at(pi, num_accepted)))


def scale_at(pi: Float[Array, "B K"], num_accepted: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return pi_i of each row's last kept draft i, 1 where none is: the factor of p in the residual."""
    return jnp.take_along_axis(jnp.pad(pi, ((0, 0), (1, 0)), constant_values=1.0), num_accepted[:, None], axis=1)[:, 0]


def prefix_weights(p: Float[Array, "B K1 V"], proposal: Proposal) -> Float[Array, "B K"]:
    """Return pi_1..pi_K; a factor that is 0 stays 0."""
    p_drafted = take(p[:, :-1], proposal.tokens)
    ratio = p_drafted
    if proposal.probs is not None:
        q_drafted = take(proposal.probs, proposal.tokens)
        ratio = jnp.where(q_drafted > 0, p_drafted / jnp.where(q_drafted > 0, q_drafted, 1.0), 0.0)

    def step(pi: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        pi = jnp.minimum(1.0, pi * r)
        return pi, pi

    return jax.lax.scan(step, jnp.ones(p.shape[:1], jnp.float32), ratio.T)[1].T


def end_probability(p: Float[Array, "B K1 V"], proposal: Proposal, pi: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """Return h_1..h_K, the last draft being each row's own."""
    gamma = pi.shape[1]
    if proposal.probs is None:
        # q is one-hot at the next draft: what is left there is nothing.
        p_next = take(p[:, 1:gamma], proposal.tokens[:, 1:])
        left = pi[:, :-1] * (1.0 - p_next)
    else:
        left = row_sum(jnp.maximum(pi[:, :-1, None] * p[:, 1:gamma] - proposal.probs[:, 1:], 0.0))[..., 0]
    left = jnp.pad(left, ((0, 0), (0, 1)))
    below = left + 1.0 - pi
    inner = jnp.where(below > 0, left / jnp.where(below > 0, below, 1.0), 1.0)
    places = jnp.arange(1, gamma + 1)
    return jnp.where(places == proposal.num_drafted[:, None], pi, inner)


RULE = Rule(name="block", verify=verify)
