"""The harness is able to fail: known faults, put in on purpose, are each seen by a test of the kind used elsewhere.

Faults of the law are held against the chi-square of test_law.py with 32,768 draws: p < 1e-6 where a right
implementation stays above 1e-5. Faults of caches are held against the status bits of ``check=True``, the
acceptance of a draft that is the target, or the greedy text.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_laws
import toys
from test_transforms_law import p_value

import specjax.round
from specjax import cache as kv
from specjax import sampling as s
from specjax import transforms
from specjax.draft import model_drafter
from specjax.types import Purpose, Rule
from specjax.verify import RULES, block, greedy, rejection

pytestmark = pytest.mark.slow  # each compiles a program of its own

V = toys.LAW_VOCAB
DRAFT = toys.noisy(toys.LAW_TABLE, 1.0, seed=1)
SEEN = 1e-6


@pytest.fixture(autouse=True)
def own_programs(monkeypatch):
    """A patched function must not meet, or leave behind, a program that is compiled already."""
    monkeypatch.setattr(toys, "_CACHE", {})


def law(rule: Rule = rejection.RULE, drafter=None, draft=DRAFT, **options) -> float:
    drafter = drafter or model_drafter(toys.MarkovFn(V), V)
    return toys.law_test(rule, drafter, draft, batches=2, **options).p_value


def take(values: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, place.reshape(-1, 1, *([1] * (values.ndim - 2))), axis=1)[:, 0]


def mutant(change) -> Rule:
    """Return the rejection rule with its verdict changed: ``change(verdict, logits, proposal, sampling, keys)``."""

    def verify(logits, proposal, sampling, keys):
        return change(rejection.verify(logits, proposal, sampling, keys), logits, proposal, sampling, keys)

    return Rule("mutant", verify)


def test_unchanged_parts_pass():
    assert law() > 1e-5
    assert law(mutant(lambda verdict, *_: verdict)) > 1e-5


def test_drafts_kept_after_a_rejection(monkeypatch):
    def count(hits, num_drafted):
        return jnp.sum(hits & (jnp.arange(hits.shape[1]) < num_drafted[:, None]), axis=1).astype(jnp.int32)

    monkeypatch.setattr(rejection, "leading", count)
    assert law() < SEEN


def test_plain_p_for_the_residual(monkeypatch):
    monkeypatch.setattr(rejection, "_residual", lambda p, log_weights, proposal, place: log_weights)
    assert law() < SEEN


def test_a_softmax_of_the_difference_for_the_residual(monkeypatch):
    def residual(p, log_weights, proposal, place):
        q = take(proposal.probs, jnp.minimum(place, proposal.tokens.shape[1] - 1))
        return jnp.maximum(p - q, 0.0)  # as logits

    monkeypatch.setattr(rejection, "_residual", residual)
    assert law() < SEEN


def test_the_bonus_from_the_wrong_row():
    def verify(logits, proposal, sampling, keys):
        return rejection.verify(logits.at[:, -1].set(logits[:, -2]), proposal, sampling, keys)

    assert law(Rule("mutant", verify)) < SEEN


def test_the_batchs_least_acceptance_for_every_row():
    pairs = 2  # rows in twos, so that not every row is cut to nothing

    def change(verdict, *_):
        least = jnp.min(verdict.num_accepted.reshape(-1, pairs), axis=1)
        return verdict.replace(num_accepted=jnp.repeat(least, pairs))

    assert law(mutant(change)) < SEEN


def test_the_drafts_noise_again_for_the_residual():
    def change(verdict, logits, proposal, sampling, keys):
        n = verdict.num_accepted
        target = s.distribution(logits, sampling)
        left = rejection._residual(take(target.probs, n), take(target.log_weights, n), proposal, n)
        token = s.draw(left, take(keys.place, n))
        return verdict.replace(next_token=jnp.where(n < proposal.num_drafted, token, verdict.next_token))

    assert law(mutant(change)) < SEEN


def test_one_key_for_all_rounds(monkeypatch):
    fresh = specjax.round.round_keys
    monkeypatch.setattr(
        specjax.round, "round_keys", lambda state, *rest: fresh(state.replace(round=state.round * 0), *rest)
    )
    assert law() < SEEN


def test_one_uniform_for_the_whole_block(monkeypatch):
    each = s.uniforms
    monkeypatch.setattr(s, "uniforms", lambda key, count: jnp.broadcast_to(each(key, 1), (key.shape[0], count)))
    assert law() < SEEN


def test_a_greedy_draft_with_the_models_probabilities_for_q():
    """Case 26."""
    drafter = model_drafter(toys.MarkovFn(V), V)

    def propose(params, state, view, gamma, greedy):
        cold, state_after = drafter.propose(params, state, view, gamma, True)
        before = jnp.take_along_axis(view.tokens, jnp.maximum(view.num_tokens[:, None] - 2, 0), axis=1)
        before = jnp.where(view.num_tokens[:, None] > 1, before, 0)
        last = jnp.take_along_axis(view.tokens, view.num_tokens[:, None] - 1, axis=1)
        row = jnp.concatenate([before, last, cold.tokens], axis=1)
        probs = jax.nn.softmax(params[row[:, :gamma], row[:, 1 : gamma + 1]] / view.sampling.temperature[:, None, None])
        return cold.replace(probs=probs), state_after

    assert law(drafter=drafter._replace(propose=propose)) < SEEN


def penalised() -> float:
    """Return the p-value of rows whose penalties make the history matter."""
    rows = [{"frequency_penalty": 1.0}, {"repetition_penalty": 1.5, "presence_penalty": -0.5}]
    return p_value(rows, rejection.RULE, check=False, batches=2)[0]


def test_a_history_that_keeps_rejected_drafts(monkeypatch):
    """The status bits of ``check`` see it too."""
    right = transforms.commit
    assert penalised() > 1e-5
    monkeypatch.setattr(toys, "_CACHE", {})

    def commit(history, states, emitted, num_emitted):
        return right(history, states, emitted, jnp.where(num_emitted > 0, emitted.shape[1], 0))

    monkeypatch.setattr(transforms, "commit", commit)
    assert penalised() < SEEN
    monkeypatch.setattr(toys, "_CACHE", {})
    with pytest.raises(AssertionError, match="status bits"):
        p_value([{"frequency_penalty": 1.0}], rejection.RULE, batches=1)


def test_penalties_that_do_not_see_the_drafts_before(monkeypatch):
    monkeypatch.setattr(transforms, "advance", lambda sampling, context, token: context)
    assert penalised() < SEEN


def test_a_draft_whose_probabilities_are_those_before_its_truncation(monkeypatch):
    """q must be what was drawn from: with top-k on the draft alone."""
    right = s.distribution

    def distribution(logits, sampling):
        found = right(logits, sampling)
        whole = right(logits, sampling.replace(truncation=None))
        return found.replace(probs=whole.probs) if logits.shape[1] == 1 else found

    rows = [{"draft_top_k": 2}, {"draft_top_k": 1}]
    assert p_value(rows, rejection.RULE, batches=2)[0] > 1e-5
    monkeypatch.setattr(toys, "_CACHE", {})
    monkeypatch.setattr(s, "distribution", distribution)
    assert p_value(rows, rejection.RULE, batches=2)[0] < SEEN


def test_text_after_an_eos(monkeypatch):
    cut = specjax.round._cut
    monkeypatch.setattr(
        specjax.round, "_cut", lambda state, *rest: cut(state.replace(eos=jnp.full_like(state.eos, -1)), *rest)
    )
    with pytest.raises(AssertionError, match="status bits"):
        law()
    with pytest.raises(AssertionError, match="impossible outputs"):
        law(check=False)


TABLE = toys.table(8, seed=4, sharpness=2.0)
PROMPTS = [[2, 3], [7, 0, 5, 5, 1, 6, 2], [4, 4, 4]]


def greedy_run(drafter=None, draft=TABLE, check: bool = False) -> toys.Run:
    return toys.run_batch(
        toys.MarkovFn(8),
        drafter or model_drafter(toys.MarkovFn(8), 8),
        {"target": TABLE, "draft": draft},
        PROMPTS,
        rule=greedy.RULE,
        gamma=3,
        max_new=40,
        vocab=8,
        temperature=0.0,
        check=check,
    )


def text_is_plain(run: toys.Run) -> bool:
    return run.outputs == [toy_laws.greedy_chain(TABLE, prompt, 40) for prompt in PROMPTS]


def test_unchanged_caches_pass():
    run = greedy_run(check=True)
    assert text_is_plain(run)
    assert toys.always_accepted(run, 3, 40)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_rollback_that_is_off_by_one(off, monkeypatch):
    wrong = types.SimpleNamespace(rollback=lambda cache, length: kv.rollback(cache, length + off))
    monkeypatch.setattr(specjax.round, "kv", wrong)
    with pytest.raises(AssertionError, match=r"status bits \[4\]"):
        greedy_run(check=True)
    assert not text_is_plain(greedy_run())


def test_a_draft_whose_rollback_is_forgotten():
    drafter = model_drafter(toys.MarkovFn(8), 8)._replace(rollback=lambda state, num_tokens: state)
    with pytest.raises(AssertionError, match=r"status bits \[0, 8\]"):
        greedy_run(drafter, toys.noisy(TABLE, 2.0, seed=1), check=True)


class Forgetful(toys.MarkovFn):
    """Writes the newest token of a step alone, so the entry missing after a fully accepted round stays missing."""

    def __call__(self, params, tokens, cache, *, logits="all", features=False):
        if tokens.shape[1] != 2 or isinstance(logits, str):
            return super().__call__(params, tokens, cache, logits=logits, features=features)
        later = kv.rollback(cache, cache.length + 1)
        return super().__call__(params, tokens[:, 1:], later, logits=logits - 1, features=features)


def test_a_draft_cache_that_misses_an_entry_after_full_acceptance():
    """The text stays plain, so acceptance is what shows it (case 3)."""
    run = greedy_run(model_drafter(Forgetful(8), 8))
    assert text_is_plain(run)
    assert not toys.always_accepted(run, 3, 40)


def test_a_greedy_rule_that_counts_past_a_miss(monkeypatch):
    monkeypatch.setattr(greedy, "leading", lambda hits, num_drafted: jnp.sum(hits, axis=1).astype(jnp.int32))
    assert not text_is_plain(greedy_run(draft=toys.noisy(TABLE, 2.0, seed=1)))


def test_a_step_that_writes_past_the_capacity(monkeypatch):
    """Invariant 3: a program that allocates too little says so."""
    monkeypatch.setattr(toys, "capacity_for", lambda longest, width: 128)
    prompt = np.arange(126) % 8
    with pytest.raises(AssertionError, match=r"status bits \[64\]"):
        toys.run_batch(
            toys.MarkovFn(8),
            model_drafter(toys.MarkovFn(8), 8),
            {"target": TABLE, "draft": TABLE},
            [prompt.tolist()],
            rule=RULES["greedy"],
            gamma=3,
            max_new=2,
            vocab=8,
            temperature=0.0,
        )


def test_a_draft_without_probability_is_accepted_at_equality(monkeypatch):
    """``<=`` for ``<``: with u = 0 a draft of zero probability would pass. Every uniform is made 0."""
    target = toys.LAW_TABLE.copy()
    target[:, :, 2] = -np.inf  # drafted, never allowed

    def hits(rule: Rule) -> int:
        run = toys.run_batch(
            toys.MarkovFn(V), model_drafter(toys.MarkovFn(V), V), {"target": target, "draft": DRAFT},
            [[1]] * 256, rule=rule, gamma=3, max_new=6, vocab=V, check=False,
        )  # fmt: skip
        return sum(token == 2 for output in run.outputs for token in output)

    def lenient(logits, proposal, sampling, keys):
        strict = rejection.verify(logits, proposal, sampling, keys)
        p, q = s.distribution(logits, sampling).probs[:, :-1], proposal.probs
        p, q = (jnp.take_along_axis(x, proposal.tokens[..., None], axis=-1)[..., 0] for x in (p, q))
        u = s.uniforms(s.purpose_key(keys.round, Purpose.ACCEPT), q.shape[1])
        return strict.replace(num_accepted=greedy.leading(u * q <= p, proposal.num_drafted))

    monkeypatch.setattr(s, "uniforms", lambda key, count: jnp.zeros((key.shape[0], count)))
    assert hits(rejection.RULE) == 0
    assert hits(Rule("mutant", lenient)) > 0


def test_q_in_another_precision_than_the_draft_was_drawn_in():
    """Case 25: the verified q comes from logits that went through bfloat16, 100 above zero as a model's may be."""
    drafter = model_drafter(toys.MarkovFn(V), V)

    def propose(*given):
        proposal, state = drafter.propose(*given)
        logits = jax.lax.reduce_precision(jnp.log(proposal.probs) + 100, exponent_bits=8, mantissa_bits=7)
        return proposal.replace(probs=jax.nn.softmax(logits)), state

    assert law(drafter=drafter._replace(propose=propose)) < SEEN


