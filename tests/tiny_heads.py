"""Heads for the tiny transformer, trained for some seconds on what it says: acceptance is neither 0 nor 1."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny as t

from specjax.head_folder import Head, Made, head_of
from specjax.models import heads
from specjax.types import Drafter

D, LAYERS = 64, 1
SIZES = {
    "mlp": {"mlp_width": 96},
    "eagle": {"mlp_width": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    "medusa": {"positions": 3},
    "early_exit": {"layers": LAYERS, "adapter": 16},
}
IDS = np.arange(0, t.VOCAB, 2, dtype=np.int32)  # half of the ids are scored, and those of the prompt
STEPS = 400


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts with the target's greedy text after each, [4, T], and where a token follows."""
    whole = [[*prompt, *ids] for prompt, ids in zip(t.prompts(), t.greedy(), strict=True)]
    longest = max(map(len, whole))
    there = np.asarray([[i < len(text) for i in range(longest)] for text in whole])
    return np.asarray([text + [0] * (longest - len(text)) for text in whole], np.int32), there


@functools.cache
def head(kind: str, *, listed: bool = False, steps: int = STEPS) -> Head:
    """Return a head of a kind, trained by forward KL at two own-feature steps.

    Args:
        kind: one of KINDS.
        listed: its output scores IDS.
        steps: of training; 0: as initialised.
    """
    config = heads.HeadConfig(
        kind, D, t.VOCAB, num_ids=len(IDS) if listed else 0, prompt_ids=16, embedding_scale=2.0, **SIZES[kind]
    )
    target = t.tiny()
    embedding = target.params["embedding"]
    depth = 1 if kind == "early_exit" else 2
    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))
    tokens, there = texts()

    def loss(params):
        cache = target.fn.init_cache(*tokens.shape)
        out = target.fn(target.params, tokens, cache, features=True)
        seen = out.features
        if kind == "early_exit":
            seen = target.fn(target.params, tokens, cache, logits="none", features=True, layers=(0, LAYERS)).features
        found = heads.outputs(config, params, seen, tokens, embedding, depth)
        log_q = jax.nn.log_softmax(heads.logits_of(params, found, embedding))
        each = -jnp.sum(jax.nn.softmax(out.logits) * log_q, axis=-1)
        valid = heads.valid(depth, jnp.asarray(there))
        return jnp.sum(jnp.where(valid, each, 0.0)) / jnp.sum(valid)

    @jax.jit
    def train(params):
        def step(_, carry):
            params, state = carry
            updates, state = optimiser.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, steps, step, (params, optimiser.init(params)))[0]

    params = heads.init(config, jax.random.key(0))
    params = {name: np.asarray(leaf) for name, leaf in (train(params) if steps else params).items()}
    return Head(kind, config, Made("tiny"), IDS if listed else None, params, "float32")


@functools.cache
def source(kind: str, *, listed: bool = False, steps: int = STEPS) -> tuple[Drafter, dict]:
    """Return a head as a draft source of the tiny target, always the same object, and its parameters."""
    return head_of(head(kind, listed=listed, steps=steps), t.pair(t.tiny()).target)
