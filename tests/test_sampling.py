"""Logits to distributions, draws, keys."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtrc

from specjax import sampling as s
from specjax.errors import RowError
from specjax.types import Purpose, RowSampling


def temperatures(*values: float) -> RowSampling:
    return RowSampling(jnp.asarray(values, jnp.float32))


def keys(count: int, seed: int = 0) -> jax.Array:
    base = jnp.broadcast_to(jnp.asarray(s.row_key(seed, 0)), (count, 2))
    return s.fold(base, jnp.arange(count, dtype=jnp.uint32))


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_wrong_temperature_is_refused(temperature):
    with pytest.raises(RowError, match="temperature"):
        s.SamplingParams(temperature=temperature)


def test_temperature_divides_the_logits():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32) * 3
    found = s.distribution(logits, temperatures(1.0, 0.5))
    scaled = np.asarray(logits, np.float64) / np.asarray([1.0, 0.5])[:, None, None]
    expected = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    np.testing.assert_allclose(found.probs, expected, rtol=2e-6)
    back = jnp.exp(found.log_weights - jax.nn.logsumexp(found.log_weights, axis=-1, keepdims=True))
    np.testing.assert_allclose(back, expected, rtol=2e-6)


def test_zero_is_one_hot_at_the_lowest_of_equal_ids():
    """Case 30: logits [1, 1, 0] give id 0, alone and beside a row that samples."""
    logits = jnp.broadcast_to(jnp.asarray([1.0, 1.0, 0.0]), (2, 1, 3))
    found = s.distribution(logits, temperatures(0.0, 1.0))
    assert found.probs[0, 0].tolist() == [1.0, 0.0, 0.0]
    assert np.isneginf(found.log_weights[0, 0]).tolist() == [False, True, True]
    np.testing.assert_allclose(found.probs[1, 0], np.exp([1, 1, 0]) / np.exp([1, 1, 0]).sum(), rtol=1e-6)
    drawn = [int(s.draw(found.log_weights[:1, 0], keys(1, seed))[0]) for seed in range(20)]
    assert drawn == [0] * 20


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-37, 1e-38, 1.2e-38])
def test_a_tiny_temperature_is_nearly_greedy_and_never_nan(temperature):
    """Dividing by it overflows float32."""
    logits = jnp.asarray([[[-30.0, 25.0, 40.0, 3.0, -jnp.inf]]])
    found = s.distribution(logits, temperatures(temperature))
    np.testing.assert_array_equal(found.probs[0, 0], [0, 0, 1, 0, 0])
    assert int(s.draw(found.log_weights[:, 0], keys(1))[0]) == 2


def test_what_rounds_to_zero_is_never_drawn():
    """A weight may be finite while its probability is not above zero."""
    logits = jnp.asarray([[[0.0, -200.0, -jnp.inf]]])
    found = s.distribution(logits, temperatures(1.0))
    assert found.probs[0, 0].tolist() == [1.0, 0.0, 0.0]
    assert np.isneginf(found.log_weights[0, 0, 1:]).all()


def test_draws_follow_the_weights():
    """n = 100,000 draws over 6 ids, one of probability zero: chi-square with 4 degrees, false alarm 1e-5."""
    p = np.asarray([0.5, 0.25, 0.15, 0.0999, 0.0001, 0.0])
    with np.errstate(divide="ignore"):
        weights = jnp.log(jnp.asarray(p, jnp.float32))
    n = 100_000
    drawn = jax.jit(s.draw)(jnp.broadcast_to(weights, (n, 6)), keys(n))
    seen = np.bincount(drawn, minlength=6)
    assert seen[5] == 0
    statistic = np.sum((seen[:5] - n * p[:5]) ** 2 / (n * p[:5]))
    assert chdtrc(4, statistic) > 1e-5


def test_uniforms_are_uniform_and_differ_by_place_and_row():
    """n = 60,000 numbers in 20 equal cells: chi-square with 19 degrees, false alarm 1e-5."""
    u = np.asarray(jax.jit(s.uniforms, static_argnums=1)(keys(20_000), 3))
    assert u.shape == (20_000, 3)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    seen = np.histogram(u, bins=20, range=(0, 1))[0]
    assert chdtrc(19, np.sum((seen - 3000) ** 2 / 3000)) > 1e-5
    assert len(np.unique(u)) > 59_000
    assert np.abs(np.corrcoef(u.T) - np.eye(3)).max() < 5 / np.sqrt(20_000)


def test_a_longer_block_keeps_the_numbers_of_a_shorter_one():
    np.testing.assert_array_equal(s.uniforms(keys(3), 2), s.uniforms(keys(3), 5)[:, :2])


def test_noise_is_indexed_by_token_id():
    """Invariant 7: a padded vocabulary draws the same tokens."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(500, 128)), jnp.float32)
    padded = jnp.pad(weights, ((0, 0), (0, 4)), constant_values=-jnp.inf)
    np.testing.assert_array_equal(s.draw(weights, keys(500)), s.draw(padded, keys(500)))


def test_tiny_differences_of_logits_flip_hardly_any_draw():
    """Invariant 7: Gumbel-max, not an inverse CDF, which flips 1-5% of tokens at 1e-5."""
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(2000, 512)).astype(np.float32) * 2
    other = weights + rng.uniform(-1e-5, 1e-5, size=weights.shape).astype(np.float32)
    draw = jax.jit(s.draw)
    assert int(jnp.sum(draw(weights, keys(2000)) != draw(other, keys(2000)))) <= 2


def test_purposes_and_places_have_keys_of_their_own():
    key = keys(2)
    made = [s.purpose_key(key, purpose) for purpose in Purpose]
    made += [s.fold(s.purpose_key(key, purpose), place) for purpose in Purpose for place in range(4)]
    made += [key, s.fold(key, 17)]
    pairs = {tuple(row.tolist()) for part in made for row in np.asarray(part)}
    assert len(pairs) == 2 * len(made)


def test_row_keys_follow_from_seed_id_and_sample_alone():
    """Ids that differ by type alone, seeds that differ past 32 bits, and samples all have keys of their own."""
    asked = [
        (seed, row_id, sample)
        for seed in (0, 1, -1, 2**32, 2**32 + 1, 2**40)
        for row_id in (1, "1", 2, "a", '"1"', "", "é")
        for sample in (0, 1, 31)
    ]
    made = {tuple(s.row_key(*args).tolist()) for args in asked}
    assert len(made) == len(asked)
    assert [s.row_key(*args).tolist() for args in asked] == [s.row_key(*args).tolist() for args in asked]
    assert s.row_key(0, 1).dtype == np.uint32


def test_row_keys_are_pinned():
    """A seed means the same draws in every version: what users pass on with ``--seed`` stays true."""
    assert s.row_key(0, 1).tolist() == [2199263458, 2399799505]
    assert s.row_key(7, "row", 3).tolist() == [1979095790, 2536238337]


@pytest.mark.parametrize(("one", "other"), [(69235, 95303), (88277, 102584), (17548, 180193)])
def test_ids_whose_hashes_agree_in_32_bits_have_different_keys(one, other):
    """Of 100,000 rows two would likely collide, and would be given the same draws."""
    words = [hashlib.sha256(str(i).encode()).digest()[:4] for i in (one, other)]
    assert words[0] == words[1]
    assert s.row_key(0, one).tolist() != s.row_key(0, other).tolist()
