"""What Gemma rounds and what it does not (case 71)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tiny import tiny

from specjax.models import layers


def test_one_plus_the_scale_is_not_rounded_to_bfloat16():
    """1 + 2^-9 is 1 in bfloat16."""
    x = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    scale = jnp.full(16, 2.0**-9, jnp.bfloat16)
    found = layers.RMSNormPlusOne(1e-6).apply({"params": {"scale": scale}}, x)
    exact = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + 2.0**-9)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_the_embedding_scale_has_the_dtype_of_the_weights():
    """The root of 640 is 25.298, and 25.25 in bfloat16: logits of a model without layers' effects follow it."""
    model = tiny("gemma2-softcap")
    config = dataclasses.replace(model.fn.config, width=640, num_layers=0, kinds=(), logit_cap=None, norm="rms")
    for dtype, scale in (("float32", np.float32(640**0.5)), ("bfloat16", np.float32(25.25))):
        fn = dataclasses.replace(model.fn, config=dataclasses.replace(config, norm_eps=1e6), dtype=dtype)
        params = jax.tree.map(lambda leaf: jnp.ones_like(leaf), fn.init_params(jax.random.key(0)))
        found = fn(params, np.asarray([[3]]), fn.init_cache(1, 1), features=True).features
        # With so large an epsilon the norm only divides by its root.
        np.testing.assert_allclose(found, scale / np.sqrt(1e6 + scale**2), rtol=1e-6)


def test_a_soft_cap_bounds_and_keeps_small_values():
    x = jnp.asarray([-1e4, -0.01, 0.0, 0.01, 1e4])
    np.testing.assert_allclose(layers.soft_cap(x, 30.0), [-30.0, -0.01, 0.0, 0.01, 30.0], rtol=1e-6)
    assert layers.soft_cap(x, None) is x


def test_the_gelu_is_the_approximation_by_tanh():
    x = np.linspace(-3, 3, 25, dtype=np.float32)
    tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(layers.ACTIVATIONS["gelu_tanh"](x), tanh, atol=1e-6)
    assert np.abs(np.asarray(layers.ACTIVATIONS["gelu"](x)) - tanh).max() > 1e-4
