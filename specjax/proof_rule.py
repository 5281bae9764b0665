"""A verification rule on given p and q: does the first token of a block have the law p?"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling as s
from specjax.types import Proposal, Purpose, RoundKeys, RowSampling, Rule
from specjax.verify import rule_for

CELLS = 64  # tokens told apart: the likeliest ones, and all others together


def first_tokens(
    rule: str | Rule, pairs: list[tuple[np.ndarray, np.ndarray]], gamma: int, draws: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each (p, q) how often each token came first [C], and its probability [C].

    Args:
        rule: the rule.
        pairs: distributions [V]; drafts are drawn from q.
        gamma: drafts per block, all with the same q, and the same p at each place.
        draws: blocks for each pair.
        seed: of the draws.
    """
    lumped = [_lump(p, q) for p, q in pairs]
    run = _blocks(rule_for(rule), gamma, draws)
    key = jnp.asarray(s.row_key(seed, "rule"))
    found = []
    for i, (p, q) in enumerate(lumped):
        tokens = np.asarray(run(p.astype(np.float32), q.astype(np.float32), s.fold(key[None], i)[0]))
        found.append((np.bincount(tokens, minlength=len(p)).astype(np.float64), p))
    return found


def _lump(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p and q on their likeliest tokens, the others as one."""
    order = np.argsort(-(p + q), kind="stable")[: CELLS - 1]
    parts = [np.append(x[order], max(0.0, 1.0 - x[order].sum())) for x in (p, q)]
    return parts[0] / parts[0].sum(), parts[1] / parts[1].sum()


@functools.lru_cache(maxsize=8)
def _blocks(rule: Rule, gamma: int, draws: int):
    @jax.jit
    def run(p: jax.Array, q: jax.Array, key: jax.Array) -> jax.Array:
        """Return the first token [N] of each block."""
        keys = s.fold(jnp.broadcast_to(key, (draws, 2)), jnp.arange(draws, dtype=jnp.uint32))
        base = s.purpose_key(keys, Purpose.COUPLED if rule.coupled else Purpose.DRAFT)
        place = jnp.stack([s.fold(base, i) for i in range(gamma + 1)], axis=1)
        rows = jnp.broadcast_to(jnp.log(p), (draws, gamma + 1, p.shape[0]))
        drafts = s.draw(jnp.broadcast_to(jnp.log(q), (draws, gamma, q.shape[0])), place[:, :gamma])
        proposal = Proposal(
            tokens=drafts,
            probs=jnp.broadcast_to(q, (draws, gamma, q.shape[0])),
            num_drafted=jnp.full((draws,), gamma, jnp.int32),
            finite=jnp.ones((draws,), jnp.bool_),
        )
        verdict = rule.verify(rows, proposal, RowSampling(jnp.ones((draws,), jnp.float32)), RoundKeys(keys, place))
        return jnp.where(verdict.num_accepted > 0, drafts[:, 0], verdict.next_token)

    return run
