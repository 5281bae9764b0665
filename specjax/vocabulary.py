"""What is done over a whole vocabulary, also where the mesh splits it: each shard offers its best, only those travel.

Without a mesh, or where V does not divide by its ``model`` axis, each function is the ordinary one. Results are the
same on every shard, and the same bits whatever the number of shards.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from specjax import numerics, sharding
from specjax.numerics import BLOCK
from specjax.sharding import MODEL


def split(size: int) -> bool:
    """Say whether the mesh in force splits an axis of this size."""
    mesh = sharding.current()
    ways = 1 if mesh is None else mesh.shape[MODEL]
    return ways > 1 and size % ways == 0


def keep(x: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Lay an array out by its rows and its vocabulary."""
    return sharding.constrain(x, "batch", *(None,) * (x.ndim - 2), "vocab")


def argmax(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Return the id of the largest value, the lowest of equal ones: int32. See ``numerics.argmax``."""
    if not split(x.shape[-1]):
        return numerics.argmax(x)

    def best(part: jax.Array) -> jax.Array:
        at = numerics.argmax(part)
        value = jnp.take_along_axis(part, at[..., None], axis=-1)[..., 0]
        values, ids = lax.all_gather((value, at + _first(part)), MODEL, axis=-1)
        first = jnp.argmax(values, axis=-1)  # shards stand in the order of their ids
        return jnp.take_along_axis(ids, first[..., None], axis=-1)[..., 0]

    return sharding.local(best, [_whole(x)], _rows(x), x)


def largest(x: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R C"], Int[Array, "R C"]]:
    """Return the ``count`` largest of each row, in order, and their ids: ``lax.top_k``, block by block."""
    if not split(x.shape[-1]):
        return _largest(x, count)

    def best(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = _largest(part, min(count, part.shape[-1]))
        values, ids = lax.all_gather((values, ids + _first(part)), MODEL, axis=1, tiled=True)
        values, at = lax.top_k(values, count)  # of equal values the first, whose id is the lowest
        return values, jnp.take_along_axis(ids, at, axis=1)

    return sharding.local(best, [_whole(x)], (_rows(x), _rows(x)), x)


def _largest(x: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R C"], Int[Array, "R C"]]:
    """The largest lie in the ``count`` blocks whose maxima are largest: most of a row is only ever compared once."""
    rows, size = x.shape
    if size <= 2 * count * BLOCK:
        return lax.top_k(x, count)
    x = jnp.pad(x, ((0, 0), (0, -size % BLOCK)), constant_values=-jnp.inf)
    blocks = x.reshape(rows, -1, BLOCK)
    _, chosen = lax.top_k(jnp.max(blocks, axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # of equal values the first comes first
    values, at = lax.top_k(jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1), count)
    block = jnp.take_along_axis(chosen, at // BLOCK, axis=1)
    return values, jnp.minimum(block * BLOCK + at % BLOCK, size - 1)


def take(x: Float[Array, "*rows V"], ids: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the value of one id in each row."""
    if not split(x.shape[-1]):
        return jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]

    def mine(part: jax.Array, ids: jax.Array) -> jax.Array:
        at = ids - _first(part)
        inside = (at >= 0) & (at < part.shape[-1])
        found = jnp.take_along_axis(part, jnp.clip(at, 0, part.shape[-1] - 1)[..., None], axis=-1)[..., 0]
        return lax.psum(jnp.where(inside, found, 0), MODEL)

    return sharding.local(mine, [_whole(x), _rows(ids, ids.ndim)], _rows(x), x, ids)


def per_id(function: Callable[[jax.Array, jax.Array], jax.Array], keys: jax.Array, vocab: int) -> jax.Array:
    """Return ``function(key, ids)`` of each row's key and every id, [R, V]; each shard computes its own ids."""
    rows = jax.vmap(function, in_axes=(0, None))
    if not split(vocab):
        return rows(keys, jnp.arange(vocab))
    ways = sharding.current().shape[MODEL]  # type: ignore[union-attr]
    by_row = sharding.partition(keys.shape, "batch", None)

    def mine(keys: jax.Array) -> jax.Array:
        size = vocab // ways
        return rows(keys, lax.axis_index(MODEL) * size + jnp.arange(size))

    return sharding.local(mine, [by_row], PartitionSpec(by_row[0], MODEL), keys)


def lookup(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the rows of an embedding; an id past its end gives the last row."""
    parts = sharding.partition(table.shape, "vocab", None)
    if sharding.current() is None or parts[0] is None:
        return gather(table, ids)

    def mine(part: jax.Array, ids: jax.Array) -> jax.Array:
        at = ids - _first(part, axis=0)
        inside = (at >= 0) & (at < part.shape[0])
        rows = gather(part, at)
        return lax.psum(jnp.where(inside[..., None], rows, 0), MODEL)

    return sharding.local(
        mine, [parts, _rows(ids, 2)], sharding.partition((*ids.shape, 1), "batch", None, None),
        table, jnp.minimum(ids, table.shape[0] - 1),
    )  # fmt: skip


def gather(table: Float[Array, "V *rest"], ids: Int[Array, "*rows"]) -> Float[Array, "*rows *rest"]:
    """Return the rows of a table; an id past an end gives the row at that end.

    A CPU has no bfloat16 gather: the compiler converts the table, and outside a loop it would convert, and keep, all of
    it. The barrier ties the table to the ids, so that the conversion stays in the loop, where only these rows need it.
    """
    if table.dtype != jnp.float32:
        table, ids = lax.optimization_barrier((table, ids))
    return jnp.take(table, ids, axis=0, mode="clip")


def _first(part: jax.Array, axis: int = -1) -> jax.Array:
    """Return the first id of this shard's part."""
    return lax.axis_index(MODEL) * part.shape[axis]


def _whole(x: jax.Array) -> PartitionSpec:
    return sharding.partition(x.shape, "batch", *(None,) * (x.ndim - 2), "vocab")


def _rows(x: jax.Array, ndim: int | None = None) -> PartitionSpec:
    """Return the layout of a result with the leading axis of x."""
    first = sharding.partition(x.shape, "batch", *(None,) * (x.ndim - 1))
    return PartitionSpec(*first[: x.ndim - 1 if ndim is None else ndim])
