"""min-p, top-k and top-p without a sort: each keeps what reaches a threshold, so ties are kept together.

The sets are functions of the probabilities alone. top-k keeps every token at least as probable as the k-th; top-p,
over what min-p and top-k left, keeps the most probable tokens until their mass reaches p, the token that crosses and
all that are tied with it. Thresholds come from the 64 largest of each row, found block by block; where those do not
decide (a larger k, a flat distribution) an exact bisection does. Masses are integers, multiples of 2**-30, so that no
order of addition matters and both ways find the same set; a mass counts as reached within 2**-22, so that .5 + .3
reaches .8 whatever the last bits say.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.numerics import row_sum
from specjax.types import Truncation
from specjax.vocabulary import largest

CANDIDATES = 64  # a row's largest values that are looked at first
_ONE = 1 << 30  # the whole mass
_SLACK = 1 << 8
_TINY = 1e-30
_NEGLIGIBLE = 22.0  # a token e**22 times less probable than the first has no mass in multiples of 2**-30


def truncate(log_weights: Float[Array, "B T V"], truncation: Truncation) -> Float[Array, "B T V"]:
    """Return the weights with -inf for what min-p, top-k and top-p, in this order, leave out.

    Args:
        log_weights: log probabilities up to a constant; the largest of each position is 0.
        truncation: settings of each row.
    """
    batch, places, vocab = log_weights.shape
    rows = log_weights.reshape(-1, vocab)
    min_p, top_k, top_p = (jnp.repeat(x, places) for x in (truncation.min_p, truncation.top_k, truncation.top_p))
    top, _ = largest(rows, min(CANDIDATES, vocab))
    floor = jnp.maximum(jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf), _top_k(rows, top, top_k))
    least = jnp.maximum(floor, _top_p(rows, top, floor, top_p))
    return jnp.where(rows >= least[:, None], rows, -jnp.inf).reshape(batch, places, vocab)


def _top_k(rows: Float[Array, "R V"], top: Float[Array, "R C"], k: Int[Array, " R"]) -> Float[Array, " R"]:
    """Return each row's k-th largest value; -inf where k is off or as large as the vocabulary."""
    vocab, seen = rows.shape[-1], top.shape[-1]
    off = (k <= 0) | (k >= vocab)
    inside = jnp.take_along_axis(top, jnp.clip(k - 1, 0, seen - 1)[:, None], axis=1)[:, 0]
    beyond = ~off & (k > seen)

    def search() -> jax.Array:
        found = _reach(rows, None, jnp.maximum(k, 1), top[:, -1], jnp.full(k.shape, jnp.inf), beyond)
        return jnp.where(beyond, found, inside)

    found = inside if vocab == seen else lax.cond(jnp.any(beyond), search, lambda: inside)
    return jnp.where(off, -jnp.inf, found)


def _top_p(
    rows: Float[Array, "R V"], top: Float[Array, "R C"], floor: Float[Array, " R"], p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """Return the threshold of top-p over the values that reach ``floor``; -inf where it is off or never reached."""
    off = p >= 1
    total = row_sum(jnp.where(rows >= floor[:, None], jnp.exp(rows), 0.0))

    def masses(values: jax.Array) -> jax.Array:
        share = jnp.where(values >= floor[:, None], jnp.exp(values), 0.0) / jnp.maximum(total, _TINY)
        return jnp.round(share * _ONE).astype(jnp.int32)

    need = jnp.maximum(jnp.floor(jnp.minimum(p, 1.0) * _ONE).astype(jnp.int32) - _SLACK, 1)
    reached = jnp.cumsum(masses(top), axis=-1) >= need[:, None]
    inside = jnp.take_along_axis(top, jnp.argmax(reached, axis=-1)[:, None], axis=1)[:, 0]
    beyond = ~off & ~reached[:, -1]

    def search() -> jax.Array:
        found = _reach(rows, masses(rows), need, top[:, -1], jnp.full(p.shape, _NEGLIGIBLE), beyond)
        return jnp.where(beyond, found, inside)

    if rows.shape[-1] == top.shape[-1]:
        found = jnp.where(beyond, -jnp.inf, inside)
    else:
        found = lax.cond(jnp.any(beyond), search, lambda: inside)
    return jnp.where(off, -jnp.inf, found)


def _reach(
    rows: Float[Array, "R V"],
    weights: Int[Array, "R V"] | None,
    need: Int[Array, " R"],
    most: Float[Array, " R"],
    deepest: Float[Array, " R"],
    wanted: Bool[Array, " R"],
) -> Float[Array, " R"]:
    """Return the largest t such that the weights (or the number) of the values >= t reach ``need``; -inf if none.

    A bisection on the bits of -value, which order like the numbers they stand for.

    Args:
        rows: values, none above 0.
        weights: of each value, or None to count them.
        need: what is to be reached.
        most: t is known to be no larger.
        deepest: -t is known to be no larger.
        wanted: rows whose answer is used; the others cost no step.
    """
    keys = lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)

    def reached(key: jax.Array) -> jax.Array:
        inside = keys <= key[:, None]
        return jnp.sum(inside if weights is None else jnp.where(inside, weights, 0), axis=-1, dtype=jnp.int32) >= need

    high = lax.bitcast_convert_type(deepest, jnp.int32)
    possible = reached(high)
    low = jnp.where(wanted & possible, lax.bitcast_convert_type(jnp.abs(most), jnp.int32), high)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = reached(middle)
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(enough, middle, high)

    _, key = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
    return jnp.where(possible, -lax.bitcast_convert_type(key, jnp.float32), -jnp.inf)
