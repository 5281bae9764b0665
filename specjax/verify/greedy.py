"""The greedy rule: accept while the draft is the target's argmax (the lowest id on ties)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import vocabulary
from specjax.types import Proposal, RoundKeys, RowSampling, Rule, Verdict


def verify(logits: Float[Array, "B K1 V"], proposal: Proposal, sampling: RowSampling, keys: RoundKeys) -> Verdict:
    """Decide one block; see ``specjax.types.Rule``. Serves rows at temperature 0 only."""
    del sampling, keys
    best = vocabulary.argmax(logits)
    num_accepted = leading(proposal.tokens == best[:, :-1], proposal.num_drafted)
    return Verdict(num_accepted, jnp.take_along_axis(best, num_accepted[:, None], axis=1)[:, 0])


def leading(hits: jax.Array, num_drafted: jax.Array) -> jax.Array:
    """Count the leading True of hits [B, K] among each row's first ``num_drafted`` places: [B] int32."""
    counted = hits & (jnp.arange(hits.shape[1]) < num_drafted[:, None])
    return jnp.sum(jnp.cumprod(counted.astype(jnp.int32), axis=1), axis=1)


RULE = Rule(name="greedy", verify=verify, greedy=True)
