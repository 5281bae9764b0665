"""Attention over the valid part of a cache: the ways to compute it, by name.

An implementation is a function ``(q, k, v, start, scale, window, cap) -> out`` with the arguments of ``chunks`` and one
line in ``ATTENTION``; the conformance suite runs it. A kernel for one backend says so there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from specjax import cache as kv
from specjax import numerics
from specjax.models.config import DecoderConfig
from specjax.models.layers import precision_of, soft_cap

NEGATIVE = -1e30  # finite, so that a wholly masked chunk gives no NaN
# Where the running maximum starts: below every score, yet so far above NEGATIVE that exp of the difference is 0.
# A chunk in which a row sees nothing therefore adds exactly nothing, also when it is the row's first.
LOWEST = NEGATIVE / 2


@dataclasses.dataclass(frozen=True)
class Attention:
    """An implementation and what it can do.

    Attributes:
        attend: the function; see ``chunks``.
        soft_caps: it honours ``cap``.
        backends: where it runs, as ``jax.default_backend()`` names them; empty: everywhere.
    """

    attend: Callable[..., jax.Array]
    soft_caps: bool = True
    backends: tuple[str, ...] = ()


def refuse(name: str, config: DecoderConfig, backend: str) -> str | None:
    """Return why this model cannot use an implementation on this backend, or None."""
    if name not in ATTENTION:
        return f"attention is {name!r}; known: {', '.join(ATTENTION)}."
    chosen = ATTENTION[name]
    if config.attention_cap is not None and not chosen.soft_caps:
        return f"attention {name!r} knows no soft cap, and the model's scores have one: use 'chunks'."
    if chosen.backends and backend not in chosen.backends:
        return f"attention {name!r} runs on {', '.join(chosen.backends)} and this is {backend}: use 'chunks'."
    return None


def chunks(
    q: jax.Array,
    k: jax.Array | kv.Layer,
    v: jax.Array | kv.Layer,
    start: jax.Array,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Attend over the valid part of a cache, chunk by chunk, with a running softmax.

    The trip count is traced, so the cost follows the longest valid length, not the capacity; with a window the loop
    also begins where the shortest row's window does. A chunk that a row does not need changes no bit of its result
    (a factor of 1 and a sum with 0).

    Args:
        q: [B, N, T, H] float32 queries at positions ``start + (0..T-1)``.
        k, v: [B, G, S, H], with the entries of these T tokens already written; S is a multiple of CHUNK.
        start: [B] int32.
        scale: factor of the scores.
        window: each query sees itself and ``window - 1`` positions before it; None: all before it.
        cap: soft cap of the scores.

    Returns:
        [B, N, T, H] float32.
    """
    batch, heads, num_new, size = q.shape
    groups = k.shape[1]
    rows = heads // groups * num_new
    q = (q * scale).reshape(batch, groups, rows, size).astype(k.dtype)
    precision = precision_of(k.dtype)

    def chunk(index, carry):
        top, total, out = carry
        first = index * kv.CHUNK
        keys, values = kv.chunk(k, first, kv.CHUNK), kv.chunk(v, first, kv.CHUNK)
        scores = jnp.einsum(
            "bgmh,bgch->bgmc", q, keys, precision=precision, preferred_element_type=jnp.float32
        ).reshape(batch, groups, -1, num_new, kv.CHUNK)
        scores = soft_cap(scores, cap)
        seen = kv.visible(start, num_new, first, kv.CHUNK)[:, None, None]
        if window is not None:
            seen &= ~kv.visible(start - window, num_new, first, kv.CHUNK)[:, None, None]
        scores = jnp.where(seen, scores, NEGATIVE).reshape(batch, groups, rows, kv.CHUNK)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        keep = jnp.exp(top - new_top)
        mixed = jnp.einsum(
            "bgmc,bgch->bgmh",
            weights.astype(k.dtype),
            values,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * keep + numerics.row_sum(weights), out * keep + mixed

    trips = (jnp.max(start) + num_new + kv.CHUNK - 1) // kv.CHUNK
    column = jnp.zeros((batch, groups, rows, 1), jnp.float32)
    carry = (column + LOWEST, column, jnp.zeros((batch, groups, rows, size), jnp.float32))
    begin = 0 if window is None else jnp.maximum(jnp.min(start) - window + 1, 0) // kv.CHUNK
    _, total, out = lax.fori_loop(begin, trips, chunk, carry)
    return (out / total).reshape(batch, heads, num_new, size)


def dot_product(
    q: jax.Array,
    k: jax.Array | kv.Layer,
    v: jax.Array | kv.Layer,
    start: jax.Array,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Attend by ``jax.nn.dot_product_attention`` over the whole capacity, masked; see ``chunks``.

    Cost follows the capacity, and the last bits may: one large product instead of a loop, which accelerators like.

    Raises:
        ValueError: a soft cap, which it does not know.
    """
    if cap is not None:
        raise ValueError("dot_product knows no soft cap.")
    num_new, capacity = q.shape[2], k.shape[2]
    seen = kv.visible(start, num_new, 0, capacity)
    if window is not None:
        seen &= ~kv.visible(start - window, num_new, 0, capacity)
    query = q.astype(k.dtype).swapaxes(1, 2)
    key, value = (kv.chunk(x, 0, capacity).swapaxes(1, 2) for x in (k, v))
    with jax.default_matmul_precision("highest" if k.dtype == jnp.float32 else "default"):
        out = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None], scale=scale, implementation="xla")
    return out.swapaxes(1, 2).astype(jnp.float32)


def packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    texts: kv.Packed,
    scale: float,
    window: int | None,
    cap: float | None,
    dtype,
) -> jax.Array:
    """Attend within the texts that stand side by side in each row: for training, differentiable.

    Args:
        q: [B, N, T, H] float32.
        k, v: [B, G, T, H] float32.
        texts: which token belongs to which text.
        scale, window, cap: as in ``chunks``.
        dtype: of the products' operands; they accumulate in float32.

    Returns:
        [B, N, T, H] float32.
    """
    batch, heads, num, size = q.shape
    groups = k.shape[1]
    q = (q * scale).reshape(batch, groups, heads // groups, num, size)
    product = functools.partial(jnp.einsum, precision=precision_of(dtype), preferred_element_type=jnp.float32)
    scores = product("bgnth,bgsh->bgnts", q.astype(dtype), k.astype(dtype))
    query, key = texts.position[:, :, None], texts.position[:, None, :]
    seen = (texts.segment[:, :, None] == texts.segment[:, None, :]) & (key <= query)
    if window is not None:
        seen &= key > query - window
    scores = jnp.where(seen[:, None, None], soft_cap(scores, cap), NEGATIVE)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = product("bgnts,bgsh->bgnth", weights.astype(dtype), v.astype(dtype))
    return mixed.reshape(batch, heads, num, size)


ATTENTION = {
    "chunks": Attention(chunks),
    "dot_product": Attention(dot_product, soft_caps=False),
}
