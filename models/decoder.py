"""A decoder-only transformer in Flax linen with its cache as an argument and a return value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.types import Cache, ModelOutput, Params


class Attention(nn.Module):
    """Grouped-query attention with a rotary embedding; writes its T new entries, then attends."""

    config: DecoderConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, k, v, start, angles):
        c = self.config

        def heads(name: str, count: int) -> jax.Array:
            y = layers.Linear(count * c.head_dim, bias=c.qkv_bias, dtype=self.dtype, name=name)(x)
            return y.reshape(*x.shape[:2], count, c.head_dim).swapaxes(1, 2)

        q = layers.rotate(heads("q", c.num_heads), angles)
        k = kv.write(k, layers.rotate(heads("k", c.num_kv_heads), angles), start)
        v = kv.write(v, heads("v", c.num_kv_heads), start)
        mixed = layers.attend(q, k, v, start, c.head_dim**-0.5)
        mixed = mixed.swapaxes(1, 2).reshape(*x.shape[:2], c.num_heads * c.head_dim)
        return layers.Linear(c.width, bias=c.out_bias, dtype=self.dtype, name="out")(mixed), k, v


class Mlp(nn.Module):
    """The gated MLP: down(act(gate(x)) * up(x))."""

    config: DecoderConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        c = self.config
        gate = layers.Linear(c.mlp_width, bias=c.mlp_bias, dtype=self.dtype, name="gate")(x)
        up = layers.Linear(c.mlp_width, bias=c.mlp_bias, dtype=self.dtype, name="up")(x)
        return layers.Linear(c.width, bias=c.mlp_bias, dtype=self.dtype, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm layer."""

    config: DecoderConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, k, v, start, angles):
        c = self.config
        y, k, v = Attention(c, self.dtype, name="attention")(
            layers.RMSNorm(c.norm_eps, name="attention_norm")(x), k, v, start, angles
        )
        x = x + y
        return x + Mlp(c, self.dtype, name="mlp")(layers.RMSNorm(c.norm_eps, name="mlp_norm")(x)), k, v


class Decoder(nn.Module):
    """Embedding, L blocks, final norm, output head. The residual stream is float32."""

    config: DecoderConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: jax.Array, cache: Cache, logits: Literal["all", "none"] | jax.Array = "all", features=False
    ) -> ModelOutput:
        c = self.config
        embedding = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.width), self.dtype)
        start, num_new = cache.length, tokens.shape[1]
        x = jnp.take(embedding, tokens, axis=0, mode="clip").astype(jnp.float32)
        frequencies, scale = layers.rope_frequencies(c.rope, c.head_dim, c.max_positions)
        angles = layers.rope_angles(frequencies, scale, start[:, None] + jnp.arange(num_new, dtype=jnp.int32))
        keys, values = list(cache.k), list(cache.v)
        for i in range(c.num_layers):
            x, keys[i], values[i] = Block(c, self.dtype, name=f"layers_{i}")(x, keys[i], values[i], start, angles)
        cache = Cache(k=tuple(keys), v=tuple(values), length=start + num_new)
        head = embedding
        if not c.tied:
            head = self.param("head", nn.initializers.normal(0.02), (c.vocab_size, c.width), self.dtype)
        norm = layers.RMSNorm(c.norm_eps, name="final_norm")
        scores = None
        if isinstance(logits, str):
            if logits == "none" and not features:
                norm(x[:, :1])  # the parameter exists in every mode
                return ModelOutput(None, cache)
            x = norm(x)
            scores = layers.matmul(x, head) if logits == "all" else None
        else:
            x = norm(x)
            scores = layers.matmul(jnp.take_along_axis(x, logits[:, None, None], axis=1), head)[:, 0]
        return ModelOutput(scores, cache, x if features else None)


@dataclasses.dataclass(frozen=True)
class DecoderFn:
    """A Decoder as a ModelFn: hashable, its parameters an argument.

    Attributes:
        config: what it is made of.
        dtype: of the weights, "float32" or "bfloat16"; accumulation is float32 in both.
        cache_dtype: of keys and values.
    """

    config: DecoderConfig
    dtype: str = "float32"
    cache_dtype: str = "float32"

    @property
    def module(self) -> Decoder:
        """The linen module."""
        return Decoder(self.config, jnp.dtype(self.dtype))

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        cache: Cache,
        *,
        logits: Literal["all", "none"] | jax.Array = "all",
        features: bool = False,
    ) -> ModelOutput:
        """See ``specjax.types.ModelFn``."""
        return self.module.apply({"params": params}, tokens, cache, logits, features)  # type: ignore[return-value]

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for ``batch`` rows of at least ``capacity`` positions."""
        c = self.config
        return kv.init(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, jnp.dtype(self.cache_dtype))

    def init_params(self, key: jax.Array) -> Mapping[str, Any]:
        """Return freshly initialised parameters."""
        return self.module.init(key, jnp.zeros((1, 1), jnp.int32), self.init_cache(1, 1))["params"]
