"""Early exit: the target's first layers draft, in the target's own cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t
import toy_laws
import toys

from specjax.draft import early_exit_drafter
from specjax.verify import RULES

VOCAB = 8
TABLE = toys.table(VOCAB, seed=4, sharpness=2.0)
PROMPTS = [[1], [2, 3], [7, 0, 5, 5, 1, 6, 2], [4, 4, 4]]
WIDTH, NEW = 8, 40


@pytest.mark.parametrize(("gamma", "width"), [(1, None), (4, None), (4, 8)])
def test_an_exit_as_good_as_the_target_is_always_accepted(gamma, width):
    """Case 3: an entry of either part that is missing or stale would break it. Steps of one row, and of the whole
    width."""
    run = toys.run_batch(
        toys.TwoPartFn(VOCAB),
        early_exit_drafter(toys.TwoPartFn(VOCAB), 1, VOCAB),
        {"target": {"exit": TABLE, "final": TABLE}, "draft": {}},
        PROMPTS * 2,
        rule=RULES["rejection"],
        gamma=gamma,
        width=width,
        exact=width is not None,
        max_new=60,
        vocab=VOCAB,
        temperature=[0.0] * 4 + [1.0] * 4,
    )
    assert toys.always_accepted(run, gamma, 60)


def test_a_trained_exit_drafts_from_its_own_parameters():
    """The stream of the toy is the token, so an exit of the last token alone is a table [V, V]."""
    first_order = np.log(np.mean(np.exp(TABLE), axis=0))

    def trained(params, stream):
        return params[stream[:, 0].astype(jnp.int32)]

    run = toys.run_batch(
        toys.TwoPartFn(VOCAB),
        early_exit_drafter(toys.TwoPartFn(VOCAB), 1, VOCAB, trained_exit=trained),
        {"target": {"exit": np.full_like(TABLE, np.nan), "final": TABLE}, "draft": first_order},
        PROMPTS,
        rule=RULES["greedy"],
        gamma=3,
        max_new=40,
        vocab=VOCAB,
        temperature=0.0,
    )
    assert run.outputs == [toy_laws.greedy_chain(TABLE, prompt, 40) for prompt in PROMPTS]
    assert 0.1 < run.acceptance < 0.9


def bits(result) -> tuple[list[int], bytes]:
    return result.ids.tolist(), np.asarray(result.logprobs, np.float32).tobytes()


DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_one_width_a_transformer_gives_plain_decodings_bits(dtype):
    target = t.tiny(dtype=dtype)
    plain = t.program(target.fn, width=WIDTH)
    early = t.program(target.fn, "early_exit", target.fn, gamma=4, width=WIDTH, exact=True)
    wanted = [bits(result) for result in t.run(plain, target, None, t.prompts(), NEW)]
    results = t.run(early, target, None, t.prompts(), NEW)
    assert [bits(result) for result in results] == wanted
    assert 0.01 < t.acceptance(results) < 0.9


def test_at_its_fastest_a_transformer_gives_the_reference_text():
    """Steps of one row in float32: the fixture's own greedy tokens, whose top two logits are far apart."""
    target = t.tiny()
    program = t.program(target.fn, "early_exit", target.fn, gamma=3)
    results = t.run(program, target, None, t.prompts(), 48)
    assert [result.ids.tolist() for result in results] == t.greedy()


def test_nothing_is_stored_twice():
    """No parameters and no cache of its own: the state is plain decoding's, leaf by leaf."""
    target = t.tiny()
    early = t.program(target.fn, "early_exit", target.fn, gamma=3)
    params = {"target": target.params, "draft": {}}
    state = early.empty(params, 2, 100)
    assert jax.tree.leaves(state.draft) == []
    plain = t.program(target.fn, width=4).empty(params, 2, 100)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [leaf.shape for leaf in jax.tree.leaves(plain)]


def test_no_layer_is_not_a_draft():
    with pytest.raises(ValueError, match="got 0 layers"):
        early_exit_drafter(toys.TwoPartFn(VOCAB), 0, VOCAB)
