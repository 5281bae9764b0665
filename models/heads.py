"""Draft heads: small networks over the target's features, for training and for the loop. Pure functions.

A head reads the token x_t and a feature of the position before it: the target's final-normed stream f_(t-1), or, while
it drafts on, its own output there. What it returns at t scores x_(t+1), as the target's logits at t do.

    mlp         h = m + mlp(norm(m)), m = fc [e(x_t); u]         a recurrent MLP, no attention
    eagle       h = layer(m), one decoder layer with entries of its own   (EAGLE, 2401.15077, section 3)
    medusa      h_k = m + silu(W_k m), k = 0 .. K-1              K heads side by side  (Medusa, 2401.10774, section 2.1)
    early_exit  h = n + up silu(down n), n = norm(stream after the target's layer N)  (LayerSkip, 2404.16710)

with e the scaled embedding of the target, u the feature scaled to a mean square of 1, and logits = norm(h) . rows: rows
of the target's own output head for a list of token ids (frozen, nothing is stored), or trained ones. Matrices are
[out, in]; products take their dtype and accumulate in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax import cache as kv
from specjax import vocabulary
from specjax.models import layers
from specjax.models.attention import chunks
from specjax.models.config import RopeConfig
from specjax.numerics import row_mean
from specjax.types import Cache, Params

Kind = Literal["mlp", "eagle", "medusa", "early_exit"]
KINDS: tuple[Kind, ...] = ("mlp", "eagle", "medusa", "early_exit")


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What a head is made of.

    Attributes:
        kind: one of KINDS.
        width: D, of the target.
        vocab_size: V, ids that the target uses.
        num_ids: M, tokens that the output scores, by a list of ids; 0: all V.
        prompt_ids: how many further ids of a row's own prompt are scored too.
        trained_output: the output's rows are the head's own; else they are the target's.
        embedding_scale: factor of the target's embedding.
        norm_eps: epsilon of every norm.
        mlp_width: inner size of the MLP (mlp, eagle).
        num_heads, num_kv_heads, head_dim, rope_theta: of the attention (eagle).
        positions: K, tokens drafted at most (medusa).
        layers: N, layers of the target that run (early_exit).
        adapter: inner size of the adapter (early_exit); 0: a norm alone.
    """

    kind: Kind
    width: int
    vocab_size: int
    num_ids: int = 0
    prompt_ids: int = 256
    trained_output: bool = False
    embedding_scale: float = 1.0
    norm_eps: float = 1e-5
    mlp_width: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    positions: int = 0
    layers: int = 0
    adapter: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the output, without those of a prompt's ids."""
        return self.num_ids or self.vocab_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every trained parameter's shape by name."""
        d, f = self.width, self.mlp_width
        mlp = {"mlp_norm": (d,), "gate": (f, d), "up": (f, d), "down": (d, f), "norm": (d,)}
        found: dict[str, tuple[int, ...]]
        if self.kind == "mlp":
            found = {"fc": (d, 2 * d), **mlp}
        elif self.kind == "eagle":
            queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            attention = {"attention_norm": (d,), "q": (queries, d), "k": (keys, d), "v": (keys, d), "out": (d, queries)}
            found = {"fc": (d, 2 * d), **attention, **mlp}
        elif self.kind == "medusa":
            found = {"fc": (d, 2 * d), "blocks": (self.positions, d, d), "norm": (self.positions, d)}
        else:
            found = {"norm": (d,)}
            if self.adapter:
                found |= {"down": (self.adapter, d), "up": (d, self.adapter)}
        return found | ({"output": (self.num_rows, d)} if self.trained_output else {})

    def problem(self) -> str | None:
        """Return what is wrong with the sizes, in words, or None."""
        needed = {
            "mlp": ("mlp_width",),
            "eagle": ("mlp_width", "num_heads", "num_kv_heads", "head_dim"),
            "medusa": ("positions",),
            "early_exit": ("layers",),
        }
        if self.kind not in KINDS:
            return f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}."
        for name in ("width", "vocab_size", *needed[self.kind]):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}; a head of kind {self.kind} needs at least 1."
        if not 0 <= self.num_ids <= self.vocab_size or self.prompt_ids < 0:
            return f"num_ids is {self.num_ids} of {self.vocab_size}, prompt_ids {self.prompt_ids}."
        if self.kind == "eagle" and (self.num_heads % self.num_kv_heads or self.head_dim % 2):
            return f"{self.num_heads} query heads of size {self.head_dim} over {self.num_kv_heads} key-value heads."
        return None


