"""The rejection rule against the plain NumPy reference, decision by decision, and its corner cases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtrc
from toys import keys_of

from specjax import reference
from specjax import sampling as s
from specjax.errors import UsageError
from specjax.types import Proposal, Purpose, RowSampling, Rule
from specjax.verify import RULES, block, greedy, rejection, rule_for


def keys(count: int, seed: int = 0) -> jax.Array:
    base = jnp.broadcast_to(jnp.asarray(s.row_key(seed, 0)), (count, 2))
    return s.fold(base, jnp.arange(count, dtype=jnp.uint32))


def log(p) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.log(jnp.asarray(p, jnp.float32))


def proposal(tokens, q=None, num_drafted=None) -> Proposal:
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, gamma = tokens.shape
    return Proposal(
        tokens=tokens,
        probs=None if q is None else jnp.asarray(q, jnp.float32),
        num_drafted=jnp.full(batch, gamma, jnp.int32) if num_drafted is None else jnp.asarray(num_drafted, jnp.int32),
        finite=jnp.ones(batch, jnp.bool_),
    )


def hot(batch: int, temperature: float = 1.0) -> RowSampling:
    return RowSampling(jnp.full(batch, temperature, jnp.float32))


def random_block(kind: str, seed: int, batch: int = 512, gamma: int = 4, vocab: int = 6):
    """Return logits, drafted tokens and q (None for a deterministic draft) of one kind."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, gamma + 1, vocab)).astype(np.float32) * 1.5
    if kind == "zeros in p":
        logits = np.where(rng.random(logits.shape) < 0.4, -np.inf, logits)
        logits[..., 1] = np.where(np.isneginf(logits).all(-1), 0.0, logits[..., 1])
    p = np.exp(logits[:, :gamma]) / np.exp(logits[:, :gamma]).sum(-1, keepdims=True)
    q = 0.6 * p + 0.4 * rng.dirichlet(np.full(vocab, 0.7), size=(batch, gamma))
    if kind == "one-hot q":
        q = p  # likely drafts, so that whole blocks are accepted too
    if kind == "zeros in q":
        q = np.where(rng.random(q.shape) < 0.4, 0.0, q)
        q[..., 2] += q.sum(-1) == 0
    if kind == "q nearly p":
        q = p * np.exp(0.05 * rng.normal(size=p.shape))
    q = (q / q.sum(-1, keepdims=True)).astype(np.float32)
    tokens = np.argmax(np.where(q > 0, np.log(np.maximum(q, 1e-30)), -np.inf) + rng.gumbel(size=q.shape), axis=-1)
    return logits, tokens, None if kind == "one-hot q" else q


@pytest.mark.parametrize("kind", ["plain", "zeros in p", "zeros in q", "q nearly p", "one-hot q"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_decision_is_that_of_the_reference(kind, seed):
    """512 blocks of 4 drafts; the reference gets the same p, q, uniforms and Gumbel noise."""
    logits, tokens, q = random_block(kind, seed)
    batch, gamma = tokens.shape
    vocab = logits.shape[-1]
    key = keys(batch, seed)
    num_drafted = np.random.default_rng(seed).integers(0, gamma + 1, size=batch)
    given = proposal(tokens, q, num_drafted)
    verdict = jax.jit(rejection.verify)(jnp.asarray(logits), given, hot(batch, 0.9), keys_of(key, gamma))

    p = np.asarray(s.distribution(jnp.asarray(logits), hot(batch, 0.9)).probs)
    uniforms = np.asarray(s.uniforms(s.purpose_key(key, Purpose.ACCEPT), gamma))
    noise = {purpose: gumbel(s.purpose_key(key, purpose), vocab) for purpose in (Purpose.RESIDUAL, Purpose.BONUS)}
    counts = []
    for i in range(batch):
        n = int(num_drafted[i])
        block = (p[i, : n + 1], None if q is None else q[i, :n], tokens[i, :n], uniforms[i, :n])
        expected = reference.decide_round(*block, noise[Purpose.RESIDUAL][i])
        if expected[0] == n:
            expected = reference.decide_round(*block, noise[Purpose.BONUS][i])
        assert (int(verdict.num_accepted[i]), int(verdict.next_token[i])) == expected
        counts.append(expected[0])
    assert len(set(counts)) == gamma + 1  # every length of block occurred


def gumbel(key: jax.Array, vocab: int) -> np.ndarray:
    wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
    return np.asarray(jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32))(wrapped))


def set_uniforms(monkeypatch, value: float) -> None:
    monkeypatch.setattr(s, "uniforms", lambda key, count: jnp.full((key.shape[0], count), value, jnp.float32))


def check_zero_probability(verify, monkeypatch) -> None:
    """Case 9: p(x) = 0 and u = 0 is a rejection, whatever q says; so is p = q = 0."""
    set_uniforms(monkeypatch, 0.0)
    p = [[0.0, 0.25, 0.75]] * 2
    for q in ([[0.9, 0.05, 0.05]], [[0.0, 0.5, 0.5]], None):
        verdict = verify(log([p]), proposal([[0]], None if q is None else [q]), hot(1), keys_of(keys(1), 1))
        assert int(verdict.num_accepted[0]) == 0
        assert int(verdict.next_token[0]) in (1, 2)


