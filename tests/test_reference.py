"""The NumPy reference against hand counts, the exact laws and its own enumeration."""

import functools
import itertools
import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from specjax import reference, stats

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.5, 0.25])


def toy_model(seed: int, vocab_size: int, zeros: bool = False):
    """Return a model whose law depends on the whole prefix."""

    @functools.cache
    def model(prefix):
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        weights = rng.random(vocab_size) ** 2 + 0.02
        if zeros:
            weights[rng.integers(vocab_size)] = 0
        return weights / weights.sum()

    return model


class ScriptedRng:
    """Stands in for a Generator: hands out given uniforms and Gumbel rows in order."""

    def __init__(self, uniforms, gumbels):
        self._uniforms, self._gumbels = iter(uniforms), iter(gumbels)

    def random(self):
        return next(self._uniforms)

    def gumbel(self, size):
        row = next(self._gumbels)
        assert row.shape == (size,)
        return row


def distributions(size: int):
    # whole numbers, so that zeros, equal entries and p == q are common
    weights = st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any)
    return weights.map(lambda w: np.array(w) / sum(w))


# --- one position


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([[0.5, 0.5]], [0.5, 0.5], r"p: got shape \(1, 2\), expected one dimension"),
        ([0.5, 0.5], [], r"q: got shape \(0,\)"),
        ([0.5, 0.5], [0.5, 0.25, 0.25], "q: got 3 ids, expected p's 2"),
        ([1.5, -0.5], [0.5, 0.5], "p: negative at id 1: got -0.5"),
        ([0.5, math.nan], [0.5, 0.5], "p: not finite at id 1"),
        ([0.5, 0.5], [math.inf, 0.0], "q: not finite at id 0"),
        ([0.5, 0.5], [0.5, 0.500002], "q: got a sum of 1.000002, expected 1 within 1e-06"),
        (["a", "b"], [0.5, 0.5], "p: got dtype"),
        ([1 + 0j, 0], [0.5, 0.5], "p: got dtype complex128"),
    ],
)
def test_bad_distributions_are_refused_with_what_was_got(p, q, message):
    for function in (reference.residual, reference.theoretical_acceptance):
        with pytest.raises(ValueError, match=message):
            function(p, q)


def test_a_sum_within_the_tolerance_passes():
    assert reference.theoretical_acceptance([0.5, 0.5], [0.5, 0.5000005]) == pytest.approx(1.0)


def test_acceptance_and_residual_of_the_worked_example():
    assert [reference.acceptance_probability(P, Q, t) for t in range(3)] == pytest.approx([1.0, 0.6, 0.8])
    assert reference.theoretical_acceptance(P, Q) == pytest.approx(0.75)
    assert reference.residual(P, Q).tolist() == [1.0, 0.0, 0.0]


def test_acceptance_of_tokens_without_mass():
    assert reference.acceptance_probability([0.0, 1.0], [0.5, 0.5], 0) == 0.0
    assert reference.acceptance_probability([0.5, 0.5], [0.0, 1.0], 0) == 1.0
    assert reference.acceptance_probability([0.0, 1.0], [0.0, 1.0], 0) == 0.0
    with pytest.raises(ValueError, match="token: got 3"):
        reference.acceptance_probability(P, Q, 3)


@settings(deadline=None)
@given(distributions(4), distributions(4))
def test_the_identity_of_the_rule(p, q):
    """q min(1, p/q) + (1 - acceptance) residual = p, and acceptance = 1 - TV."""
    kept = np.array([q[t] * reference.acceptance_probability(p, q, t) for t in range(4)])
    acceptance = reference.theoretical_acceptance(p, q)
    np.testing.assert_allclose(kept + (1 - acceptance) * reference.residual(p, q), p, atol=1e-12)
    assert acceptance == pytest.approx(1 - np.abs(p - q).sum() / 2)


