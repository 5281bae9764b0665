"""Sums whose bits depend on the summed values alone.

XLA's CPU backend sums the last axis in an order that it chooses by the whole array's shape: a row of 320 numbers has
another last bit in a batch of four than alone. A product with ones has one order for every row, whatever stands beside
it, as long as there are two rows or more (a single one takes another kernel), and costs no more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_COLUMNS = 8  # a matrix product, not a matrix-vector one
BLOCK = 128  # values looked at together where a whole vocabulary is searched


def row_sum(x: jax.Array) -> jax.Array:
    """Return the float32 sum over the last axis, kept as an axis of size 1."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 1:
        rows = jnp.concatenate([rows, rows])
    ones = jnp.ones((_COLUMNS, x.shape[-1]), x.dtype)
    sums = lax.dot_general(rows, ones, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return sums[:count, :1].reshape(*x.shape[:-1], 1)


def row_mean(x: jax.Array) -> jax.Array:
    """Return the mean over the last axis, kept as an axis of size 1."""
    return row_sum(x) / x.shape[-1]


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax over the last axis; -inf gives 0."""
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weights / row_sum(weights)


def log_sum_exp(x: jax.Array) -> jax.Array:
    """Return log sum exp over the last axis, kept as an axis of size 1."""
    top = jnp.max(x, axis=-1, keepdims=True)
    return jnp.log(row_sum(jnp.exp(x - top))) + top


def argmax(x: jax.Array) -> jax.Array:
    """Return the place of the largest value over the last axis, the first of equal ones: int32.

    Block by block: XLA's CPU backend needs ten times as long over a vocabulary at once.
    """
    size = x.shape[-1]
    if size <= 2 * BLOCK:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    rows = jnp.pad(x.reshape(-1, size), ((0, 0), (0, -size % BLOCK)), constant_values=-jnp.inf)
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inner = jnp.argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1)
    return jnp.minimum(block * BLOCK + inner, size - 1).astype(jnp.int32).reshape(x.shape[:-1])