def ragged(drafter):
    """Return a drafter whose rows count 1, 2 and 3 of their drafts."""

    def propose(*given):
        proposal, state = drafter.propose(*given)
        count = 1 + jnp.arange(proposal.num_drafted.shape[0]) % proposal.tokens.shape[1]
        return proposal.replace(num_drafted=jnp.minimum(proposal.num_drafted, count)), state

    return drafter._replace(propose=propose)


def test_the_blocks_last_index_under_a_gamma_of_each_row(monkeypatch):
    drafter = ragged(model_drafter(toys.MarkovFn(V), V))
    assert law(block.RULE, drafter=drafter) > 1e-5
    right = block.end_probability

    def wrong(p, proposal, pi):
        return right(p, proposal.replace(num_drafted=jnp.full_like(proposal.num_drafted, pi.shape[1])), pi)

    monkeypatch.setattr(block, "end_probability", wrong)
    toys._CACHE.clear()
    assert law(block.RULE, drafter=drafter) < SEEN


def test_top_p_before_temperature(monkeypatch):
    params, prompt, count = s.SamplingParams(temperature=2.0, top_p=0.7), [1], 4
    exact = toy_laws.transformed_law(toys.LAW_TABLE, prompt, count, None, params)

    def p_value() -> float:
        run = toys.run_batch(
            toys.MarkovFn(V), model_drafter(toys.MarkovFn(V), V), {"target": toys.LAW_TABLE, "draft": DRAFT},
            [prompt] * 8192, rule=rejection.RULE, gamma=3, max_new=count, vocab=V, sampling=[params] * 8192,
        )  # fmt: skip
        if not set(run.outputs) <= set(exact):
            return 0.0
        return toy_laws.chi_square([(run.outputs, exact)])[0]

    assert p_value() > 1e-5
    right = s.distribution

    def wrong(logits, sampling):
        cut = right(logits, sampling.replace(temperature=jnp.ones_like(sampling.temperature))).probs > 0
        return right(jnp.where(cut, logits, -jnp.inf), sampling.replace(truncation=None))

    monkeypatch.setattr(s, "distribution", wrong)
    toys._CACHE.clear()
    assert p_value() < SEEN
