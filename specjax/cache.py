"""The fixed-size key-value cache: init, write, rollback, mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from specjax.types import Cache

# Attention walks the cache in chunks of this many positions, whatever the capacity: the bits of a result
# never depend on it. Capacities are multiples of it.
CHUNK = 128


def round_up(capacity: int) -> int:
    """Return the smallest multiple of CHUNK that holds ``capacity`` positions."""
    return -(-capacity // CHUNK) * CHUNK


def init(batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype) -> Cache:
    """Return an empty cache of ``round_up(capacity)`` positions: per layer [B, G, S, H] of ``dtype``."""
    shape = (batch, num_kv_heads, round_up(capacity), head_dim)
    # One buffer each: donated buffers must not be shared.
    k = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    v = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    return Cache(k=k, v=v, length=jnp.zeros((batch,), jnp.int32))


@flax.struct.dataclass
class Layer:
    """One layer's part of a buffer that holds several: what ``write`` and ``chunk`` take in the place of an array.

    Attributes:
        buffer: [B, L, G, S, H].
        index: the layer, traced.
    """

    buffer: jax.Array
    index: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, G, S, H]."""
        return self.buffer.shape[:1] + self.buffer.shape[2:]

    @property
    def dtype(self):
        """Of the entries."""
        return self.buffer.dtype


@flax.struct.dataclass
class Packed:
    """In the place of a cache and of ``start``: the tokens are whole texts side by side, and nothing is kept.

    Training runs so: a position sees those before it of its own text, and only them.

    Attributes:
        segment: [B, T] int32, which text of the row a token belongs to.
        position: [B, T] int32, its place in that text.
    """

    segment: Int[Array, "B T"]
    position: Int[Array, "B T"]


def partition(buffer: Any, by_head: PartitionSpec) -> Any:
    """Return where ``buffer``, an array [B, G, S, H] or a Layer, lies when rows and heads lie so."""
    if not by_head or not isinstance(buffer, Layer):
        return by_head
    return Layer(PartitionSpec(by_head[0], None, *by_head[1:]), PartitionSpec())  # type: ignore[arg-type]


def write(buffer: Any, new: jax.Array, start: Int[Array, " B"]) -> Any:
    """Write ``new`` [B, G, T, H] into ``buffer``, an array [B, G, S, H] or a Layer, at each row's own ``start``.

    The caller allocates so that ``start + T <= S`` always holds: a start past that would be clamped by XLA and
    overwrite valid entries.
    """
    new = new.astype(buffer.dtype)
    if isinstance(buffer, Layer):
        put = jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n[None], (buffer.index, 0, s, 0)))
        return replace(buffer, buffer=put(buffer.buffer, new, start))
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice(buffer, new, (0, 0, start[0], 0))
    return jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n, (0, s, 0)))(buffer, new, start)


def chunk(buffer: jax.Array | Layer, first: jax.Array | int, count: int) -> jax.Array:
    """Return ``count`` positions of every row from ``first`` on: [B, G, count, H]."""
    if isinstance(buffer, Layer):
        batch, groups, _, size = buffer.shape
        part = jax.lax.dynamic_slice(buffer.buffer, (0, buffer.index, 0, first, 0), (batch, 1, groups, count, size))
        return part[:, 0]
    return jax.lax.dynamic_slice_in_dim(buffer, first, count, axis=2)


def rollback(cache: Cache, length: Int[Array, " B"]) -> Cache:
    """Keep the first ``length`` entries of each row: nothing moves, nothing is erased."""
    return replace(cache, length=length)


def visible(start: Int[Array, " B"], num_new: int, first: jax.Array | int, count: int) -> Bool[Array, "B T C"]:
    """Say which cached positions each new token sees.

    Args:
        start: [B] positions before the new tokens.
        num_new: T.
        first: the first cached position asked about (traced or not).
        count: how many from there.

    Returns:
        [B, T, count]: True where ``first + c <= start + t``.
    """
    query = start[:, None] + jnp.arange(num_new, dtype=jnp.int32)
    key = first + jnp.arange(count, dtype=jnp.int32)
    return key[None, None, :] <= query[:, :, None]
