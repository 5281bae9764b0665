"""Layers against their formulas: rotary kinds, chunked attention, the norm, the product."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import attention, layers
from specjax.models.config import RopeConfig

LLAMA3 = RopeConfig(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def test_default_frequencies():
    found, scale = layers.rope_frequencies(RopeConfig(rope_theta=10000.0), 8, 2048)
    np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-12)
    assert scale == 1.0


def test_linear_scaling_divides_every_frequency():
    found, scale = layers.rope_frequencies(RopeConfig("linear", 10000.0, factor=4.0), 8, 2048)
    np.testing.assert_allclose(found, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-12)
    assert scale == 1.0


@pytest.mark.parametrize("position", [0, 1000, 8000, 60000])
def test_llama3_angles_at_near_and_far_positions(position):
    """Case 62: the piecewise formula of Llama 3.1, in float64; float32 angles of 60,000 are good to 0.004."""
    frequencies, scale = layers.rope_frequencies(LLAMA3, 128, 131072)
    expected = []
    for i in range(64):
        frequency = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 8
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        expected.append(frequency)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
    assert scale == 1.0
    cos, sin = layers.rope_angles(frequencies, scale, jnp.asarray([[position]]))
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(position * np.asarray(expected)), atol=1.3e-7 * position + 1e-6)
    np.testing.assert_allclose(sin[0, 0, 0], np.sin(position * np.asarray(expected)), atol=1.3e-7 * position + 1e-6)


def test_llama3_keeps_the_fast_and_slows_the_slow():
    """By hand: wavelength of pair 0 is 6.3 (kept), of the last 3e6 (an eighth)."""
    found, _ = layers.rope_frequencies(LLAMA3, 128, 131072)
    plain, _ = layers.rope_frequencies(RopeConfig(rope_theta=500000.0), 128, 131072)
    ratio = plain / found
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert np.all(np.diff(ratio) >= -1e-9)


def test_yarn_by_hand():
    """H = 8, theta 10000, factor 4, 64 positions: the ramp runs from pair 0 to pair 2 (0, 1/2, 1, 1).

    The pair that turns r times in 64 positions is 8 ln(64 / (2 pi r)) / (2 ln 10000): -0.50 for r = 32, floored and
    clipped to 0; 1.008 for r = 1, rounded up to 2.
    """
    rope = RopeConfig("yarn", 10000.0, factor=4.0, original_max_position_embeddings=64)
    found, scale = layers.rope_frequencies(rope, 8, 256)
    np.testing.assert_allclose(found, [1.0, 0.1 * (1 / 8 + 1 / 2), 0.0025, 0.00025], rtol=1e-12)
    assert scale == pytest.approx(1.1386294361119891)  # 0.1 ln 4 + 1


def test_yarn_without_truncation_uses_the_pair_numbers_as_they_are():
    rope = RopeConfig("yarn", 10000.0, factor=4.0, original_max_position_embeddings=64, truncate=False)
    found, _ = layers.rope_frequencies(rope, 8, 256)
    high = 8 * math.log(64 / (2 * math.pi)) / (2 * math.log(10000.0))
    ramp = np.clip(np.arange(4) / high, 0, 1)
    np.testing.assert_allclose(found, np.asarray([1, 0.1, 0.01, 0.001]) * (ramp / 4 + 1 - ramp), rtol=1e-9)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(fields, scale):
    rope = RopeConfig("yarn", 10000.0, factor=4.0, original_max_position_embeddings=64)
    assert layers.rope_frequencies(dataclasses.replace(rope, **fields), 8, 256)[1] == pytest.approx(scale)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'ntk'"):
        layers.rope_frequencies(dataclasses.replace(LLAMA3, rope_type="ntk"), 8, 64)  # type: ignore[arg-type]


def test_rotation_turns_the_halves_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 2, 3, 8)).astype(np.float32)
    frequencies, _ = layers.rope_frequencies(RopeConfig(), 8, 64)
    positions = np.asarray([[0, 5, 9]])
    found = layers.rotate(jnp.asarray(x), layers.rope_angles(frequencies, 1.0, jnp.asarray(positions)))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[0][:, None] * frequencies)
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


def softmax_attention(q, k, v, start, scale):
    """Attend in float64, row by row, over what each token sees."""
    out = np.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for b, n, t in np.ndindex(*q.shape[:3]):
        seen = slice(0, start[b] + t + 1)
        scores = k[b, n // share, seen].astype(np.float64) @ q[b, n, t] * scale
        weights = np.exp(scores - scores.max())
        out[b, n, t] = weights / weights.sum() @ v[b, n // share, seen]
    return out


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_attention_over_chunks_is_a_softmax_over_what_is_seen(heads):
    """Rows that end before, at and after the edge of a chunk; what lies past a row's tokens is large garbage."""
    rng = np.random.default_rng(1)
    start = np.asarray([0, kv.CHUNK - 3, kv.CHUNK - 2, kv.CHUNK + 40])
    num_new, size = 3, 8
    q = rng.normal(size=(4, heads[0], num_new, size)).astype(np.float32)
    k, v = (rng.normal(size=(4, heads[1], 3 * kv.CHUNK, size)).astype(np.float32) for _ in range(2))
    for row, first in enumerate(start + num_new):
        k[row, :, first:], v[row, :, first:] = 1e3, -1e6
    found = jax.jit(attention.chunks)(q, k, v, jnp.asarray(start, jnp.int32), 0.5)
    np.testing.assert_allclose(found, softmax_attention(q, k, v, start, 0.5), atol=2e-6)


def test_a_longer_mate_and_a_larger_cache_change_no_bit():
    """Invariant 8: chunks that a row does not need are a factor of 1 and a sum with 0."""
    rng = np.random.default_rng(2)
    q = rng.normal(size=(2, 4, 3, 8)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2, 2 * kv.CHUNK, 8)).astype(np.float32) for _ in range(2))
    attend = jax.jit(attention.chunks)
    with_long_mate = attend(q, k, v, jnp.asarray([50, 200], jnp.int32), 0.3)
    with_short_mate = attend(q, k, v, jnp.asarray([50, 2], jnp.int32), 0.3)
    grown = [np.pad(x, ((0, 0), (0, 0), (0, 6 * kv.CHUNK), (0, 0)), constant_values=7.0) for x in (k, v)]
    in_large_cache = attend(q, *grown, jnp.asarray([50, 200], jnp.int32), 0.3)
    np.testing.assert_array_equal(with_long_mate[0], with_short_mate[0])
    np.testing.assert_array_equal(with_long_mate, in_large_cache)


def test_the_norm_divides_by_the_root_of_the_mean_square():
    x = np.random.default_rng(3).normal(size=(2, 3, 16)).astype(np.float32) * 5
    scale = np.linspace(0.5, 2.0, 16, dtype=np.float32)
    found = layers.RMSNorm(1e-2).apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(found, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * scale, rtol=1e-5)


def test_a_bfloat16_product_accumulates_in_float32():
    """4096 products of 1 and one of 2^-9: bfloat16 sums stop at 256."""
    weight = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(layers.matmul(jnp.ones((1, 4096)), weight)[0, 0]) == 4096.0
    assert layers.matmul(jnp.ones((1, 4096)), weight).dtype == jnp.float32


def test_a_linear_layer_adds_its_bias():
    layer = layers.Linear(2, bias=True, axes=("mlp", "embed"))
    params = {"kernel": jnp.asarray([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), "bias": jnp.asarray([10.0, 20.0])}
    assert layer.apply({"params": params}, jnp.asarray([1.0, 1.0, 1.0])).tolist() == [16.0, 21.0]
