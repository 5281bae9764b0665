"""Divergences between a teacher p and a student q, per position.

All take logits over the same M columns, float32, and return [...] values. A trimmed student scores some tokens only:
then p is the teacher's own probabilities of those tokens, which sum to less than 1, and q is zero elsewhere.

    forward_kl   sum p log(p / q)
    reverse_kl   sum q log(q / p)
    jsd          beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q   (GKD, 2306.13649, equation 1);
                 at beta = 0 it stands for its limit KL(p || q), at beta = 1 for KL(q || p), as in trl
    tvd          1 - sum min(p, q)     the share of rejected drafts; half of sum |p - q| where both sum to 1
    lk           -log sum min(p, q)    the same, weighing hard positions less flatly
    lk_mix       weight KL(p || q) + (1 - weight) TVD      (2602.23881)
    cross_entropy  -log q(next token): no teacher
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

_SMALLEST = 1e-30


class Position(NamedTuple):
    """What a loss sees of each position.

    Attributes:
        log_p: [..., M] float32, the teacher's log-probabilities; None without a teacher.
        log_q: [..., M] float32, the student's.
        label: [...] int32, the column of the token that follows; -1 where the student does not score it.
    """

    log_p: jax.Array | None
    log_q: jax.Array
    label: jax.Array


Loss = Callable[[Position], jax.Array]


def forward_kl(at: Position) -> jax.Array:
    """Return KL(p || q)."""
    return _kl(at.log_p, at.log_q)


def reverse_kl(at: Position) -> jax.Array:
    """Return KL(q || p)."""
    return _kl(at.log_q, at.log_p)


def jsd(at: Position, beta: float) -> jax.Array:
    """Return the generalised Jensen-Shannon divergence; its limits at 0 and 1."""
    if beta == 0.0:
        return forward_kl(at)
    if beta == 1.0:
        return reverse_kl(at)
    assert at.log_p is not None
    log_m = jnp.logaddexp(at.log_p + jnp.log(beta), at.log_q + jnp.log1p(-beta))
    return beta * _kl(at.log_p, log_m) + (1.0 - beta) * _kl(at.log_q, log_m)


def tvd(at: Position) -> jax.Array:
    """Return the total variation distance: what of q a token rule rejects."""
    return 1.0 - overlap(at)


def lk(at: Position) -> jax.Array:
    """Return minus the logarithm of the acceptance."""
    return -jnp.log(jnp.maximum(overlap(at), _SMALLEST))


def lk_mix(at: Position, weight: float) -> jax.Array:
    """Return ``weight`` parts of KL(p || q) and the rest of TVD."""
    return weight * forward_kl(at) + (1.0 - weight) * tvd(at)


def cross_entropy(at: Position) -> jax.Array:
    """Return minus the log-probability of the token that follows."""
    picked = jnp.take_along_axis(at.log_q, jnp.maximum(at.label, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(at.label < 0, 0.0, picked)


def overlap(at: Position) -> jax.Array:
    """Return alpha = sum min(p, q), the chance that a draft is accepted at temperature 1."""
    assert at.log_p is not None
    return jnp.sum(jnp.exp(jnp.minimum(at.log_p, at.log_q)), axis=-1)


def _kl(log_a: jax.Array | None, log_b: jax.Array | None) -> jax.Array:
    assert log_a is not None
    assert log_b is not None
    a = jnp.exp(log_a)
    return jnp.sum(xlogy(a, a) - a * log_b, axis=-1)


LOSSES: dict[str, Callable[..., jax.Array]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "lk": lk,
    "lk_mix": lk_mix,
    "cross_entropy": cross_entropy,
}


def loss_for(name: str, *, beta: float = 0.5, weight: float = 0.5) -> Loss:
    """Return a loss by name with its number bound: ``beta`` of jsd, ``weight`` of lk_mix."""
    bound = {"jsd": {"beta": beta}, "lk_mix": {"weight": weight}}.get(name, {})
    return functools.partial(LOSSES[name], **bound)


def position(
    teacher: jax.Array | None, student: jax.Array, label: jax.Array, *, ids: jax.Array | None, temperature: float
) -> Position:
    """Turn logits into what a loss sees.

    Args:
        teacher: [..., V] float32 over the vocabulary in use, or None.
        student: [..., M].
        label: [...] int32, the token that follows.
        ids: [M] int32, the tokens that the student scores, ascending; None: all V.
        temperature: of the teacher.
    """
    log_p = None if teacher is None else jax.nn.log_softmax(teacher / temperature, axis=-1)
    if ids is not None:
        log_p = None if log_p is None else log_p[..., ids]
        place = jnp.clip(jnp.searchsorted(ids, label), 0, ids.shape[0] - 1)
        label = jnp.where(ids[place] == label, place, -1)
    return Position(log_p, jax.nn.log_softmax(student, axis=-1), label)