@pytest.mark.parametrize("rule", [rejection, block], ids=["rejection", "block"])
def test_a_token_of_probability_zero_is_never_accepted(rule, monkeypatch):
    check_zero_probability(rule.verify, monkeypatch)


def test_the_check_of_probability_zero_sees_a_rule_that_accepts_equality(monkeypatch):
    def mutant(logits, given, sampling, keys):
        p = s.distribution(logits, sampling).probs[:, :-1]
        drafted = given.tokens[..., None]
        q = jnp.ones(drafted.shape) if given.probs is None else jnp.take_along_axis(given.probs, drafted, -1)
        hits = s.uniforms(keys.round, drafted.shape[1])[..., None] * q <= jnp.take_along_axis(p, drafted, -1)
        verdict = rejection.verify(logits, given, sampling, keys)
        return verdict.replace(num_accepted=greedy.leading(hits[..., 0], given.num_drafted))

    with pytest.raises(AssertionError):
        check_zero_probability(mutant, monkeypatch)


def test_a_residual_that_rounds_to_nothing_falls_back_to_p(monkeypatch):
    """q is above p at the draft by one unit in the last place and nowhere below it: p - q has no positive part."""
    set_uniforms(monkeypatch, float(np.nextafter(np.float32(1), np.float32(0))))
    batch = 2000
    half = np.float32(0.5)
    q = np.asarray([[np.nextafter(half, np.float32(1)), half]], np.float32)
    verdict = rejection.verify(
        log([[[0.5, 0.5], [0.5, 0.5]]] * batch),
        proposal([[0]] * batch, [q] * batch),
        hot(batch),
        keys_of(keys(batch), 1),
    )
    assert not np.any(verdict.num_accepted)
    assert 900 < int(np.sum(verdict.next_token)) < 1100  # 4.5 deviations; the fallback is p, not one token


def test_rejected_draws_follow_the_normalised_difference():
    """Case 8: n = 100,000 blocks of one draft, about half rejected; the draws after a rejection over the 3 ids of
    (p - q)_+ are chi-square with 2 degrees, false alarm 1e-5; their softmax would be far off."""
    p = np.asarray([0.42, 0.08, 0.30, 0.15, 0.05])
    q = np.asarray([0.10, 0.45, 0.20, 0.05, 0.20])
    n = 100_000
    drafted = np.random.default_rng(0).choice(5, size=(n, 1), p=q)
    verdict = jax.jit(rejection.verify)(
        jnp.broadcast_to(log([p, p]), (n, 2, 5)),
        proposal(drafted, np.broadcast_to(q, (n, 1, 5))),
        hot(n),
        keys_of(keys(n), 1),
    )
    accepted = np.asarray(verdict.num_accepted) == 1
    alpha = np.minimum(p, q).sum()
    assert abs(accepted.mean() - alpha) < 4.5 * np.sqrt(alpha * (1 - alpha) / n)
    seen = np.bincount(np.asarray(verdict.next_token)[~accepted], minlength=5)
    law = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    assert seen[law == 0].sum() == 0
    expected = seen.sum() * law[law > 0]
    assert chdtrc(2, np.sum((seen[law > 0] - expected) ** 2 / expected)) > 1e-5
    # The bonus after an acceptance is p's: 4 degrees.
    bonus = np.bincount(np.asarray(verdict.next_token)[accepted], minlength=5)
    assert chdtrc(4, np.sum((bonus - bonus.sum() * p) ** 2 / (bonus.sum() * p))) > 1e-5


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("p", "draft", "best"), [((0.3, 0.5, 0.2), 0, 1), ((0.45, 0.40, 0.15), 1, 0)])
def test_a_cold_target_overrules_a_likely_draft(rule, p, draft, best):
    """Case 27: p(a) = .3, p(b) = .5 and a draft a: b."""
    q = None if rule.greedy else [[[0.2, 0.4, 0.4]]]
    verdict = rule.verify(log([[p, p]]), proposal([[draft]], q), hot(1, 0.0), keys_of(keys(1), 1))
    assert (int(verdict.num_accepted[0]), int(verdict.next_token[0])) == (0, best)


def test_leading_counts_up_to_the_first_miss_and_no_further_than_was_drafted():
    hits = jnp.asarray([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], jnp.bool_)
    assert greedy.leading(hits, jnp.asarray([4, 4, 4, 2])).tolist() == [2, 0, 4, 2]


def test_rules_are_found_by_name_or_passed_on():
    assert rule_for("rejection") is rejection.RULE
    mine = Rule("mine", rejection.verify)
    assert rule_for(mine) is mine
    with pytest.raises(UsageError, match="'typo'; known: greedy, rejection, block, coupled"):
        rule_for("typo")
