"""Gamma that chooses itself: each round's draft length from acceptance so far and from measured costs.

Inside the loop, without the host. Per row it keeps a decayed count of drafts judged and of drafts accepted, which,
shrunk towards a prior, estimate the chance alpha that the next draft is accepted. With the costs of the round, in plain
steps, the batch drafts the d that maximises

    sum over rows of E[N(d)] / cost(d),   E[N(d)] = 1 + alpha + ... + alpha^d   (Leviathan et al. 2211.17192)

A row also keeps an account: what it gained or lost against plain decoding so far. A d that could overdraw it, were all
drafts rejected, is not taken, so that whatever the draft, no row falls further behind plain decoding than ALLOWANCE
steps and RATE of its tokens (by the costs given, on average over the batch). d = 0 is plain decoding; there the counts
fade, the estimate drifts back to the prior, and what the account allows is spent on trying again.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.types import Controller, ControlView, Outcome

PRIOR = 0.6  # alpha of a row that has shown nothing yet
PRIOR_WEIGHT = 2.0  # how many judged drafts it counts for
MEMORY = 0.93  # what a count keeps for each draft judged after it
FADING = 0.97  # and for each plain round
ALLOWANCE = 1.0  # plain steps that a row may lose
RATE = 0.01  # and plain steps per token
SAVINGS = 1.0  # the most of earlier gains that may be lost again
PAYBACK = 8.0  # rounds over which catching up is to pay


@flax.struct.dataclass
class Costs:
    """What a round costs at this batch size: ``params["costs"]``, of any one unit.

    Attributes:
        draft: [K + 1] float32, of 0..K draft steps.
        verify: [N] float32, of the rest of the round at each of the program's N widths.
        catch_up: [] float32, of one entry that the draft's cache lacks.
        force: [] int32, the d of every round; -1 to choose. For measuring.
    """

    draft: Float[Array, " K1"]
    verify: Float[Array, " N"]
    catch_up: Float[Array, ""]
    force: Int[Array, ""]


@flax.struct.dataclass
class Record:
    """A row's history.

    Attributes:
        accepted, judged: [B] float32, decayed counts of drafts.
        account: [B] float32, plain steps gained, less those lost.
    """

    accepted: Float[Array, " B"]
    judged: Float[Array, " B"]
    account: Float[Array, " B"]


@functools.cache
def auto_controller(gamma: int, widths: tuple[int, ...]) -> Controller:
    """Return the controller of a program with these static choices; its ``params["costs"]`` are ``Costs``.

    Args:
        gamma: K, the most it chooses.
        widths: the program's.
    """
    width_of = np.searchsorted(widths, np.arange(gamma + 1) + 1)

    def choose(record: Record, view: ControlView) -> jax.Array:
        costs: Costs = view.costs
        plain = costs.draft[0] + costs.verify[0]
        cost = (costs.draft + costs.verify[width_of]) / plain
        room = jnp.minimum(view.allowed, jnp.maximum(view.room - 1, 0))
        drafts = jnp.arange(gamma + 1)
        behind = jnp.where(drafts > 0, costs.catch_up / plain * _lag(view), 0.0)
        worth = _mean(expected_tokens(alpha(record), room, gamma), view.running) / (cost + behind / PAYBACK)
        account = _mean(record.account + ALLOWANCE + RATE * view.num_new, view.running)
        affordable = (drafts == 0) | (cost + behind - cost[0] <= account)
        best = jnp.argmax(jnp.where(affordable, worth, -jnp.inf)).astype(jnp.int32)
        return jnp.where(costs.force >= 0, costs.force, jnp.minimum(best, room))

    def update(record: Record, view: ControlView, outcome: Outcome) -> Record:
        costs: Costs = view.costs
        plain = costs.draft[0] + costs.verify[0]
        cost = costs.draft[outcome.steps] + costs.verify[outcome.width_index]
        cost = cost + jnp.where(outcome.steps > 0, costs.catch_up * _lag(view), 0.0)
        judged = outcome.num_accepted + (outcome.num_accepted < outcome.num_drafted)
        keep = jnp.where(outcome.gamma > 0, MEMORY**judged, FADING)
        account = jnp.minimum(record.account + outcome.num_emitted - cost / plain, SAVINGS)
        new = Record(record.accepted * keep + outcome.num_accepted, record.judged * keep + judged, account)
        return jax.tree.map(lambda after, before: jnp.where(view.running, after, before), new, record)

    return Controller(init=_init, choose=choose, update=update)


def alpha(record: Record) -> Float[Array, " B"]:
    """Return each row's estimate of the chance that a draft is accepted, given that it is reached."""
    return (record.accepted + PRIOR * PRIOR_WEIGHT) / (record.judged + PRIOR_WEIGHT)


def expected_tokens(alpha: Float[Array, " B"], room: Int[Array, " B"], gamma: int) -> Float[Array, "B K1"]:
    """Return E[N(d)] for d = 0..gamma in each row, of which at most ``room`` drafts count."""
    places = jnp.arange(gamma + 1)
    reached = alpha[:, None] ** places
    return jnp.cumsum(jnp.where(places <= room[:, None], reached, 0.0), axis=1)


def _lag(view: ControlView) -> jax.Array:
    """Return how many entries the draft's caches lack, in the row that lacks most: all rows wait for it."""
    return jnp.max(jnp.where(view.allowed > 0, view.lag, 0))


def _mean(values: jax.Array, running: jax.Array) -> jax.Array:
    """Return the mean over running rows."""
    weights = running.astype(jnp.float32) / jnp.maximum(jnp.sum(running), 1)
    return jnp.tensordot(weights, values, axes=1)


def _init(batch: int) -> Record:
    return Record(*(jnp.zeros((batch,), jnp.float32) for _ in range(3)))
