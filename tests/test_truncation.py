"""min-p, top-k and top-p: the sets of a sort, ties included, whatever the way they are found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import numerics, truncation, vocabulary
from specjax import sampling as s
from specjax.reference_transforms import REACHED, sampled
from specjax.sampling import SamplingParams

V = 1000
truncate = jax.jit(truncation.truncate)


def kept(weights: np.ndarray, *rows: SamplingParams) -> np.ndarray:
    """Return which tokens [B, V] are left of log weights [B, V]."""
    weights = np.asarray(weights, np.float32)
    weights = weights - weights.max(-1, keepdims=True)
    given = s.stack(list(rows), s.Features(truncation=True)).truncation
    assert given is not None
    return np.asarray(truncate(jnp.asarray(weights)[:, None], given))[:, 0] > -np.inf


def by_sort(weights: np.ndarray, row: SamplingParams) -> tuple[np.ndarray, bool]:
    """Return which tokens a sort keeps, and whether rounding could decide otherwise: the mass at a step is at p."""
    weights = np.asarray(weights, np.float32)
    scores = np.asarray(weights - weights.max(), np.float64)
    p = sampled(scores, row)
    whole = sampled(scores, SamplingParams(temperature=1.0, min_p=row.min_p, top_k=row.top_k))
    steps = np.cumsum(np.sort(whole)[::-1])
    return p > 0, bool(row.top_p < 1 and np.min(np.abs(steps - (row.top_p - REACHED))) < 1e-6)


ROWS = [
    SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m)
    for k in (0, 1, 2, 50, 64, 65, 300, 999, 1000, 5000)
    for p in (1e-8, 0.3, 0.9, 0.999, 1.0)
    for m in (0.0, 0.05, 1.0)
]


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_sets_equal_those_of_a_sort(sharpness, ties):
    """150 settings on flat and sharp rows, with and without many equal values: candidates and bisection both decide."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(len(ROWS), V)) * sharpness
    if ties:
        weights = np.round(weights / sharpness * 2) * sharpness / 2
    found = kept(weights, *ROWS)
    compared = 0
    for row, params in enumerate(ROWS):
        expected, open_ = by_sort(weights[row], params)
        if not open_:
            compared += 1
            np.testing.assert_array_equal(found[row], expected, err_msg=str(params))
    assert compared > 120
    assert 0 < found.sum(1).min() < 65 < found.sum(1).max()


def test_what_the_candidates_cannot_decide_is_found_by_bisection(monkeypatch):
    """Both ways give one set: the same rows with room for 64 candidates and for 4."""
    weights = np.random.default_rng(1).normal(size=(len(ROWS), V))
    many = kept(weights, *ROWS)
    monkeypatch.setattr(truncation, "CANDIDATES", 4)
    monkeypatch.setattr(f"{__name__}.truncate", jax.jit(lambda *args: truncation.truncate(*args)))
    np.testing.assert_array_equal(kept(weights, *ROWS), many)


def test_a_rows_set_does_not_depend_on_its_mates():
    weights = np.random.default_rng(2).normal(size=(len(ROWS), V))
    together = kept(weights, *ROWS)
    for row in range(0, len(ROWS), 10):
        np.testing.assert_array_equal(kept(weights[row : row + 1], ROWS[row])[0], together[row])


@pytest.mark.parametrize(
    ("probs", "p", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, [0, 1]),  # case 32
        ([0.5, 0.3, 0.15, 0.05], 0.8, [0, 1]),  # reached exactly
        ([0.5, 0.3, 0.15, 0.05], 0.5, [0]),
        ([0.5, 0.3, 0.15, 0.05], 0.8001, [0, 1, 2]),
        ([0.4, 0.2, 0.2, 0.2], 0.5, [0, 1, 2, 3]),  # tied with the one that crosses
        ([0.25, 0.25, 0.25, 0.25], 1e-8, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.3, 0.0], 1e-8, [0]),
        ([0.4, 0.3, 0.3, 0.0], 1.0, [0, 1, 2]),
    ],
)
def test_top_p_keeps_the_token_that_crosses_and_its_ties(probs, p, expected):
    with np.errstate(divide="ignore"):
        found = kept(np.log([probs]), SamplingParams(temperature=1.0, top_p=p))
    assert np.flatnonzero(found[0]).tolist() == expected


@pytest.mark.parametrize(("k", "expected"), [(0, 4), (1, 1), (2, 3), (3, 3), (4, 4), (9, 4)])
def test_top_k_keeps_ties_with_the_kth_and_everything_at_0_and_past_the_vocabulary(k, expected):
    """Case 33."""
    found = kept(np.log([[0.5, 0.2, 0.2, 0.1]]), SamplingParams(temperature=1.0, top_k=k))
    assert np.flatnonzero(found[0]).tolist() == list(range(expected))


def test_min_p_comes_before_top_k_and_top_p_renormalises_what_they_leave():
    """Of (.5, .3, .15, .05) top-k 2 leaves (.625, .375): top-p .6 then keeps the first alone, and .63 both."""
    probs = np.log([[0.5, 0.3, 0.15, 0.05]] * 3)
    found = kept(
        probs,
        SamplingParams(temperature=1.0, top_k=2, top_p=0.6),
        SamplingParams(temperature=1.0, top_k=2, top_p=0.63),
        SamplingParams(temperature=1.0, min_p=0.5, top_k=3),
    )
    assert [np.flatnonzero(row).tolist() for row in found] == [[0], [0, 1], [0, 1]]


@pytest.mark.parametrize("size", [5, 64, 256, 20_000, 49_152])
def test_the_largest_are_those_of_top_k_and_the_first_of_ties_comes_first(size):
    x = np.random.default_rng(3).normal(size=(5, size)).astype(np.float32)
    x[1] = np.round(x[1]) + 0.0  # -0 sorts below 0
    x[2] = -np.inf
    x[2, size // 2] = 1.0
    count = min(64, size)
    values, ids = jax.jit(vocabulary.largest, static_argnums=1)(x, count)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=1))
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(numerics.argmax(jnp.asarray(x)), np.argmax(x, axis=-1))


def test_draws_among_few_are_the_draws_among_all():
    rng = np.random.default_rng(4)
    weights = np.full((300, V), -np.inf, np.float32)
    for row in weights:
        row[rng.choice(V, size=rng.integers(1, 65), replace=False)] = rng.normal()
    keys = s.fold(jnp.broadcast_to(jnp.asarray(s.row_key(0, 0)), (300, 2)), jnp.arange(300, dtype=jnp.uint32))
    draws = [jax.jit(s.draw, static_argnames="few")(weights, keys, few=few) for few in (False, True)]
    np.testing.assert_array_equal(*draws)
    crowded = weights.copy()
    crowded[7] = 0.0
    draws = [jax.jit(s.draw, static_argnames="few")(crowded, keys, few=few) for few in (False, True)]
    np.testing.assert_array_equal(*draws)


def test_noise_of_some_ids_is_that_of_all_and_jaxs_own():
    key = jnp.asarray(s.row_key(0, 0))
    whole = jax.random.gumbel(jax.random.wrap_key_data(key, impl="threefry2x32"), (V,), jnp.float32)
    ids = np.random.default_rng(5).integers(0, V, size=40)
    np.testing.assert_array_equal(jax.jit(s.gumbel)(key, jnp.arange(V)), whole)
    np.testing.assert_array_equal(jax.jit(s.gumbel)(key, jnp.asarray(ids)), np.asarray(whole)[ids])
