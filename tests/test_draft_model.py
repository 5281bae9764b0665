"""The model draft: its cache keeps up with every kind of round, and q is the law it draws from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_laws
import toys
from scipy.special import chdtrc

from specjax.draft import model_drafter
from specjax.sampling import row_key
from specjax.types import DraftView, RowSampling
from specjax.verify import RULES

VOCAB = 8
TABLE = toys.table(VOCAB, seed=4, sharpness=2.0)
PROMPTS = [[1], [2, 3], [7, 0, 5, 5, 1, 6, 2], [4, 4, 4]]


def view_of(prompts, temperature: float, gamma: int, names=None) -> DraftView:
    tokens = np.zeros((len(prompts), 128), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    keys = np.stack([row_key(0, i) for i in names or range(len(prompts))])
    return DraftView(
        tokens=jnp.asarray(tokens),
        num_tokens=jnp.asarray([len(p) for p in prompts], jnp.int32),
        sampling=RowSampling(jnp.full(len(prompts), temperature, jnp.float32)),
        keys=toys.keys_of(jnp.asarray(keys), gamma),
        gamma=jnp.full(len(prompts), gamma, jnp.int32),
    )


def propose(table, prompts, *, vocab: int = VOCAB, temperature: float = 1.0, gamma: int = 3, greedy: bool = False):
    drafter = model_drafter(toys.MarkovFn(len(table)), vocab)
    view = view_of(prompts, temperature, gamma)
    state = drafter.init(table, view.tokens[:, :32], view.num_tokens, 128)
    return jax.jit(drafter.propose, static_argnums=(3, 4))(table, state, view, gamma, greedy)


@pytest.mark.parametrize("gamma", [1, 4, 8, *(pytest.param(g, marks=pytest.mark.slow) for g in (2, 3, 5, 6, 7))])
def test_a_draft_that_is_the_target_is_always_accepted(gamma):
    """Case 3 on the toy, where p = q to the bit, so for sampled rows too. A draft cache without the entry that a
    fully accepted round leaves out would draft from a wrong context."""
    run = toys.run_batch(
        toys.MarkovFn(VOCAB),
        model_drafter(toys.MarkovFn(VOCAB), VOCAB),
        {"target": TABLE, "draft": TABLE},
        PROMPTS * 2,
        rule=RULES["rejection"],
        gamma=gamma,
        max_new=60,
        vocab=VOCAB,
        temperature=[0.0] * 4 + [1.0] * 4,
    )
    assert toys.always_accepted(run, gamma, 60)


def test_q_is_the_drafts_law_after_the_tokens_drafted():
    proposal, cache = propose(TABLE, PROMPTS, temperature=0.7)
    for row, prompt in enumerate(PROMPTS):
        drafted = tuple(proposal.tokens[row].tolist())
        for i in range(3):
            law = toy_laws.next_probs(TABLE, (*prompt, *drafted[:i]), 0.7)
            np.testing.assert_allclose(proposal.probs[row, i], law, rtol=1e-5)
    assert proposal.num_drafted.tolist() == [3] * 4
    assert cache.length.tolist() == [len(p) + 2 for p in PROMPTS]


def test_drafts_are_drawn_from_q():
    """n = 4,096 first drafts after one context, 8 cells: chi-square with 7 degrees, false alarm 1e-5."""
    n = 4096
    proposal, _ = propose(TABLE, [[2, 3]] * n, gamma=2)
    law = toy_laws.next_probs(TABLE, (2, 3), 1.0)
    seen = np.bincount(proposal.tokens[:, 0], minlength=VOCAB)
    assert chdtrc(VOCAB - 1, np.sum((seen - n * law) ** 2 / (n * law))) > 1e-5


def test_a_cold_row_drafts_its_argmax_with_one_hot_q():
    hot, _ = propose(TABLE, PROMPTS, temperature=0.0)
    cold, _ = propose(TABLE, PROMPTS, greedy=True)
    np.testing.assert_array_equal(hot.tokens, cold.tokens)
    np.testing.assert_array_equal(hot.probs, np.eye(VOCAB)[np.asarray(hot.tokens)])
    for row, prompt in enumerate(PROMPTS):
        assert tuple(cold.tokens[row].tolist()) == toy_laws.greedy_chain(TABLE, prompt, 3)


def test_ids_past_the_vocabulary_in_use_are_never_drafted():
    """Case 17: the draft's padding has the largest logits."""
    padded = np.full((12, 12, 12), 50.0, np.float32)
    padded[:VOCAB, :VOCAB, :VOCAB] = TABLE
    wide, _ = propose(padded, PROMPTS)
    narrow, _ = propose(TABLE, PROMPTS)
    np.testing.assert_array_equal(wide.tokens, narrow.tokens)
    np.testing.assert_array_equal(wide.probs, narrow.probs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_reported_for_their_row(bad):
    table = np.array(TABLE)
    table[4, 4] = bad
    proposal, _ = propose(table, PROMPTS, gamma=1)
    assert proposal.finite.tolist() == [True, True, True, False]
    assert np.all((proposal.tokens >= 0) & (proposal.tokens < VOCAB))


def test_rollback_keeps_no_more_than_is_committed_and_invents_nothing():
    drafter = model_drafter(toys.MarkovFn(VOCAB), VOCAB)
    cache = toys.MarkovFn(VOCAB).init_cache(3, 8).replace(length=jnp.asarray([9, 9, 9]))
    assert drafter.rollback(cache, jnp.asarray([4, 10, 12])).length.tolist() == [3, 9, 9]
    assert drafter.length(cache).tolist() == [9, 9, 9]
