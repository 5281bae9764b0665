"""Layers that families share: linear [out, in], norms, rotary embedding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.models.config import RopeConfig
from specjax.numerics import row_mean


def precision_of(dtype) -> lax.Precision:
    """Return HIGHEST for float32 (accelerators use less by default), DEFAULT otherwise."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def declare(initialiser: Callable[..., jax.Array], *axes: str | None) -> Callable[..., Any]:
    """Return an initialiser that also says the parameter's logical axes (``specjax.sharding.RULES``)."""
    return nn.with_logical_partitioning(initialiser, axes)


def matmul(x: jax.Array, weight: jax.Array, dtype=None) -> jax.Array:
    """Return ``x @ weight.T`` in float32; x [..., in] and weight [out, in] are multiplied in ``dtype``.

    The default is the weight's own. Where it is another, both products of the backward pass are of ``dtype`` as well
    and accumulate in float32, and the weight's gradient keeps the weight's precision.
    """
    # As one matrix: XLA's CPU backend is 1.7 times slower on a bfloat16 product with two leading axes.
    rows = x.reshape(-1, x.shape[-1])
    product: Any
    if dtype is None or weight.dtype == dtype:
        product = _dot(weight.dtype, rows, weight)
    else:
        product = _mixed_product(jnp.dtype(dtype), rows, weight)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def _dot(dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a [M, K] times b [N, K] transposed: of the forms of a product the fastest on a CPU in bfloat16.

    One row alone would be multiplied in float32 there, with a copy of the weight twice its size: it gets a second.
    """
    alone = a.shape[0] == 1 and dtype == jnp.bfloat16
    product = lax.dot_general(
        jnp.pad(a.astype(dtype), ((0, int(alone)), (0, 0))),
        b.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=precision_of(dtype),
        preferred_element_type=jnp.float32,
    )
    return product[:1] if alone else product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed_product(dtype, rows: jax.Array, weight: jax.Array) -> jax.Array:
    return _dot(dtype, rows, weight)


def _mixed_forward(dtype, rows: jax.Array, weight: jax.Array):
    return _dot(dtype, rows, weight), (rows, weight)


def _mixed_backward(dtype, held, grad: jax.Array):
    rows, weight = held
    grad_rows = _dot(dtype, grad, weight.astype(dtype).T)
    grad_weight = _dot(dtype, grad.astype(dtype).T, rows.astype(dtype).T)
    return grad_rows.astype(rows.dtype), grad_weight.astype(weight.dtype)


_mixed_product.defvjp(_mixed_forward, _mixed_backward)


class Linear(nn.Module):
    """A projection with its weight stored [out, in]; float32 out. ``axes`` are the logical axes of out and in."""

    features: int
    axes: tuple[str, str]
    bias: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        kernel = self.param("kernel", declare(init, *self.axes), (self.features, x.shape[-1]), self.dtype)
        y = matmul(x, kernel, self.dtype)
        if self.bias:
            y = y + self.param("bias", declare(nn.initializers.zeros, self.axes[0]), (self.features,), jnp.float32)
        return y


class RMSNorm(nn.Module):
    """Root mean square norm (1910.07467) in float32."""

    eps: float
    axis: str | None = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", declare(nn.initializers.ones, self.axis), (x.shape[-1],), jnp.float32)
        return x * lax.rsqrt(row_mean(x * x) + self.eps) * scale.astype(jnp.float32)


class RMSNormPlusOne(nn.Module):
    """RMSNorm that scales by 1 + w: in float32, where bfloat16 would round the sum."""

    eps: float
    axis: str | None = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", declare(nn.initializers.zeros, self.axis), (x.shape[-1],), jnp.float32)
        return x * lax.rsqrt(row_mean(x * x) + self.eps) * (1.0 + scale.astype(jnp.float32))


class LayerNorm(nn.Module):
    """Layer norm (1607.06450) with scale and bias, in float32."""

    eps: float
    axis: str | None = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", declare(nn.initializers.ones, self.axis), (x.shape[-1],), jnp.float32)
        bias = self.param("bias", declare(nn.initializers.zeros, self.axis), (x.shape[-1],), jnp.float32)
        x = x - row_mean(x)
        return x * lax.rsqrt(row_mean(x * x) + self.eps) * scale + bias


NORMS = {"rms": RMSNorm, "rms_plus_one": RMSNormPlusOne, "layer": LayerNorm}
ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
}


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return ``cap * tanh(x / cap)``, or x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[np.ndarray, float]:
    """Return the inverse frequencies [R / 2] and the factor that scales cos and sin; R of the H dimensions turn.

    The kinds follow transformers' ``modeling_rope_utils``: default, linear, llama3, and yarn (2309.00071).
    """
    base = rope.rope_theta
    head_dim = int(head_dim * rope.partial_rotary_factor)
    inverse = 1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "default":
        return inverse, 1.0
    if rope.rope_type == "linear":
        return inverse / rope.factor, 1.0
    original = rope.original_max_position_embeddings or max_positions
    if rope.rope_type == "llama3":
        turns = original * inverse / (2 * math.pi)
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inverse / rope.factor + smooth * inverse, 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inverse, head_dim, original)
    raise ValueError(f"rope_type {rope.rope_type!r} is not known: expected default, linear, llama3 or yarn.")


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int, original: int) -> tuple[np.ndarray, float]:
    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = inverse / rope.factor * ramp + inverse * (1 - ramp)

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return frequencies, mscale(1.0)


def rope_angles(frequencies: np.ndarray, scale: float, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin [B, 1, T, R / 2] for positions [B, T]."""
    angles = positions[:, None, :, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply the rotary embedding to x [B, heads, T, H]: of the dimensions that turn, half pairs with half."""
    cos, sin = angles
    turning = 2 * cos.shape[-1]
    if turning < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turning], angles), x[..., turning:]], axis=-1)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
