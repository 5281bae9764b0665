"""The coupled rule: common random numbers by Gumbel-max (drafter-invariant; Daliri et al. 2408.07978).

The noise of a token is a function of (seed, row, sample, absolute position, token id) alone. The draft takes
argmax(log q + g), the target argmax(log p + g), and the target's token is always the one emitted; the block goes on
while the two agree. So the text is that of plain decoding with the same noise, whatever the draft, gamma or batch.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import sampling as s
from specjax.types import Proposal, RoundKeys, RowSampling, Rule, Verdict
from specjax.verify.greedy import leading


def verify(logits: Float[Array, "B K1 V"], proposal: Proposal, sampling: RowSampling, keys: RoundKeys) -> Verdict:
    """Decide one block; see ``specjax.types.Rule``."""
    target = s.distribution(logits, sampling)
    drawn = s.draw(target.log_weights, keys.place, few=target.few)
    num_accepted = leading(proposal.tokens == drawn[:, :-1], proposal.num_drafted)
    return Verdict(num_accepted, jnp.take_along_axis(drawn, num_accepted[:, None], axis=1)[:, 0])


RULE = Rule(name="coupled", verify=verify, coupled=True)
