"""What every verification rule promises, on blocks of random distributions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax.sampling import row_key
from specjax.types import Proposal, RowSampling
from specjax.verify import RULES

BATCH, GAMMA, VOCAB = 64, 4, 7


def block(rule, seed: int, *, deterministic: bool = False, zeros: bool = True):
    """Return random logits, a proposal, settings and keys; every third row is cold, some ids have no probability."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(BATCH, GAMMA + 1, VOCAB)).astype(np.float32) * 2
    if zeros:
        logits = np.where(rng.random(logits.shape) < 0.2, -np.inf, logits)
        logits[..., 0] = np.where(np.isneginf(logits).all(-1), 0.0, logits[..., 0])
    q = rng.dirichlet(np.full(VOCAB, 0.5), size=(BATCH, GAMMA)).astype(np.float32)
    tokens = np.asarray([[rng.choice(VOCAB, p=row / row.sum()) for row in rows] for rows in q.astype(np.float64)])
    temperature = np.zeros(BATCH) if rule.greedy else np.where(np.arange(BATCH) % 3 == 0, 0.0, 0.8)
    proposal = Proposal(
        tokens=jnp.asarray(tokens, jnp.int32),
        probs=None if deterministic or rule.greedy else jnp.asarray(q),
        num_drafted=jnp.asarray(rng.integers(0, GAMMA + 1, size=BATCH), jnp.int32),
        finite=jnp.ones(BATCH, jnp.bool_),
    )
    keys = toys.keys_of(jnp.asarray(np.stack([row_key(seed, i) for i in range(BATCH)])), GAMMA)
    return jnp.asarray(logits), proposal, RowSampling(jnp.asarray(temperature, jnp.float32)), keys


@functools.cache
def verify(rule):
    return jax.jit(rule.verify)


def part(tree: Proposal, rows) -> Proposal:
    return Proposal(
        tokens=tree.tokens[rows],
        probs=None if tree.probs is None else tree.probs[rows],
        num_drafted=tree.num_drafted[rows],
        finite=tree.finite[rows],
    )


@pytest.fixture(params=RULES.values(), ids=RULES)
def rule(request):
    return request.param


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_verdict_is_legal(rule, deterministic):
    """Counts lie in 0..num_drafted; no accepted or added token has probability zero (case 9)."""
    for seed in range(5):
        logits, proposal, sampling, keys = block(rule, seed, deterministic=deterministic)
        verdict = verify(rule)(logits, proposal, sampling, keys)
        accepted, token = np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)
        assert accepted.dtype == token.dtype == np.int32
        assert np.all((accepted >= 0) & (accepted <= np.asarray(proposal.num_drafted)))
        assert np.all((token >= 0) & (token < VOCAB))
        logits, tokens = np.asarray(logits), np.asarray(proposal.tokens)
        for i in range(BATCH):
            emitted = [*tokens[i, : accepted[i]], token[i]]
            assert all(np.isfinite(logits[i, place, t]) for place, t in enumerate(emitted))


def test_a_row_does_not_depend_on_its_mates(rule):
    logits, proposal, sampling, keys = block(rule, 0)
    whole = verify(rule)(logits, proposal, sampling, keys)
    order = np.random.default_rng(1).permutation(BATCH)[: BATCH // 2]
    some_keys = jax.tree.map(lambda leaf: leaf[order], keys)
    some = verify(rule)(logits[order], part(proposal, order), RowSampling(sampling.temperature[order]), some_keys)
    np.testing.assert_array_equal(some.num_accepted, whole.num_accepted[order])
    np.testing.assert_array_equal(some.next_token, whole.next_token[order])


def test_a_row_without_drafts_decides_as_plain_decoding_does(rule):
    """The draft switched off, and gamma = 0: the same token from the same key."""
    logits, proposal, sampling, keys = block(rule, 2)
    off = verify(rule)(logits, proposal.replace(num_drafted=jnp.zeros(BATCH, jnp.int32)), sampling, keys)
    empty = Proposal(
        tokens=proposal.tokens[:, :0],
        probs=None,
        num_drafted=jnp.zeros(BATCH, jnp.int32),
        finite=proposal.finite,
    )
    plain = verify(rule)(logits[:, :1], empty, sampling, keys.replace(place=keys.place[:, :1]))
    np.testing.assert_array_equal(off.num_accepted, 0)
    np.testing.assert_array_equal(off.next_token, plain.next_token)


def test_cold_rows_follow_the_argmax_and_take_the_lowest_id_on_ties(rule):
    """Cases 27 and 30; hot mates in the same batch."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.integers(0, 2, size=(BATCH, GAMMA + 1, VOCAB)), jnp.float32)  # ties everywhere
    _, proposal, sampling, keys = block(rule, 3)
    best = np.argmax(logits, axis=-1)
    tokens = np.where(rng.random((BATCH, GAMMA)) < 0.8, best[:, :GAMMA], 0)
    proposal = proposal.replace(
        tokens=jnp.asarray(tokens, jnp.int32),
        probs=None if proposal.probs is None else jnp.asarray(np.eye(VOCAB, dtype=np.float32)[tokens]),
    )
    verdict = verify(rule)(logits, proposal, sampling, keys)
    for i in np.flatnonzero(np.asarray(sampling.temperature) == 0):
        count = 0
        while count < proposal.num_drafted[i] and tokens[i, count] == best[i, count]:
            count += 1
        assert (int(verdict.num_accepted[i]), int(verdict.next_token[i])) == (count, best[i, count])


def test_padding_the_vocabulary_changes_no_decision(rule):
    """Invariant 7: noise is indexed by token id."""
    logits, proposal, sampling, keys = block(rule, 4)
    wide = jnp.pad(logits, ((0, 0), (0, 0), (0, 5)), constant_values=-jnp.inf)
    probs = None if proposal.probs is None else jnp.pad(proposal.probs, ((0, 0), (0, 0), (0, 5)))
    narrow = verify(rule)(logits, proposal, sampling, keys)
    padded = verify(rule)(wide, proposal.replace(probs=probs), sampling, keys)
    np.testing.assert_array_equal(narrow.num_accepted, padded.num_accepted)
    np.testing.assert_array_equal(narrow.next_token, padded.next_token)
