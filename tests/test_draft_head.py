"""Heads over the target's features: what they keep stays true through every kind of round."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_laws
import toys

from specjax.draft import head_drafter, mixed_drafter
from specjax.prefill import observed
from specjax.sampling import row_key
from specjax.types import Controller, Drafter, DraftView, RowSampling
from specjax.verify import RULES

VOCAB = 8
TABLE = toys.table(VOCAB, seed=4, sharpness=2.0)
NOISY = toys.noisy(TABLE, 1.0, seed=5)
PROMPTS = [[1], [2, 3], [7, 0, 5, 5, 1, 6, 2], [4, 4, 4]]
WHOLE = {"table": TABLE, "ids": None}


@functools.cache
def drafter(attends: bool, positions: int = 0, prompt_ids: int = 0) -> Drafter:
    fn = toys.MarkovHead(VOCAB, attends, positions)
    return head_drafter(fn, VOCAB, prompt_ids=prompt_ids)


def run(source: Drafter, draft, *, rule="rejection", gamma=4, new=60, **options) -> toys.Run:
    options = {"temperature": [0.0] * 4 + [1.0] * 4, **options}
    params = {"target": TABLE, "draft": draft}
    return toys.run_batch(
        toys.MarkovFn(VOCAB), source, params, PROMPTS * 2, rule=RULES[rule], gamma=gamma, max_new=new, vocab=VOCAB,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(("gamma", "width"), [(1, None), (4, None), (4, 8)])
@pytest.mark.parametrize("attends", [False, True])
def test_a_head_that_knows_the_target_is_always_accepted(attends, gamma, width):
    """A feature or an entry that is missing or stale would break it: case 3 for heads. Blocks also padded."""
    found = run(drafter(attends), WHOLE, gamma=gamma, width=width)
    assert toys.always_accepted(found, gamma, 60)


def fresh(source: Drafter, draft, found: toys.Run):
    """Return the source's state after a prefill of whole texts."""
    tokens, count = jnp.asarray(found.state.tokens), jnp.asarray(found.state.num_tokens)
    seen = source.init(draft, tokens, count, tokens.shape[1])
    observe = functools.partial(source.observe, draft)
    return observed(toys.MarkovFn(VOCAB), TABLE, tokens, count, tokens.shape[1], observe=observe, seen=seen)[1]


ALTERNATING = Controller(  # rows sit out rounds, each in its own turn
    init=lambda batch: (),
    choose=lambda control, view: jnp.where((view.round + jnp.arange(view.round.shape[0])) % 3 == 0, 0, 4),
    update=lambda control, view, outcome: control,
)


@pytest.mark.parametrize("options", [{}, {"width": (1, 4, 5), "controller": ALTERNATING}], ids=["plain", "controller"])
@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_rejections_it_knows_what_a_fresh_prefill_knows(mixed, options):
    source = drafter(True)
    found = run(mixed_drafter(source) if mixed else source, {"table": NOISY, "ids": None}, new=47, **options)
    assert 0.2 < found.acceptance < 0.95
    state, new = found.state.draft, fresh(source, {"table": NOISY, "ids": None}, found)
    np.testing.assert_array_equal(state.cache.length, found.state.num_tokens - 1)
    np.testing.assert_array_equal(new.cache.length, found.state.num_tokens - 1)
    for row, length in enumerate(state.cache.length):
        np.testing.assert_array_equal(state.features[row, :length], new.features[row, :length])
        np.testing.assert_array_equal(state.cache.k[0][row, 0, :length], new.cache.k[0][row, 0, :length])


def test_heads_side_by_side_draft_from_one_context():
    """Both score what follows the newest token: at temperature 0 the second draft is the first again, and the last."""
    found = run(drafter(False, positions=2), WHOLE, rule="greedy", temperature=0.0, new=40)
    chains = [toy_laws.greedy_chain(TABLE, prompt, 40) for prompt in PROMPTS]
    assert found.outputs == chains * 2
    output = np.arange(found.state.tokens.shape[1]) < found.state.num_tokens[:, None]
    drafted = found.state.drafted[output & (found.state.drafted > 0)]
    assert set(drafted.tolist()) <= {1, 2}
    first = found.state.accepted & (found.state.place == 0)
    second = found.state.accepted & (found.state.place == 1)
    assert first.sum() > 10
    same = found.state.tokens[:, 1:] == found.state.tokens[:, :-1]
    assert np.all(same[second[:, 1:]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_listed_tokens_and_the_prompts_own_are_drafted_and_no_others(temperature):
    """Rows differ in what their prompts add; an id that is listed too counts once."""
    draft = {"table": TABLE, "ids": np.asarray([2, 6], np.int32)}
    found = run(drafter(False, prompt_ids=3), draft, temperature=temperature)
    listed = of_prompts = 0
    for row, prompt in enumerate(PROMPTS * 2):
        own = set(sorted(set(prompt) - {2, 6})[:3])
        drafts = found.state.tokens[row][found.state.accepted[row]].tolist()
        assert set(drafts) <= {2, 6} | own
        listed += len({2, 6} & set(drafts))
        of_prompts += len(own & set(drafts))
    assert listed > 3
    assert of_prompts > 3


@pytest.mark.slow
def test_q_is_the_heads_law_over_what_it_scores():
    source, prompts = drafter(False, prompt_ids=2), PROMPTS
    draft = {"table": TABLE, "ids": np.asarray([2, 6], np.int32)}
    tokens = np.zeros((4, 32), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    count = jnp.asarray([len(p) for p in prompts], jnp.int32)
    seen = source.init(draft, jnp.asarray(tokens), count, 128)
    assert np.asarray(seen.prompt_ids).tolist() == [[1, VOCAB], [3, VOCAB], [0, 1], [4, VOCAB]]
    found = run(source, draft, temperature=1.0, new=2, gamma=1, round_limit=0)
    one = jax.tree.map(lambda leaf: leaf[:4], found.state)
    assert np.asarray(one.draft.prompt_ids).tolist() == np.asarray(seen.prompt_ids).tolist()
    view_ids = [sorted({2, 6, *row[row < VOCAB].tolist()}) for row in np.asarray(seen.prompt_ids)]
    keys = toys.keys_of(jnp.asarray(np.stack([row_key(0, i) for i in range(4)])), 1)
    view = DraftView(jnp.asarray(one.tokens), count, RowSampling(jnp.ones(4)), keys, jnp.ones(4, jnp.int32))
    proposal, _ = source.propose(draft, jax.tree.map(jnp.asarray, one.draft), view, 1, False)
    for row, (prompt, ids) in enumerate(zip(prompts, view_ids, strict=True)):
        law = toy_laws.next_probs(TABLE, tuple(prompt), 1.0)
        expected = np.where(np.isin(np.arange(VOCAB), ids), law, 0.0)
        np.testing.assert_allclose(proposal.probs[row, 0], expected / expected.sum(), rtol=1e-5)


def test_where_no_row_may_draft_no_step_runs():
    never = Controller(
        init=lambda batch: (),
        choose=lambda control, view: jnp.zeros_like(view.round),
        update=lambda control, view, outcome: control,
    )
    found = run(drafter(True), WHOLE, controller=never, width=(1, 5), new=20)
    assert not np.any(found.state.drafted[:, 8:28] > 0)
    new = fresh(drafter(True), WHOLE, found)
    for row, length in enumerate(found.state.draft.cache.length):
        np.testing.assert_array_equal(found.state.draft.features[row, :length], new.features[row, :length])