def test_the_batched_sampler_is_the_single_one_trial_by_trial():
    rng = np.random.default_rng(0)
    trials = 500
    draft_gumbel, final_gumbel = rng.gumbel(size=(trials, 3)), rng.gumbel(size=(trials, 3))
    uniforms = rng.random(trials)
    tokens, accepted = reference.sample_positions(P, Q, draft_gumbel, uniforms, final_gumbel)
    for i in range(trials):
        scripted = ScriptedRng([uniforms[i]], [draft_gumbel[i], final_gumbel[i]])
        assert reference.sample_position(P, Q, scripted) == (tokens[i], accepted[i])
    assert 0 < accepted.sum() < trials


def test_single_positions_follow_p():
    # n = 40000 draws over 3 cells, statistic chi-square with 2 degrees, false alarm 1e-6
    rng = np.random.default_rng(3)
    drawn = [reference.sample_position(P, Q, rng) for _ in range(40_000)]
    counts = np.bincount([token for token, _ in drawn], minlength=3)
    expected = P * len(drawn)
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, 2)
    rate = np.mean([accepted for _, accepted in drawn])
    assert abs(rate - 0.75) < 5 * math.sqrt(0.75 * 0.25 / len(drawn))


# --- one round with given randomness


def test_acceptance_is_strict_and_stops_at_the_first_rejection():
    p = [[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]
    q = [[1.0, 0.0], [0.5, 0.5]]
    flat = [0.0, 0.0]
    # u q < p: 0.499 < 0.5 and 0.2495 < 0.25 pass; at 0.5 both sides are equal and the draft is refused
    assert reference.decide_round(p, q, [0, 0], [0.499, 0.499], flat) == (2, 0)
    assert reference.decide_round(p, q, [0, 0], [0.5, 0.0], flat) == (0, 1)
    assert reference.decide_round(p, q, [0, 0], [0.0, 0.5], flat) == (1, 1)


def test_a_zero_probability_draft_is_rejected_at_u_zero():
    assert reference.decide_round([[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5]], [0], [0.0], [0.0, 0.0]) == (0, 1)


def test_an_empty_residual_draws_a_legal_token_of_p():
    # q lies just above p everywhere it has mass, as rounding can leave it
    p = [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
    q = [[0.0, 0.5 + 1e-7, 0.5 + 1e-7]]
    for gumbel, expected in (([9.0, 0.0, 1.0], 2), ([9.0, 1.0, 0.0], 1)):
        assert reference.decide_round(p, q, [1], [1 - 1e-9], gumbel) == (0, expected)


def test_without_q_drafts_are_deterministic():
    p = [[0.3, 0.7], [0.5, 0.5]]
    for u in (0.0, 0.29, 0.3, 0.9):
        expected = (1, 0) if u < 0.3 else (0, 1)  # a rejected draft is out of the residual, whatever the noise
        assert reference.decide_round(p, None, [0], [u], [5.0, 0.0]) == expected
        assert reference.decide_round(p, [[1.0, 0.0]], [0], [u], [5.0, 0.0]) == expected


def test_arithmetic_stays_in_float32():
    # the product of these two rounds up to p in float32, and stays below it in float64
    u, q = np.float32(0.1), np.float32(0.7)
    p_draft = np.float32(u * q)
    assert float(u) * float(q) < float(p_draft)
    p = np.array([[p_draft, 1 - p_draft], [0.5, 0.5]], np.float32)
    q_rows, uniforms = np.array([[q, 1 - q]], np.float32), np.array([u])
    flat = np.zeros(2, np.float32)
    assert reference.decide_round(p, q_rows, [0], uniforms, flat)[0] == 0
    assert (
        reference.decide_round(p.astype(np.float64), q_rows.astype(np.float64), [0], uniforms.astype(np.float64), flat)[
            0
        ]
        == 1
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": [0.5, 0.5]}, r"p: got shape \(2,\)"),
        ({"drafts": [2]}, r"drafts: got \[2\], expected 1 ids in 0..1"),
        ({"drafts": [0, 1]}, "expected 1 ids"),
        ({"drafts": [0.5]}, "expected 1 ids"),
        ({"q": [[0.2, 0.3, 0.5]]}, r"q: got shape \(1, 3\), expected \(1, 2\)"),
        ({"uniforms": [1.0]}, r"expected \[0, 1\)"),
        ({"uniforms": [math.nan]}, r"expected \[0, 1\)"),
        ({"final_gumbel": [0.0, math.inf]}, "finite Gumbel"),
        ({"q": [[0.2, 0.3]]}, r"q\[0\]: got a sum of 0.5"),
        ({"p": [[0.5, 0.5], [0.5, 0.6]]}, r"p\[1\]: got a sum"),
    ],
)
def test_rounds_that_do_not_fit_are_refused(change, message):
    fitting = {"p": [[0.5, 0.5]] * 2, "q": [[0.5, 0.5]], "drafts": [0], "uniforms": [0.5], "final_gumbel": [0.0, 0.0]}
    reference.decide_round(**fitting)
    with pytest.raises(ValueError, match=message):
        reference.decide_round(**{**fitting, **change})


def test_a_round_is_the_decision_on_its_own_drafts():
    target, draft = toy_model(1, 4), toy_model(2, 4)
    rng = np.random.default_rng(5)
    seen = Counter()
    for _ in range(200):
        noise = reference.RoundNoise.draw(rng, 3, 4)
        accepted, emitted = reference.speculative_round(target, draft, (1, 2), 3, noise)
        prefix = (1, 2)
        for i, token in enumerate(emitted[:-1]):
            assert token == reference.gumbel_draw(draft(prefix), noise.draft_gumbel[i])
            assert noise.uniforms[i] * draft(prefix)[token] < target(prefix)[token]
            prefix += (token,)
        last = (
            reference.residual(target(prefix), draft(prefix)) if accepted < 3 else target(prefix)
        )  # the round's extra token
        assert emitted[-1] == reference.gumbel_draw(last, noise.final_gumbel)
        assert len(emitted) == accepted + 1
        seen[accepted] += 1
    assert set(seen) == {0, 1, 2, 3}


# --- greedy


def test_greedy_takes_the_target_argmax_whatever_the_draft():
    # p(a) = .45 > p(b); and the case p(a) = .3, p(b) = .5, q(a) = .2
    assert reference.greedy_round(lambda _: [0.45, 0.40, 0.15], lambda _: [0.0, 1.0, 0.0], (), 1) == (0, (0,))
    assert reference.greedy_round(lambda _: [0.3, 0.5, 0.2], lambda _: [0.2, 0.3, 0.5], (), 1) == (0, (1,))


def test_greedy_ties_go_to_the_lowest_id():
    tied = lambda _: [0.2, 0.4, 0.4]  # noqa: E731
    assert reference.greedy_round(tied, tied, (), 2) == (2, (1, 1, 1))
    assert reference.greedy_model(tied)(()).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_the_greedy_round_is_the_rejection_round_at_temperature_zero(gamma):
    target, draft = toy_model(3, 3), toy_model(4, 3)
    rng = np.random.default_rng(0)
    accepted = set()
    for prefix in itertools.product(range(3), repeat=3):
        expected = reference.greedy_round(target, draft, prefix, gamma)
        cold = reference.greedy_model(target), reference.greedy_model(draft)
        assert reference.speculative_round(*cold, prefix, gamma, rng) == expected
        accepted.add(expected[0])
    assert len(accepted) > 1 or gamma == 0


# --- whole generations


def test_generation_with_the_target_as_draft_accepts_everything_and_stops_at_the_budget():
    target = toy_model(1, 4)
    out = reference.generate(target, target, (0,), gamma=3, max_new_tokens=10, rng=np.random.default_rng(0))
    assert out.finish_reason == "length"
    assert out.accepted_counts == (3, 3, 2)
    assert out.place == (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)
    assert out.accepted == (1, 1, 1, 0, 1, 1, 1, 0, 1, 1)
    assert out.drafted == (3,) * 10


@pytest.mark.parametrize("offset", range(5))
def test_nothing_follows_an_eos_at_any_place_of_a_block(offset):
    # greedy counts up; the draft agrees; the EOS lies at each place of the first block
    target = lambda prefix: reference.one_hot(len(prefix) % 8, 8)  # noqa: E731
    out = reference.generate(target, target, gamma=4, max_new_tokens=20, eos=(offset, 7), greedy=True)
    assert out.ids == tuple(range(offset + 1))
    assert out.finish_reason == "eos"
    assert out.accepted_counts == (min(offset + 1, 4),)


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_small_budgets_under_a_large_gamma(budget):
    target = toy_model(1, 4)
    whole = reference.generate(target, toy_model(2, 4), gamma=8, max_new_tokens=12, greedy=True)
    out = reference.generate(target, toy_model(2, 4), gamma=8, max_new_tokens=budget, greedy=True)
    assert out.ids == whole.ids[:budget]
    assert len(out.ids) == budget
    assert out.finish_reason == "length"


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_greedy_speculation_equals_plain_greedy(gamma):
    target = toy_model(7, 3)
    plain = reference.generate(target, None, (2,), gamma=gamma, max_new_tokens=40, greedy=True)
    assert plain.drafted == (0,) * 40
    fast = reference.generate(target, toy_model(8, 3), (2,), gamma=gamma, max_new_tokens=40, greedy=True)
    assert fast.ids == plain.ids
    assert 0 < sum(fast.accepted) < 40


def test_generate_refuses_wrong_calls():
    with pytest.raises(ValueError, match="no rng"):
        reference.generate(toy_model(1, 3), None, gamma=0, max_new_tokens=1)
    with pytest.raises(ValueError, match="gamma -1"):
        reference.generate(toy_model(1, 3), None, gamma=-1, max_new_tokens=1, greedy=True)
    with pytest.raises(ValueError, match="max_new_tokens -1"):
        reference.generate(toy_model(1, 3), None, gamma=0, max_new_tokens=-1, greedy=True)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(0, 9))
