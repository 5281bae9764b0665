"""From logits to the distribution really sampled, and drawing from it: one way for plain decoding, drafts and rules."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specjax import numerics
from specjax.errors import RowError
from specjax.types import Purpose, RowSampling

# Temperatures below it act like it: logits that differ at all in float32 are already worlds apart.
SMALLEST_TEMPERATURE = 1e-30


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one row samples.

    Attributes:
        temperature: divides the logits; 0 is greedy, the lowest id on ties.

    Raises:
        RowError: a value out of range.
    """

    temperature: float = 0.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RowError(f"temperature is {self.temperature}; expected a finite number >= 0 (0 is greedy).")


GREEDY = SamplingParams()


def stack(rows: list[SamplingParams]) -> RowSampling:
    """Return the settings of a batch as arrays."""
    return RowSampling(temperature=jnp.asarray([row.temperature for row in rows], jnp.float32))


@flax.struct.dataclass
class Distribution:
    """What is sampled, after all transforms.

    Attributes:
        probs: float32 [..., V], normalised. Used to verify.
        log_weights: float32 [..., V], log probs up to a constant per row; -inf where the probability is zero.
            Used to draw.
    """

    probs: Float[Array, "*rows V"]
    log_weights: Float[Array, "*rows V"]


def distribution(logits: Float[Array, "B T V"], sampling: RowSampling) -> Distribution:
    """Return the distribution each row samples from: a softmax at its temperature, or one-hot at temperature 0."""
    temperature = sampling.temperature[:, None, None]
    greedy = temperature == 0
    # A smaller divisor would overflow, and infinity less infinity is no probability.
    scaled = logits / jnp.where(greedy, 1.0, jnp.maximum(temperature, SMALLEST_TEMPERATURE))
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.bool_)
    log_weights = jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), scaled)
    # Where a weight is so small that its probability rounds to zero it must not be drawn either (invariant 5).
    probs = numerics.softmax(log_weights)
    return Distribution(probs=probs, log_weights=jnp.where(probs > 0, log_weights, -jnp.inf))


def draw(log_weights: Float[Array, "B V"], key: UInt32[Array, "B 2"]) -> Int[Array, " B"]:
    """Draw one token per row by Gumbel-max; noise is indexed by token id, so padding V changes no draw."""
    noise = jax.vmap(lambda k: jax.random.gumbel(_wrap(k), log_weights.shape[-1:], jnp.float32))(key)
    return jnp.argmax(log_weights + noise, axis=-1).astype(jnp.int32)


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
