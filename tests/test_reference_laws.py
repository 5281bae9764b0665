"""The exact laws of the NumPy reference: a round, whole outputs, and the draws that must follow them."""

import functools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from specjax import reference

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


def total_variation(a: dict, b: dict) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


def test_the_law_of_one_round_by_hand():
    law = reference.enumerate_round(lambda _: P, lambda _: Q, (), 1)
    assert {emitted: pytest.approx(chance) for emitted, chance in law.items()} == {
        **{(d, x): min(P[d], Q[d]) * P[x] for d in range(3) for x in range(3)},
        (0,): 0.25,  # all the mass that is rejected lands on A
    }
    assert reference.accepted_law(law, 1) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(("vocab_size", "gamma"), [(2, 2), (3, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_joint_law_of_a_round_padded_by_the_target_is_the_targets(vocab_size, gamma, zeros):
    target, draft = toy_model(11, vocab_size, zeros), toy_model(12, vocab_size, zeros)
    padded: Counter = Counter()
    for emitted, weight in reference.enumerate_round(target, draft, (1,), gamma).items():
        tails = reference.enumerate_outputs(target, gamma + 1 - len(emitted), (), (1, *emitted))
        for tail, chance in tails.items():
            padded[emitted + tail] += weight * chance
    assert total_variation(padded, reference.enumerate_outputs(target, gamma + 1, (), (1,))) < 1e-12


def test_the_expected_tokens_of_a_round_follow_alpha():
    # constant p and q: E[N] = (1 - a^5) / (1 - a), 3.3616 at a = 0.8
    p, q = [0.5, 0.5], [0.3, 0.7]
    law = reference.accepted_law(reference.enumerate_round(lambda _: p, lambda _: q, (), 4), 4)
    assert (law * np.arange(1, 6)).sum() == pytest.approx(3.3616)


@pytest.mark.parametrize("eos", [(), (2,), (0, 2)])
@pytest.mark.parametrize("gamma", [0, 1, 2])
def test_whole_speculative_outputs_have_the_plain_law(gamma, eos):
    target, draft = toy_model(21, 3, zeros=True), toy_model(22, 3)
    plain = reference.enumerate_outputs(target, 4, eos, (1,))
    joint = reference.enumerate_speculative_outputs(target, draft, gamma, 4, eos, (1,))
    outputs: Counter = Counter()
    for (ids, counts), chance in joint.items():
        outputs[ids] += chance
        assert len(ids) - len(counts) <= sum(counts) <= len(ids)
    assert sum(plain.values()) == pytest.approx(1)
    assert total_variation(outputs, plain) < 1e-12
    assert all(not set(ids[:-1]) & set(eos) for ids in outputs)


def test_a_wrong_acceptance_shows_in_the_enumerated_law(monkeypatch):
    """The comparison above bites: acceptance p instead of p / q moves the law of whole outputs."""
    target, draft = toy_model(21, 3), toy_model(22, 3)
    monkeypatch.setattr(reference, "acceptance_probability", lambda p, q, token: float(p[token]))
    joint = reference.enumerate_speculative_outputs(target, draft, 2, 3)
    outputs: Counter = Counter()
    for (ids, _), chance in joint.items():
        outputs[ids] += chance
    assert total_variation(outputs, reference.enumerate_outputs(target, 3)) > 0.01


def test_sampled_generations_follow_the_enumerated_joint_law():
    # n = 20000 draws, cells of expectation >= 5 (the rest pooled), chi-square, false alarm 1e-6
    target, draft = toy_model(31, 3), toy_model(32, 3)
    law = reference.enumerate_speculative_outputs(target, draft, 2, 3, (2,))
    rng = np.random.default_rng(9)
    trials = 20_000
    seen: Counter = Counter()
    for _ in range(trials):
        out = reference.generate(target, draft, gamma=2, max_new_tokens=3, eos=(2,), rng=rng)
        seen[out.ids, out.accepted_counts] += 1
    assert set(seen) <= set(law)
    large = [cell for cell, chance in law.items() if trials * chance >= 5]
    statistic = sum((seen[cell] - trials * law[cell]) ** 2 / (trials * law[cell]) for cell in large)
    pooled = trials * (1 - sum(law[cell] for cell in large))
    if pooled >= 5:
        statistic += (trials - sum(seen[cell] for cell in large) - pooled) ** 2 / pooled
    assert len(large) > 20
    assert statistic < chi2.isf(1e-6, len(large))


def test_a_one_hot_draft_keeps_the_law():
    target = toy_model(41, 3)
    draft = lambda prefix: reference.one_hot(sum(prefix) % 3, 3)  # noqa: E731
    law = reference.enumerate_round(target, draft, (1,), 1)
    p = target((1,))
    assert reference.accepted_law(law, 1) == pytest.approx([1 - p[1], p[1]])
    first: Counter = Counter()
    for emitted, chance in law.items():
        first[emitted[0]] += chance
    assert [first[token] for token in range(3)] == pytest.approx(p.tolist())
