"""Faults of a head's state change no law: they are seen where a head that is the target must always be accepted."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import toys
from test_draft_head import WHOLE, drafter, run


def observing(change):
    """Return a head that attends, with its ``observe`` changed: ``change(observe, params, state, seen) -> state``."""
    right = drafter(True)
    return right._replace(observe=lambda params, state, seen: change(right.observe, params, state, seen))


def forgets_the_true_features(observe, params, state, seen):
    """What drafting wrote is taken for true: only the length moves."""
    new = observe(params, state, seen)
    return new.replace(features=jnp.where(seen.tokens.shape[1] > 5, new.features, state.features))


def keeps_a_stale_feature_after_a_rejection(observe, params, state, seen):
    """The feature of the block's last row, not of the last accepted one."""
    last = jnp.broadcast_to(seen.features[:, -1:], seen.features.shape)
    return observe(params, state, seen.replace(features=last if seen.tokens.shape[1] == 5 else seen.features))


def leaves_an_entry_out_after_full_acceptance(observe, params, state, seen):
    """The block's last draft gets no entry: only K of K + 1 rows are looked at."""
    if seen.tokens.shape[1] > 5:
        return observe(params, state, seen)
    cut = seen.replace(tokens=seen.tokens[:, :-1], features=seen.features[:, :-1])
    new = observe(params, state, cut)
    return new.replace(cache=new.cache.replace(length=seen.num_tokens - 1))


def test_unchanged_it_is_always_accepted():
    assert toys.always_accepted(run(observing(lambda observe, *given: observe(*given)), WHOLE), 4, 60)


@pytest.mark.parametrize(
    "fault",
    [
        forgets_the_true_features,
        keeps_a_stale_feature_after_a_rejection,
        leaves_an_entry_out_after_full_acceptance,
    ],
)
def test_a_fault_is_seen(fault):
    found = run(observing(fault), WHOLE, check=False, round_limit=100)
    assert not toys.always_accepted(found, 4, 60)
