"""A decoder-only transformer in Flax linen with its cache as an argument and a return value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import vocabulary
from specjax.models import layers, scan
from specjax.models.blocks import Block
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.types import Cache, ModelOutput, Params


class Decoder(nn.Module):
    """Embedding, L blocks, final norm, output head. The residual stream is float32.

    With ``part`` = (i, j) only blocks i..j-1 run, on ``hidden`` unless i is 0; features are then the stream after them
    and logits those of an exit there. A ``kv.Packed`` in the cache's place is for training: nothing is cached.
    """

    config: DecoderConfig
    dtype: jnp.dtype = jnp.float32
    attention: str = "chunks"
    scan_layers: bool = False
    remat: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        cache: Cache | kv.Packed,
        logits: Literal["all", "none"] | jax.Array = "all",
        features: bool = False,
        part: tuple[int, int] | None = None,
        hidden: jax.Array | None = None,
    ) -> ModelOutput:
        c = self.config
        first, last = part or (0, c.num_layers)
        rows_of = layers.declare(nn.initializers.normal(0.02), "vocab", "embed")
        embedding = self.param("embedding", rows_of, (c.vocab_size, c.width), self.dtype)
        num_new = tokens.shape[1]
        start: Any
        keys: list[Any]
        values: list[Any]
        if isinstance(cache, kv.Packed):
            start, positions = cache, cache.position
            keys, values = [None] * c.num_layers, [None] * c.num_layers
        else:
            start = cache.length
            positions = start[:, None] + jnp.arange(num_new, dtype=jnp.int32)
            keys, values = list(cache.k), list(cache.v)
        if hidden is None:
            x = vocabulary.lookup(embedding, tokens).astype(jnp.float32)
        else:
            x = hidden
        if c.scaled_embedding and hidden is None:
            x = x * jnp.asarray(c.width**0.5, self.dtype).astype(jnp.float32)
        if c.rope is None and hidden is None:
            places = layers.declare(nn.initializers.normal(0.02), "positions", "embed")
            table = self.param("positions", places, (c.max_positions, c.width), self.dtype)
            x = x + jnp.take(table, positions, axis=0, mode="clip").astype(jnp.float32)
        angles: dict[RopeConfig | None, Any] = {None: None}
        for rope in {c.rope_of(i): None for i in range(c.num_layers)}:
            if rope is not None:
                angles[rope] = layers.rope_angles(
                    *layers.rope_frequencies(rope, c.head_dim, c.max_positions), positions
                )
        begin, place = first, first
        if self.scan_layers:
            assert part is None  # stacked layers run all together
            begin, place = scan.num_stacked(c), scan.period(c)
            stacks = self.get_variable("params", scan.STACK)
            x, keys[:place], values[:place] = scan.run(
                c, self.dtype, self.attention, stacks, x, keys[:place], values[:place], start, angles
            )
        run = self._layer()
        for i in range(begin, last):
            at, given = place + i - begin, (start, angles[c.rope_of(i)])
            if self.is_initializing():
                block = Block(c, c.kind(i), self.dtype, self.attention, name=f"layers_{i}")
                x, keys[at], values[at] = block(x, keys[at], values[at], *given)
            else:
                params = self.get_variable("params", f"layers_{i}")
                x, keys[at], values[at] = run(c.kind(i), params, x, keys[at], values[at], *given)
        held: Any = cache
        if isinstance(cache, Cache):
            held = Cache(k=tuple(keys), v=tuple(values), length=start + num_new)
        head = embedding
        if not c.tied:
            rows = c.head_rows or c.vocab_size
            head = self.param("head", rows_of, (rows, c.width), self.dtype)
        norm = layers.NORMS[c.norm](c.norm_eps, name="final_norm")
        scores, stream = None, x
        if isinstance(logits, str):
            if logits == "none" and (part or not features):
                norm(x[:, :1])  # the parameter exists in every mode
                return ModelOutput(None, held, stream if features else None)
            x = norm(x)
            if logits == "all":
                scores = vocabulary.keep(layers.soft_cap(layers.matmul(x, head, self.dtype), c.logit_cap))
        else:
            x = norm(x)
            chosen = jnp.take_along_axis(x, logits[:, None, None], axis=1)
            scores = vocabulary.keep(layers.soft_cap(layers.matmul(chosen, head, self.dtype)[:, 0], c.logit_cap))
        return ModelOutput(scores, held, (stream if part else x) if features else None)

    def _layer(self):
        """Return ``(kind, params, x, k, v, start, angles) -> x, k, v``, which traces layers that are alike once."""

        def run(kind, params, x, k, v, start, angles):
            block = Block(self.config, kind, self.dtype, self.attention, parent=None)
            return block.apply({"params": params}, x, k, v, start, angles)

        if self.remat:
            run = jax.checkpoint(run, static_argnums=0)
        return jax.jit(run, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class DecoderFn:
    """A Decoder as a ModelFn: hashable, its parameters an argument.

    Attributes:
        config: what it is made of.
        dtype: of the weights, "float32" or "bfloat16"; accumulation is float32 in both.
        cache_dtype: of keys and values.
        attention: a name of ``specjax.models.attention.ATTENTION``.
        scan_layers: the layers run in a loop, over parameters that ``specjax.models.scan.stack`` has stacked.
        remat: the backward pass computes each layer again instead of keeping what it needs of it.
    """

    config: DecoderConfig
    dtype: str = "float32"
    cache_dtype: str = "float32"
    attention: str = "chunks"
    scan_layers: bool = False
    remat: bool = False

    @property
    def module(self) -> Decoder:
        """The linen module."""
        return Decoder(self.config, jnp.dtype(self.dtype), self.attention, self.scan_layers, self.remat)

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        cache: Cache | kv.Packed,
        *,
        logits: Literal["all", "none"] | jax.Array = "all",
        features: bool = False,
        layers: tuple[int, int] | None = None,
        hidden: jax.Array | None = None,
    ) -> ModelOutput:
        """See ``specjax.types.ModelFn``."""
        out = self.module.apply({"params": params}, tokens, cache, logits, features, layers, hidden)
        return out  # type: ignore[return-value]

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for ``batch`` rows of at least ``capacity`` positions."""
        c = self.config
        if self.scan_layers:
            return scan.init_cache(c, batch, capacity, jnp.dtype(self.cache_dtype))
        return kv.init(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, jnp.dtype(self.cache_dtype))

    def init_params(self, key: jax.Array) -> Mapping[str, Any]:
        """Return freshly initialised parameters."""
        unrolled = dataclasses.replace(self, scan_layers=False)
        params = nn.unbox(unrolled._declared(key))
        return scan.stack(self.config, params) if self.scan_layers else params

    def parameter_axes(self) -> dict[tuple[str, ...], tuple[str | None, ...]]:
        """Return the logical axes of each parameter, by path, as the modules declare them; layers unrolled."""
        # Layers of one kind declare the same: a period of them says all.
        size = scan.period(self.config)
        kinds = self.config.kinds[:size]
        one = dataclasses.replace(self, config=dataclasses.replace(self.config, num_layers=size, kinds=kinds))
        boxed = jax.eval_shape(dataclasses.replace(one, scan_layers=False)._declared, jax.random.key(0))
        is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
        found = {}
        for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
            found[tuple(entry.key for entry in path)] = tuple(box.names)
        for i in range(size, self.config.num_layers):
            here, like = f"layers_{i}", f"layers_{i % size}"
            found |= {(here, *path[1:]): axes for path, axes in list(found.items()) if path[0] == like}
        return found

    def _declared(self, key: jax.Array) -> Mapping[str, Any]:
        return self.module.init(key, jnp.zeros((1, 1), jnp.int32), self.init_cache(1, 1))["params"]
