"""Mixed drafts and caches that lag behind: look-up where it finds something, the model elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_laws
import toys
from test_draft_model import VOCAB, view_of

from specjax.draft import early_exit_drafter, mixed_drafter, model_drafter
from specjax.verify import RULES

TABLE = toys.table(VOCAB, seed=4, sharpness=2.0)
GAMMA = 3
LONG = [int(i) for i in np.random.default_rng(0).permutation(np.arange(56) % VOCAB)]
REPEATS, FRESH = [1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 6]  # with n-grams of two or more


def drafter():
    return mixed_drafter(model_drafter(toys.MarkovFn(VOCAB), VOCAB), min_n=2)


def propose(source, view, table=TABLE, state=None):
    """Propose once; from a freshly filled cache unless one is given."""
    if state is None:
        state = source.init(TABLE, view.tokens[:, :64], view.num_tokens, 128)
    return jax.jit(source.propose, static_argnums=(3, 4))(table, state, view, GAMMA, False)


def test_a_row_with_a_match_looks_up_and_its_mate_asks_the_model():
    proposal, cache = propose(drafter(), view_of([REPEATS, FRESH], 1.0, GAMMA))
    assert proposal.tokens[0].tolist() == [3, 1, 2]
    np.testing.assert_array_equal(proposal.probs[0], np.eye(VOCAB)[[3, 1, 2]])
    law = toy_laws.next_probs(TABLE, tuple(FRESH), 1.0)
    np.testing.assert_allclose(proposal.probs[1, 0], law, rtol=1e-5)
    assert proposal.num_drafted.tolist() == [GAMMA, GAMMA]
    assert cache.length.tolist() == [len(REPEATS) - 1, len(FRESH) - 1 + GAMMA]


def test_the_model_runs_no_step_where_every_row_has_a_match():
    """What its cache lacks is not filled either: a table of NaN would show."""
    source = drafter()
    view = view_of([REPEATS, REPEATS], 1.0, GAMMA)
    cache = source.init(TABLE, view.tokens[:, :32], view.num_tokens, 128).replace(length=jnp.asarray([2, 3]))
    proposal, after = propose(source, view, np.full_like(TABLE, np.nan), cache)
    assert proposal.tokens.tolist() == [[3, 1, 2]] * 2
    assert np.all(proposal.finite)
    assert after.length.tolist() == [2, 3]
    np.testing.assert_array_equal(after.k[0], cache.k[0])


def test_a_cache_that_lags_behind_catches_up_before_it_drafts():
    """0 to 54 entries missing, in pieces of 16, each row its own; one row lacks nothing, one may not draft."""
    prompts = [LONG, LONG[:40], LONG[:23], LONG[:7], LONG[:30]]
    gamma = jnp.asarray([GAMMA, GAMMA, GAMMA, GAMMA, 0], jnp.int32)
    lengths = [0, 3, 22, 4, 2]
    source = model_drafter(toys.MarkovFn(VOCAB), VOCAB)
    view = view_of(prompts, 1.0, GAMMA).replace(gamma=gamma, may_lag=True)
    whole = source.init(TABLE, view.tokens[:, :64], view.num_tokens, 128)
    held = jnp.arange(whole.k[0].shape[2])[None, None, :, None] < jnp.asarray(lengths)[:, None, None, None]
    lagging = whole.replace(k=(jnp.where(held, whole.k[0], 7.0),), length=jnp.asarray(lengths))
    wanted, full = propose(source, view, state=whole)
    found, cache = propose(source, view, state=lagging)
    np.testing.assert_array_equal(found.tokens[:4], wanted.tokens[:4])
    np.testing.assert_array_equal(found.probs[:4], wanted.probs[:4])
    assert cache.length.tolist() == [*full.length[:4].tolist(), 2]
    for row, length in enumerate(cache.length.tolist()):
        np.testing.assert_array_equal(cache.k[0][row, 0, :length], full.k[0][row, 0, :length])


def test_a_mixed_draft_of_the_target_itself_loses_no_entry():
    """Where the model drafts it is the target, so every draft that is not a look-up's is accepted."""
    run = toys.run_batch(
        toys.MarkovFn(VOCAB),
        mixed_drafter(model_drafter(toys.MarkovFn(VOCAB), VOCAB), max_n=4, min_n=3),
        {"target": TABLE, "draft": TABLE},
        [REPEATS, FRESH, LONG, [1]],
        rule=RULES["rejection"],
        gamma=GAMMA,
        max_new=60,
        vocab=VOCAB,
        temperature=1.0,
    )
    for row, output in enumerate(run.outputs):
        start = run.state.prompt_length[row]
        text = run.state.tokens[row]
        place, accepted = run.state.place[row], run.state.accepted[row]
        for i in range(start, start + len(output) - GAMMA):
            if place[i] == 0 and not _matches(text[:i].tolist()):
                assert accepted[i : i + GAMMA].all(), f"row {row}, token {i}"
    assert run.acceptance < 1  # look-ups that fail are among them


def _matches(tokens: list[int]) -> bool:
    suffix = tokens[-3:]
    return len(suffix) == 3 and any(tokens[i : i + 3] == suffix for i in range(len(tokens) - 3))


def test_past_the_models_context_a_row_still_looks_up():
    source = mixed_drafter(model_drafter(toys.MarkovFn(VOCAB), VOCAB, 10), min_n=2)
    long_fresh = [0, 1, 2, 3, 4, 5, 6, 7, 0]
    view = view_of([REPEATS * 2, long_fresh], 1.0, GAMMA)
    proposal, _ = propose(source, view)
    assert proposal.num_drafted.tolist() == [GAMMA, 0]


def test_an_early_exit_cannot_be_mixed():
    with pytest.raises(ValueError, match="runs a part of the target"):
        mixed_drafter(early_exit_drafter(toys.TwoPartFn(VOCAB), 1, VOCAB))
