"""Layers in a loop: compile time that does not grow with depth.

Layers that are alike are stacked and a ``lax.scan`` runs over them; where kinds alternate (windows), one turn runs a
whole period. The caches are the scan's carry and are written in place. Layers past the last whole period stay as they
are. XLA's CPU backend copies each layer's weights out of the stack at every step, so there unrolled layers are faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from specjax import cache as kv
from specjax.models.blocks import Block
from specjax.models.config import DecoderConfig
from specjax.types import Cache, Params

STACK = "stack"


def period(config: DecoderConfig) -> int:
    """Return after how many layers the kinds begin again."""
    kinds = [config.kind(i) for i in range(config.num_layers)]
    sizes = range(1, config.num_layers + 1)
    return next(size for size in sizes if all(kinds[i] == kinds[i % size] for i in range(len(kinds))))


def num_stacked(config: DecoderConfig) -> int:
    """Return how many layers, from the first on, are stacked."""
    return config.num_layers - config.num_layers % period(config)


def stack(config: DecoderConfig, params: Params) -> dict[str, Any]:
    """Return parameters with ``stack``: for each place in the period, the layers there along a new first axis.

    Where ``params`` is the caller's only hold on them, layers are freed as they are stacked.
    """
    found = dict(params)
    size, count = period(config), num_stacked(config)
    stacks = {}
    for place in range(size):
        layers = [found.pop(f"layers_{i}") for i in range(place, count, size)]
        stacks[str(place)] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {**found, STACK: stacks}


def init_cache(config: DecoderConfig, batch: int, capacity: int, dtype) -> Cache:
    """Return an empty cache: [B, L / period, G, S, H] for each place in the period, then the layers left over."""
    size, count = period(config), num_stacked(config)
    shape = (batch, config.num_kv_heads, kv.round_up(capacity), config.head_dim)
    shapes = [(batch, count // size, *shape[1:])] * size + [shape] * (config.num_layers - count)
    k, v = (tuple(jnp.zeros(each, dtype) for each in shapes) for _ in range(2))
    return Cache(k=k, v=v, length=jnp.zeros((batch,), jnp.int32))


def run(config: DecoderConfig, dtype, attention: str, stacks: Mapping[str, Params], x, keys, values, start, angles):
    """Run the stacked layers.

    Args:
        config, dtype, attention: as a Block takes them.
        stacks: ``params["stack"]``.
        x: [B, T, D] float32.
        keys, values: the cache's buffers of each place in the period.
        start: [B] int32.
        angles: by rotary embedding.

    Returns:
        x, keys, values.
    """
    size = period(config)
    blocks = [Block(config, config.kind(i), dtype, attention, parent=None) for i in range(size)]

    def turn(carry, layers):
        x, keys, values = carry
        params, index = layers
        keys, values = list(keys), list(values)
        for i, block in enumerate(blocks):
            k, v = kv.Layer(keys[i], index), kv.Layer(values[i], index)
            given = {"params": params[str(i)]}
            x, k, v = cast(Any, block.apply(given, x, k, v, start, angles[config.rope_of(i)]))
            keys[i], values[i] = k.buffer, v.buffer
        return (x, tuple(keys), tuple(values)), None

    turns = jnp.arange(num_stacked(config) // size)
    (x, keys, values), _ = lax.scan(turn, (x, tuple(keys), tuple(values)), (dict(stacks), turns))
    return x, keys, values
