"""What every draft source promises."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_laws
import toys
from kinds import SOURCES, VARIANTS, make_source

from specjax.prefill import observed
from specjax.sampling import row_key
from specjax.types import DraftView, RowSampling, TargetView
from specjax.verify import RULES

VOCAB, GAMMA, CAPACITY = 6, 4, 128
TABLE = toys.table(VOCAB, seed=2, sharpness=1.5)
PROMPTS = [[1], [2, 3, 2, 3, 2], [0, 5, 4, 0, 5, 4, 0], [3, 1]]


@pytest.fixture(params=[pytest.param(s, marks=[pytest.mark.slow] if s in VARIANTS else []) for s in SOURCES])
def source(request):
    return make_source(request.param, TABLE)


def view_of(prompts, temperature: float = 1.0, names=range(99)) -> DraftView:
    tokens = np.full((len(prompts), CAPACITY), 5, np.int32)  # what lies past a row's tokens must not matter
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return DraftView(
        tokens=jnp.asarray(tokens),
        num_tokens=jnp.asarray([len(p) for p in prompts], jnp.int32),
        sampling=RowSampling(jnp.full(len(prompts), temperature, jnp.float32)),
        keys=toys.keys_of(jnp.asarray(np.stack([row_key(0, names[i]) for i in range(len(prompts))])), GAMMA),
        gamma=jnp.full(len(prompts), GAMMA, jnp.int32),
    )


def propose(source, view: DraftView, greedy: bool):
    drafter = source[0]
    prompts = view.tokens[:, :32]
    target_fn, params = toys.world(drafter, TABLE, source[1])
    state = drafter.init(params["draft"], prompts, view.num_tokens, CAPACITY)
    observe = None if drafter.observe is None else functools.partial(drafter.observe, params["draft"])
    cache, state = observed(
        target_fn, params["target"], prompts, view.num_tokens, CAPACITY, observe=observe, seen=state
    )
    if drafter.on_target:
        view = view.replace(target=TargetView(params["target"], cache, width=GAMMA + 1, exact=False))
    return jax.jit(drafter.propose, static_argnums=(3, 4))(params["draft"], state, view, GAMMA, greedy)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_proposal_is_well_formed(source, greedy):
    batch = len(PROMPTS)
    proposal, state = propose(source, view_of(PROMPTS, 0.0 if greedy else 1.0), greedy)
    assert proposal.tokens.shape == (batch, GAMMA)
    assert proposal.tokens.dtype == jnp.int32
    assert proposal.num_drafted.shape == proposal.finite.shape == (batch,)
    assert np.all((proposal.tokens >= 0) & (proposal.tokens < VOCAB))
    assert np.all((proposal.num_drafted >= 0) & (proposal.num_drafted <= GAMMA))
    assert np.all(proposal.finite)
    assert all(leaf.shape[0] == batch for leaf in jax.tree.leaves(state))
    if greedy:
        assert proposal.probs is None
    if proposal.probs is not None:
        assert proposal.probs.shape == (batch, GAMMA, VOCAB)
        assert proposal.probs.dtype == jnp.float32
        counted = np.arange(GAMMA) < np.asarray(proposal.num_drafted)[:, None]
        np.testing.assert_allclose(np.asarray(proposal.probs.sum(-1))[counted], 1.0, atol=1e-5)
        drawn = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=-1)
        assert np.all(np.asarray(drawn)[counted] > 0)


def test_a_row_does_not_depend_on_its_mates(source):
    whole, _ = propose(source, view_of(PROMPTS), False)
    for i, prompt in enumerate(PROMPTS):
        alone, _ = propose(source, view_of([prompt], names=[i]), False)
        np.testing.assert_array_equal(alone.tokens[0], whole.tokens[i])
        assert alone.num_drafted[0] == whole.num_drafted[i]


def test_what_lies_past_the_newest_token_does_not_matter(source):
    view = view_of(PROMPTS)
    valid = jnp.arange(CAPACITY) < view.num_tokens[:, None]
    a, _ = propose(source, view, False)
    b, _ = propose(source, view.replace(tokens=jnp.where(valid, view.tokens, 1)), False)
    np.testing.assert_array_equal(a.num_drafted, b.num_drafted)
    counted = np.arange(GAMMA) < np.asarray(a.num_drafted)[:, None]
    np.testing.assert_array_equal(np.where(counted, a.tokens, 0), np.where(counted, b.tokens, 0))


def test_no_row_drafts_more_than_it_may(source):
    """A row's own gamma, 0 included; the other rows draft what they would."""
    view = view_of(PROMPTS)
    whole, _ = propose(source, view, False)
    gamma = jnp.asarray([2, 0, GAMMA, 1], jnp.int32)
    some, _ = propose(source, view.replace(gamma=gamma), False)
    np.testing.assert_array_equal(some.num_drafted, np.minimum(whole.num_drafted, gamma))
    counted = np.arange(GAMMA) < np.asarray(some.num_drafted)[:, None]
    np.testing.assert_array_equal(np.where(counted, some.tokens, 0), np.where(counted, whole.tokens, 0))
    none, _ = propose(source, view.replace(gamma=jnp.zeros_like(gamma)), False)
    assert not np.any(none.num_drafted)


@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_output_is_that_of_plain_decoding(source, gamma):
    drafter = source[0]
    target_fn, params = toys.world(drafter, TABLE, source[1])
    run = toys.run_batch(
        target_fn,
        drafter,
        params,
        PROMPTS,
        rule=RULES["greedy"],
        gamma=gamma,
        max_new=[30, 17, 1, 2],
        vocab=VOCAB,
        temperature=0.0,
    )
    for prompt, count, output in zip(PROMPTS, [30, 17, 1, 2], run.outputs, strict=True):
        assert output == toy_laws.greedy_chain(TABLE, prompt, count)
