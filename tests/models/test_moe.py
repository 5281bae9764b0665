"""A mixture of experts against a loop in NumPy: no token dropped, none swayed by its mates."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import moe
from specjax.models.config import Experts

WIDTH = 16


def make(experts: Experts, seed: int = 0):
    layer = moe.Mixture(experts, "silu", jnp.dtype(jnp.float32))
    return layer, nn.unbox(layer.init(jax.random.key(seed), jnp.zeros((1, 1, WIDTH))))


def in_numpy(experts: Experts, params, x: np.ndarray) -> np.ndarray:
    """Do it token by token, in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in params["params"].items() if name != "router"}
    gate, up = (p[name].reshape(experts.count, experts.width, WIDTH) for name in ("gate", "up"))
    down = p["down"].reshape(experts.count, WIDTH, experts.width)
    scores = x @ np.asarray(params["params"]["router"]["kernel"], np.float64).T
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        probs = np.exp(scores[t] - scores[t].max())
        probs /= probs.sum()
        best = np.argsort(-probs)[: experts.top]
        share = probs[best] / (probs[best].sum() if experts.normalised else 1.0)
        for e, weight in zip(best, share, strict=True):
            inner = gate[e] @ token
            out[t] += weight * (down[e] @ (inner / (1 + np.exp(-inner)) * (up[e] @ token)))
    return out


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_it_is_the_weighted_sum_of_the_top_experts(tokens, normalised):
    experts = Experts(6, 3, 12, normalised)
    layer, params = make(experts)
    x = np.random.default_rng(tokens).normal(size=(1, tokens, WIDTH))
    found = layer.apply(params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found[0], in_numpy(experts, params, x[0]), atol=2e-6)


@pytest.mark.parametrize("top", [1, 6])
def test_one_expert_or_all(top):
    experts = Experts(6, top, 12, True)
    layer, params = make(experts)
    x = np.random.default_rng(1).normal(size=(1, 11, WIDTH))
    np.testing.assert_allclose(
        layer.apply(params, jnp.asarray(x, jnp.float32))[0], in_numpy(experts, params, x[0]), atol=2e-6
    )


def test_all_tokens_may_want_the_same_experts():
    """No capacity: 40 equal tokens fill five blocks of each of their experts."""
    experts = Experts(6, 2, 12, True)
    layer, params = make(experts)
    x = np.repeat(np.random.default_rng(2).normal(size=(1, 1, WIDTH)), 40, axis=1)
    found = np.asarray(layer.apply(params, jnp.asarray(x, jnp.float32))[0])
    np.testing.assert_allclose(found, in_numpy(experts, params, x[0]), atol=2e-6)
    np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))


def test_mates_change_no_bit_of_a_token():
    """Invariant 8, at one width: whoever shares its experts, and wherever it stands."""
    experts = Experts(6, 3, 12, True)
    layer, params = make(experts)
    run = jax.jit(layer.apply)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(1, 12, WIDTH)).astype(np.float32)
    whole = np.asarray(run(params, x)[0])
    order = rng.permutation(12)
    np.testing.assert_array_equal(run(params, x[:, order])[0], whole[order])
    other = x.copy()
    other[0, 1:] = rng.normal(size=(11, WIDTH))
    np.testing.assert_array_equal(run(params, other)[0, 0], whole[0])


def test_a_mate_that_is_not_finite_stays_alone():
    experts = Experts(6, 3, 12, True)
    layer, params = make(experts)
    x = np.random.default_rng(4).normal(size=(1, 9, WIDTH)).astype(np.float32)
    clean = np.asarray(layer.apply(params, x)[0])
    x[0, 4] = np.nan
    found = np.asarray(layer.apply(params, x)[0])
    keep = np.arange(9) != 4
    np.testing.assert_array_equal(found[keep], clean[keep])
    assert np.isnan(found[4]).all()


def test_the_loop_runs_over_the_blocks_in_use_only():
    """12 tokens that want experts 0 and 3: two blocks each, and no other expert is asked."""
    asked = []

    def serve(expert, rows):
        jax.debug.callback(lambda e: asked.append(int(e)), expert)
        return rows * (expert + 1)

    x = jnp.arange(12 * 4, dtype=jnp.float32).reshape(12, 4)
    chosen = jnp.tile(jnp.asarray([[3, 0]]), (12, 1))
    found = jax.block_until_ready(moe.dispatch(serve, x, chosen, 64))
    jax.effects_barrier()
    assert sorted(asked) == [0, 0, 3, 3]
    np.testing.assert_array_equal(found[:, 0], 4 * x)
    np.testing.assert_array_equal(found[:, 1], x)
