"""From logits to the distribution really sampled, and drawing from it: one way for plain decoding, drafts and rules."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32

from specjax import numerics, vocabulary
from specjax.sampling_params import GREEDY, Features, SamplingParams, features_of, stack
from specjax.truncation import CANDIDATES, truncate
from specjax.types import Purpose, RowSampling
from specjax.vocabulary import largest

__all__ = [
    "GREEDY", "Distribution", "Features", "SamplingParams", "distribution", "draw", "features_of", "fold", "for_draft",
    "gumbel", "purpose_key", "row_key", "stack", "uniforms",
]  # fmt: skip

# Temperatures below it act like it: logits that differ at all in float32 are already worlds apart.
SMALLEST_TEMPERATURE = 1e-30


@flax.struct.dataclass
class Distribution:
    """What is sampled, after all transforms.

    Attributes:
        probs: float32 [..., V], normalised; zeros where nothing is allowed. Used to verify.
        log_weights: float32 [..., V], log probs up to a constant per row; -inf where the probability is zero.
            Used to draw.
        few: static; a truncation is in force, so that hardly any token may be left.
    """

    probs: Float[Array, "*rows V"]
    log_weights: Float[Array, "*rows V"]
    few: bool = flax.struct.field(pytree_node=False, default=False)


def distribution(logits: Float[Array, "B T V"], sampling: RowSampling) -> Distribution:
    """Return the distribution each row samples from: temperature, then min-p, top-k, top-p; one-hot at temperature 0.

    Args:
        logits: with bias, bans and penalties in them (``specjax.transforms``).
        sampling: the rows' settings.
    """
    temperature = sampling.temperature[:, None, None]
    greedy = temperature == 0
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    # Below zero whatever the temperature: a tiny one gives -inf, never an infinity less an infinity.
    scaled = (logits - top) / jnp.maximum(temperature, SMALLEST_TEMPERATURE)
    best = jnp.arange(logits.shape[-1]) == vocabulary.argmax(logits)[..., None]
    log_weights = jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), scaled)
    few = sampling.truncation is not None
    if sampling.truncation is not None:
        log_weights = truncate(log_weights, sampling.truncation)
    weights = jnp.exp(log_weights)
    total = numerics.row_sum(weights)
    # Where a weight is so small that its probability rounds to zero it must not be drawn either (invariant 5).
    probs = jnp.where(total == 0, 0.0, weights / jnp.where(total == 0, 1.0, total))
    return Distribution(probs=probs, log_weights=jnp.where(probs > 0, log_weights, -jnp.inf), few=few)


def for_draft(sampling: RowSampling) -> RowSampling:
    """Return the settings that the draft samples with: its own temperature and truncation where it has them."""
    if sampling.draft_temperature is None:
        return sampling
    return dataclasses.replace(
        sampling,
        temperature=sampling.draft_temperature,
        truncation=sampling.draft_truncation,
        draft_temperature=None,
        draft_truncation=None,
    )


def draw(
    log_weights: Float[Array, "*rows V"], key: UInt32[Array, "*rows 2"], *, few: bool = False
) -> Int[Array, "*rows"]:
    """Draw one token per row by Gumbel-max; noise is indexed by token id, so padding V changes no draw.

    Args:
        log_weights: log probabilities up to a constant.
        key: consumed.
        few: rows of at most 64 tokens are likely: where all are, only those tokens' noise is computed. The draws are
            the same.
    """
    vocab = log_weights.shape[-1]
    rows, keys = log_weights.reshape(-1, vocab), key.reshape(-1, 2)

    def among_all() -> jax.Array:
        return vocabulary.argmax(rows + vocabulary.per_id(gumbel, keys, vocab))

    def among_few() -> jax.Array:
        values, ids = largest(rows, CANDIDATES)
        scores = values + jax.vmap(gumbel)(keys, ids)
        best = jnp.max(scores, axis=-1, keepdims=True)
        return jnp.min(jnp.where(scores == best, ids, vocab - 1), axis=-1).astype(jnp.int32)

    if few and vocab > CANDIDATES:
        fit = jnp.all(jnp.sum(rows > -jnp.inf, axis=-1) <= CANDIDATES)
        tokens = jax.lax.cond(fit, among_few, among_all)
    else:
        tokens = among_all()
    return tokens.reshape(log_weights.shape[:-1])


def gumbel(key: UInt32[Array, "2"], ids: Int[Array, " N"]) -> Float[Array, " N"]:
    """Return the noise of some token ids: entries ``ids`` of ``jax.random.gumbel(key, (V,))``, whatever V."""
    ids = ids.astype(jnp.uint32)
    bits = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(ids), ids]))
    bits = bits[: ids.shape[0]] ^ bits[ids.shape[0] :]
    uniform = jax.lax.bitcast_convert_type(bits >> 9 | np.uint32(0x3F800000), jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, np.finfo(np.float32).tiny)))


def uniforms(key: UInt32[Array, "B 2"], count: int) -> Float[Array, "B K"]:
    """Return ``count`` numbers in [0, 1) per row, one for each place of the block."""
    places = jnp.arange(count, dtype=jnp.uint32)
    return jax.vmap(lambda k: jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(_wrap(k), i)))(places))(key)


def fold(key: UInt32[Array, "B 2"], data: jax.Array | int) -> UInt32[Array, "B 2"]:
    """Fold a number (one per row, or one for all) into each row's key."""
    data = jnp.broadcast_to(jnp.asarray(data, jnp.uint32), key.shape[:1])
    return jax.vmap(lambda k, d: jax.random.key_data(jax.random.fold_in(_wrap(k), d)))(key, data)


def purpose_key(key: UInt32[Array, "B 2"], purpose: Purpose) -> UInt32[Array, "B 2"]:
    """Return the key of one purpose within a round."""
    return fold(key, int(purpose))


def row_key(seed: int, row_id: int | str, sample: int = 0) -> np.ndarray:
    """Return a row's key, uint32 [2]: the seed, a stable hash of the id's JSON text, and the sample number.

    Never the row's place in a file or batch. Threefry, whatever JAX's default is.
    """
    text = json.dumps(row_id)
    # 64 bits: with 32, two of a job's 100,000 rows would likely share all their draws.
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u4")
    key = jax.random.key(seed % 2**32, impl="threefry2x32")
    # A seed of more than 32 bits keeps all of them.
    for data in (seed >> 32 & 0xFFFFFFFF, *digest, sample):
        key = jax.random.fold_in(key, np.uint32(data))
    return np.asarray(jax.random.key_data(key))


def _wrap(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")
