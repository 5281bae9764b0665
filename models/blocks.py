"""What a decoder's layers are built of: attention, the MLP, and the block around both."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import sharding
from specjax.models import layers
from specjax.models.attention import ATTENTION, packed
from specjax.models.config import DecoderConfig, LayerKind
from specjax.models.moe import Mixture

Angles = tuple[jax.Array, jax.Array]


class Attention(nn.Module):
    """Grouped-query attention; writes its T new entries, then attends."""

    config: DecoderConfig
    kind: LayerKind
    dtype: jnp.dtype
    attention: str

    @nn.compact
    def __call__(self, x, k, v, start, angles: Angles | None):
        c = self.config

        def heads(name: str, count: int) -> jax.Array:
            axis = "heads" if name == "q" else "kv_heads"
            y = layers.Linear(count * c.head_dim, (axis, "embed"), c.qkv_bias, self.dtype, name=name)(x)
            if c.qk_norm == "whole" and name != "v":
                y = layers.NORMS[c.norm](c.norm_eps, axis, name=f"{name}_norm")(y)
            y = y.reshape(*x.shape[:2], count, c.head_dim).swapaxes(1, 2)
            if c.qk_norm == "head" and name != "v":
                y = layers.NORMS[c.norm](c.norm_eps, None, name=f"{name}_norm")(y)
            return y if angles is None or name == "v" else layers.rotate(y, angles)

        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        q, new_k, new_v = heads("q", c.num_heads), heads("k", c.num_kv_heads), heads("v", c.num_kv_heads)
        if isinstance(start, kv.Packed):
            mixed = packed(q, new_k, new_v, start, scale, self.kind.window, c.attention_cap, self.dtype)
        else:
            mixed, k, v = self._cached(q, new_k, new_v, k, v, start, scale)
        mixed = mixed.swapaxes(1, 2).reshape(*x.shape[:2], c.num_heads * c.head_dim)
        return layers.Linear(c.width, ("embed", "heads"), c.out_bias, self.dtype, name="out")(mixed), k, v

    def _cached(self, q, new_k, new_v, k, v, start, scale: float):
        """Write the new entries and attend: each device to those it holds, so no entry of a cache ever travels."""

        def attend(q, new_k, new_v, k, v, start):
            k, v = kv.write(k, new_k, start), kv.write(v, new_v, start)
            cap = self.config.attention_cap
            return ATTENTION[self.attention].attend(q, k, v, start, scale, self.kind.window, cap), k, v

        by_head = sharding.partition(new_k.shape, "batch", "kv_heads", None, None)
        by_row = sharding.partition(start.shape, "batch")
        cached = kv.partition(k, by_head)
        return sharding.local(
            attend, (by_head, by_head, by_head, cached, cached, by_row), (by_head, cached, cached),
            q, new_k, new_v, k, v, start,
        )  # fmt: skip


class Mlp(nn.Module):
    """The MLP, gated or plain."""

    config: DecoderConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        c = self.config

        def linear(name: str, size: int, y: jax.Array) -> jax.Array:
            axes = ("embed", "mlp") if name == "down" else ("mlp", "embed")
            return layers.Linear(size, axes, c.mlp_bias, self.dtype, name=name)(y)

        activation = layers.ACTIVATIONS[c.activation]
        gate = linear("gate", c.mlp_width, x) if c.gated else None
        up = linear("up", c.mlp_width, x)
        return linear("down", c.width, activation(up) if gate is None else activation(gate) * up)


class Block(nn.Module):
    """One layer: attention and MLP (or experts), each added to the residual stream."""

    config: DecoderConfig
    kind: LayerKind
    dtype: jnp.dtype
    attention: str

    @nn.compact
    def __call__(self, x, k, v, start, angles: Angles | None):
        c = self.config

        def before(part: str, y: jax.Array) -> jax.Array:
            return y if c.norm_place == "after" else layers.NORMS[c.norm](c.norm_eps, name=f"{part}_norm")(y)

        def after(part: str, y: jax.Array) -> jax.Array:
            return y if c.norm_place == "before" else layers.NORMS[c.norm](c.norm_eps, name=f"{part}_post_norm")(y)

        attention = Attention(c, self.kind, self.dtype, self.attention, name="attention")
        y, k, v = attention(before("attention", x), k, v, start, angles)
        x = x + after("attention", y)
        if self.kind.experts is None:
            mlp = Mlp(c, self.dtype, name="mlp")
        else:
            mlp = Mixture(self.kind.experts, c.activation, self.dtype, name="mlp")
        return x + after("mlp", mlp(before("mlp", x))), k, v
