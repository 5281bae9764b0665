"""A mixture of experts with static shapes: every token is served by its top experts, none is dropped."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from specjax.models import layers
from specjax.models.config import Experts
from specjax.numerics import row_sum, softmax

# Tokens of one expert are multiplied in blocks of this many rows, whatever the batch: the bits of a token's result
# never depend on its mates.
ROWS = 8


class Mixture(nn.Module):
    """Softmax routing to the top experts, each a gated MLP.

    The experts' weights stand below one another: gate and up are [E * F, D], down is [E * D, F].
    """

    experts: Experts
    activation: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        e, width = self.experts, x.shape[-1]
        flat = x.reshape(-1, width)
        router = layers.Linear(e.count, ("experts", "embed"), dtype=self.dtype, name="router")(flat)
        weights, chosen = lax.top_k(softmax(router), e.top)  # [R, top]
        if e.normalised:
            weights = weights / row_sum(weights)
        init = layers.declare(nn.initializers.normal(width**-0.5), "experts", "embed")
        narrow = layers.declare(nn.initializers.normal(e.width**-0.5), "experts", None)
        gate = self.param("gate", init, (e.count * e.width, width), self.dtype)
        up = self.param("up", init, (e.count * e.width, width), self.dtype)
        down = self.param("down", narrow, (e.count * width, e.width), self.dtype)
        activation = layers.ACTIVATIONS[self.activation]

        def serve(expert, rows):
            def part(stacked, size):
                return lax.dynamic_slice_in_dim(stacked, expert * size, size, axis=0)

            inner = activation(layers.matmul(rows, part(gate, e.width))) * layers.matmul(rows, part(up, e.width))
            return layers.matmul(inner, part(down, width))

        served = dispatch(serve, flat, chosen, e.count)
        return jnp.sum(served * weights[..., None], axis=1).reshape(x.shape)


def dispatch(serve, x: jax.Array, chosen: jax.Array, count: int) -> jax.Array:
    """Send each token to its experts, in blocks of ROWS tokens of one expert.

    The loop runs over the blocks that are needed: at most one more than full for each expert in use.

    Args:
        serve: ``(expert, rows [ROWS, D]) -> [ROWS, D]``.
        x: [R, D].
        chosen: [R, top], distinct experts of each token.
        count: how many experts.

    Returns:
        [R, top, D]: what each chosen expert makes of the token.
    """
    num_tokens, top = chosen.shape
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)  # pairs (token, place), grouped by expert
    sizes = jnp.bincount(expert, length=count)
    first_pair = jnp.cumsum(sizes) - sizes
    blocks = (sizes + ROWS - 1) // ROWS
    last_block = jnp.cumsum(blocks)
    first_block = last_block - blocks

    def block(index, out):
        which = jnp.searchsorted(last_block, index, side="right")
        place = (index - first_block[which]) * ROWS + jnp.arange(ROWS)
        pair = order[jnp.minimum(first_pair[which] + place, num_tokens * top - 1)]
        pair = jnp.where(place < sizes[which], pair, num_tokens * top)  # past the end: dropped
        rows = jnp.take(x, pair // top, axis=0, mode="fill", fill_value=0)
        return out.at[pair].set(serve(which, rows), mode="drop")

    out = jnp.zeros((num_tokens * top, x.shape[-1]), jnp.float32)
    return lax.fori_loop(0, last_block[-1], block, out).reshape(num_tokens, top, x.shape[-1])