def test_a_generation_carries_counters_that_stats_accepts(seed, gamma, budget):
    target, draft = toy_model(1, 4, zeros=True), toy_model(2, 4)
    rng = np.random.default_rng(seed)
    out = reference.generate(target, draft, gamma=gamma, max_new_tokens=budget, eos=(3,), rng=rng)
    row = stats.row_stats(out.place, out.accepted, out.drafted, speculation="on", gamma=gamma)
    assert row["num_rounds"] == len(out.accepted_counts)
    assert row["num_accepted_tokens"] == sum(out.accepted_counts)


# --- the command


def test_the_command_prints_the_worked_example():
    command = [sys.executable, "-W", "error", "-m", "specjax.reference", "--trials", "200000", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    lines = {line[:24].strip(): line[24:] for line in done.stdout.splitlines()}
    frequencies = [float(x) for x in lines["output frequencies"].split()]
    assert frequencies == pytest.approx(P.tolist(), abs=0.006)  # five standard errors
    assert float(lines["empirical acceptance"]) == pytest.approx(0.75, abs=0.005)
    assert float(lines["theoretical acceptance"]) == 0.75
    assert lines["residual"].split() == ["1.0000", "0.0000", "0.0000"]
    assert lines["greedy"] == "p = (0.45, 0.40, 0.15), draft B -> A"


def test_the_command_refuses_no_trials(capsys):
    with pytest.raises(SystemExit) as stop:
        reference.main(["--trials", "0"])
    assert stop.value.code == 2
    assert "--trials 0" in capsys.readouterr().err