NORMS = ("attention_norm", "mlp_norm", "norm")


def init(config: HeadConfig, key: jax.Array, dtype: Any = jnp.float32, output: jax.Array | None = None) -> Params:
    """Return a new head's parameters, a flat dict: norms (float32) of ones, matrices of ``dtype``.

    What is added to the stream starts at zero, so that the first drafts follow from ``fc`` alone.

    Args:
        config: what it is made of.
        key: for the matrices.
        dtype: of the matrices.
        output: [M, D], where trained rows start: the target's. Needed with ``trained_output``.
    """
    params = {}
    for i, (name, shape) in enumerate(config.shapes().items()):
        if name in NORMS:
            params[name] = jnp.ones(shape, jnp.float32)
        elif name == "output":
            assert output is not None
            params[name] = jnp.asarray(output, dtype)
        elif name == ("up" if config.kind == "early_exit" else "down") or name in ("out", "blocks"):
            params[name] = jnp.zeros(shape, dtype)
        else:
            noise = jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
            params[name] = (noise * shape[-1] ** -0.5).astype(dtype)
    return params


def embed(config: HeadConfig, embedding: Float[Array, "V D"], tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    """Return the scaled embedding rows of tokens, float32."""
    return vocabulary.gather(embedding, tokens).astype(jnp.float32) * config.embedding_scale


def logits_of(
    params: Params,
    outputs: Float[Array, "*b D"],
    rows: Float[Array, "M D"],
    cap: float | None = None,
    dtype: Any = None,
) -> Float[Array, "*b M"]:
    """Return the logits of the output's rows: the head's own, or ``rows`` of the target.

    Args:
        params: the head's.
        outputs: [..., D], from ``outputs``.
        rows: [M, D]; not read where the head has its own.
        cap: the target's soft cap, or None.
        dtype: as in ``outputs``.
    """
    return layers.soft_cap(layers.matmul(outputs, params.get("output", rows), dtype), cap)


def outputs(
    config: HeadConfig,
    params: Params,
    features: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    embedding: Float[Array, "V D"],
    steps: int = 1,
    position: Int[Array, "B T"] | None = None,
    dtype: Any = None,
) -> Float[Array, "S B T D"]:
    """Run a head over whole texts, teacher-forced, for training; ``logits_of`` takes what comes out.

    Step s has what a head sees at its (s+1)-th draft: the true features up to s + 1 positions before, its own after
    them. Entry [s, :, t] scores x_(t+1), as the target's logits at t do; in the first s positions of a text nothing
    stands, so leave them out of the loss (``valid``). For medusa step s is head s, of the position s before, and there
    are at most K; an early exit has one step.

    Args:
        config, params: the head.
        features: [B, T, D], the target's final-normed stream of these tokens; for early_exit the stream after layer N.
        tokens: [B, T], padded on the right.
        embedding: [V, D], the target's.
        steps: S.
        position: [B, T], each token's place in its own text, 0, 1, ..., where several texts stand in a row; None: one.
        dtype: of the products, forwards and backwards; None: that of each matrix.

    Raises:
        ValueError: more steps than the head has.
    """
    most = {"medusa": config.positions, "early_exit": 1}.get(config.kind)
    if steps < 1 or (most is not None and steps > most):
        raise ValueError(f"steps is {steps}; expected 1..{most or 'any'} for a head of kind {config.kind}.")
    if config.kind == "early_exit":
        return _final(config, params, _exit(config, params, features, dtype))[None]
    if position is None:
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    embedded = embed(config, embedding, tokens)
    if config.kind == "medusa":
        mixed = _joined(config, params, embedded, _later(features, position), dtype)
        each = _final(config, params, _medusa(config, params, mixed, dtype))
        return jnp.stack([_later(each[..., i, :], position, i) for i in range(steps)])
    held, found = [], []
    feature = features
    for _ in range(steps):
        mixed = _joined(config, params, embedded, _later(feature, position), dtype)
        if config.kind == "eagle":
            mixed = mixed + _attend_all(config, params, mixed, position, held, dtype)
        feature = mixed + _mlp(config, params, mixed, dtype)
        found.append(_final(config, params, feature))
    return jnp.stack(found)


def valid(steps: int, mask: jax.Array, position: jax.Array | None = None) -> jax.Array:
    """Return which entries [S, B, T] of ``outputs`` count, where ``mask`` [B, T] says it of the positions."""
    position = jnp.arange(mask.shape[1]) if position is None else position
    return (mask != 0)[None] & (position >= jnp.arange(steps)[:, None, None])


def _later(x: jax.Array, position: jax.Array, by: int = 1) -> jax.Array:
    """Move x [B, T, ...] on by some positions; zeros come first in each text."""
    moved = jnp.pad(x, ((0, 0), (by, 0), *((0, 0),) * (x.ndim - 2)))[:, : x.shape[1]]
    return jnp.where((position >= by)[..., None], moved, 0.0)


def _unit(config: HeadConfig, x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(row_mean(x * x) + config.norm_eps)


def _norm(config: HeadConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    return _unit(config, x) * scale.astype(jnp.float32)


def _final(config: HeadConfig, params: Params, hidden: jax.Array) -> jax.Array:
    return _norm(config, hidden, params["norm"])


def _joined(config: HeadConfig, params: Params, embedded: jax.Array, feature: jax.Array, dtype=None) -> jax.Array:
    return layers.matmul(jnp.concatenate([embedded, _unit(config, feature)], axis=-1), params["fc"], dtype)


def _mlp(config: HeadConfig, params: Params, x: jax.Array, dtype=None) -> jax.Array:
    x = _norm(config, x, params["mlp_norm"])
    gate = jax.nn.silu(layers.matmul(x, params["gate"], dtype))
    return layers.matmul(gate * layers.matmul(x, params["up"], dtype), params["down"], dtype)


def _medusa(config: HeadConfig, params: Params, mixed: jax.Array, dtype=None) -> jax.Array:
    """Return [..., K, D]."""
    d = config.width
    each = layers.matmul(mixed, params["blocks"].reshape(-1, d), dtype)
    return mixed[..., None, :] + jax.nn.silu(each.reshape(*mixed.shape[:-1], config.positions, d))


def _exit(config: HeadConfig, params: Params, stream: jax.Array, dtype=None) -> jax.Array:
    x = _unit(config, stream)
    if not config.adapter:
        return x
    return x + layers.matmul(jax.nn.silu(layers.matmul(x, params["down"], dtype)), params["up"], dtype)


def _heads(config: HeadConfig, params: Params, mixed: jax.Array, positions: jax.Array, dtype=None) -> list[jax.Array]:
    """Return queries, keys and values [B, heads, T, H] of a layer's input, turned to their positions [B, T]."""
    x = _norm(config, mixed, params["attention_norm"])
    frequencies = layers.rope_frequencies(RopeConfig(rope_theta=config.rope_theta), config.head_dim, 0)
    angles = layers.rope_angles(*frequencies, positions)
    found = []
    for name in ("q", "k", "v"):
        y = layers.matmul(x, params[name], dtype).reshape(*x.shape[:2], -1, config.head_dim).swapaxes(1, 2)
        found.append(y if name == "v" else layers.rotate(y, angles))
    return found


def _out(params: Params, mixed: jax.Array, dtype=None) -> jax.Array:
    """Join the heads [B, N, T, H]."""
    batch, _, num, _ = mixed.shape
    return layers.matmul(mixed.swapaxes(1, 2).reshape(batch, num, -1), params["out"], dtype)


def _attend_all(
    config: HeadConfig, params: Params, mixed: jax.Array, position: jax.Array, held: list[Any], dtype: Any
) -> jax.Array:
    """Attend over whole texts at one more own-feature step; ``held`` has keys and values of the steps before.

    At step s position t sees the entries that a draft would: those of true features up to t - s, then one of each
    step, the r-th at t - s + r.
    """
    batch, num = mixed.shape[:2]
    q, k, v = _heads(config, params, mixed, position, dtype)
    held.append((k, v))
    step, groups = len(held) - 1, config.num_kv_heads
    q = q.reshape(batch, groups, -1, num, config.head_dim) * config.head_dim**-0.5
    exact = lax.Precision.HIGHEST
    true_keys, true_values = held[0]
    scores = jnp.einsum("bgnth,bgsh->bgnts", q, true_keys, precision=exact)
    first = jnp.arange(num) - position  # where a position's text begins
    seen = (jnp.arange(num)[:, None] - step >= jnp.arange(num)) & (first[:, :, None] == first[:, None, :])
    scores = [jnp.where(seen[:, None, None], scores, -1e30)]
    own = [tuple(_moved(x, step - r) for x in held[r]) for r in range(1, step + 1)]
    scores += [jnp.einsum("bgnth,bgth->bgnt", q, key, precision=exact)[..., None] for key, _ in own]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out = jnp.einsum("bgnts,bgsh->bgnth", weights[..., :num], true_values, precision=exact)
    for r, (_, value) in enumerate(own):
        out += weights[..., num + r, None] * value[:, :, None]
    return _out(params, out.reshape(batch, -1, num, config.head_dim), dtype)


def _moved(x: jax.Array, by: int) -> jax.Array:
    """Move [B, G, T, H] on by some positions."""
    return jnp.pad(x, ((0, 0), (0, 0), (by, 0), (0, 0)))[:, :, : x.shape[2]]


@dataclasses.dataclass(frozen=True)
class HeadFn:
    """A head as ``specjax.draft.head`` runs it: hashable, its parameters an argument.

    The parameters are ``{"head": the trained ones, "embedding": [V, D], "output": [V, D] of the target, "ids": int32
    [M] or None, "rows": [M, D]}``: row m scores token ``ids[m]``.

    Attributes:
        config: what it is made of.
        cache_dtype: of keys and values.
        logit_cap: the target's soft cap.
    """

    config: HeadConfig
    cache_dtype: str = "float32"
    logit_cap: float | None = None

    @property
    def positions(self) -> int:
        """K of heads side by side; 0 for one that goes on from its own output."""
        return self.config.positions

    @property
    def width(self) -> int:
        """D."""
        return self.config.width

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache; a head without attention keeps lengths alone."""
        c, count = self.config, int(self.config.kind == "eagle")
        return kv.init(batch, capacity, count, c.num_kv_heads, c.head_dim, jnp.dtype(self.cache_dtype))

    def advance(
        self, params: Params, tokens: Int[Array, "B T"], features: Float[Array, "B T D"], cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Run T tokens, each with the feature of the position before it, from ``cache.length`` on.

        Returns:
            [B, T, D] ([B, T, K, D] of heads side by side), and the cache with T more entries.
        """
        c, own = self.config, params["head"]
        mixed = _joined(c, own, embed(c, params["embedding"], tokens), features)
        if c.kind == "eagle":
            start = cache.length
            q, k, v = _heads(c, own, mixed, start[:, None] + jnp.arange(tokens.shape[1]))
            keys, values = kv.write(cache.k[0], k, start), kv.write(cache.v[0], v, start)
            mixed = mixed + _out(own, chunks(q, keys, values, start, c.head_dim**-0.5))
            cache = Cache(k=(keys,), v=(values,), length=start)
        cache = kv.rollback(cache, cache.length + tokens.shape[1])
        if c.kind == "medusa":
            return _medusa(c, own, mixed), cache
        return mixed + _mlp(c, own, mixed), cache

    def rows_of(self, params: Params, ids: Int[Array, "B X"]) -> Float[Array, "B X D"]:
        """Return the target's output rows of some ids of each row, float32."""
        return vocabulary.gather(params["output"], ids).astype(jnp.float32)

    def logits(self, params: Params, hidden: Float[Array, "B T D"], more: jax.Array | None) -> Float[Array, "B T M"]:
        """Return the logits of the listed tokens, then those of ``more`` [B, X, D] rows."""
        final = _final(self.config, params["head"], hidden)
        scores = logits_of(params["head"], final, params["rows"], self.logit_cap)
        if more is None:
            return scores
        final = final.astype(params["rows"].dtype).astype(jnp.float32)  # as the product with the listed rows has it
        further = jnp.einsum("btd,bxd->btx", final, more, precision=lax.Precision.HIGHEST)
        return jnp.concatenate([scores, layers.soft_cap(further, self.logit_cap)], axis=-1)

    def exit(self, params: Params, stream: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Return an early exit's logits over the vocabulary in use: ``trained_exit`` of ``early_exit_drafter``."""
        batch = stream.shape[0]
        pair = jnp.concatenate([stream, stream]) if batch == 1 else stream  # a lone bfloat16 row costs more than two
        final = _final(self.config, params["head"], _exit(self.config, params["head"], pair))
        scores = logits_of(params["head"], final, params["rows"], self.logit_cap)[:batch]
        size = self.config.vocab_size
        if params["ids"] is None:
            return scores[:, :size]
        return jnp.full((batch, size), -jnp.inf, jnp.float32).at[:, params["ids"]].set(scores)
