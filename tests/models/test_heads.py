"""Heads as they are trained: teacher forcing gives what the loop's own steps give."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import heads

D, V, T, BATCH = 16, 24, 12, 2
CONFIGS = {
    "mlp": heads.HeadConfig("mlp", D, V, mlp_width=24),
    "eagle": heads.HeadConfig("eagle", D, V, mlp_width=24, num_heads=4, num_kv_heads=2, head_dim=4),
    "medusa": heads.HeadConfig("medusa", D, V, positions=3),
    "early_exit": heads.HeadConfig("early_exit", D, V, layers=1, adapter=4),
}
FEATURES = jax.random.normal(jax.random.key(0), (BATCH, T, D))
TOKENS = jax.random.randint(jax.random.key(1), (BATCH, T), 0, V)
EMBEDDING = jax.random.normal(jax.random.key(2), (V, D))


def random_head(kind: str) -> dict[str, jax.Array]:
    """Return parameters none of which is zero."""
    shapes = CONFIGS[kind].shapes()
    return {
        name: (0.5 if len(shape) == 1 else shape[-1] ** -0.5) * jax.random.normal(jax.random.key(i), shape)
        + float(name in heads.NORMS)
        for i, (name, shape) in enumerate(shapes.items())
    }


def loop_params(params) -> dict:
    return {"head": params, "embedding": EMBEDDING, "output": EMBEDDING, "rows": EMBEDDING, "ids": None}


def final(kind: str, params, hidden) -> np.ndarray:
    """Return what the output rows are multiplied with, in plain NumPy."""
    hidden = np.asarray(hidden)
    return hidden / np.sqrt(np.mean(hidden**2, -1, keepdims=True) + CONFIGS[kind].norm_eps) * params["norm"]


@pytest.mark.parametrize("kind", ["mlp", "eagle"])
def test_every_step_of_training_is_what_a_draft_would_compute(kind):
    """Step s at t: true features up to t - s - 1, then s own ones; an eagle attends the entries of both."""
    params, steps = random_head(kind), 3
    fn = heads.HeadFn(CONFIGS[kind])
    trained = np.asarray(heads.outputs(CONFIGS[kind], params, FEATURES, TOKENS, EMBEDDING, steps))
    shifted = jnp.pad(FEATURES, ((0, 0), (1, 0), (0, 0)))[:, :T]
    advance = jax.jit(fn.advance)
    for first in range(T - steps):
        cache = fn.init_cache(BATCH, 32)
        hidden, cache = advance(loop_params(params), TOKENS, shifted, cache)
        feature = hidden[:, first]
        np.testing.assert_allclose(trained[0, :, first], final(kind, params, feature), rtol=1e-4, atol=1e-4)
        for step in range(1, steps):
            at = kv.rollback(cache, jnp.full((BATCH,), first + step))
            token = TOKENS[:, first + step, None]
            hidden, cache = advance(loop_params(params), token, feature[:, None], at)
            feature = hidden[:, 0]
            expected = final(kind, params, feature)
            np.testing.assert_allclose(trained[step, :, first + step], expected, rtol=1e-4, atol=1e-4)


def test_heads_side_by_side_stand_where_their_tokens_stand():
    params = random_head("medusa")
    fn = heads.HeadFn(CONFIGS["medusa"])
    trained = heads.outputs(CONFIGS["medusa"], params, FEATURES, TOKENS, EMBEDDING, 3)
    shifted = jnp.pad(FEATURES, ((0, 0), (1, 0), (0, 0)))[:, :T]
    each = final("medusa", params, fn.advance(loop_params(params), TOKENS, shifted, fn.init_cache(BATCH, T))[0])
    for i in range(3):
        np.testing.assert_allclose(trained[i, :, i:], each[:, : T - i, i], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="steps is 4"):
        heads.outputs(CONFIGS["medusa"], params, FEATURES, TOKENS, EMBEDDING, 4)


@pytest.mark.parametrize("kind", ["mlp", "eagle", "medusa"])
def test_texts_in_one_row_do_not_see_each_other(kind):
    params, first = random_head(kind), 5
    position = jnp.concatenate([jnp.arange(first), jnp.arange(T - first)])
    position = jnp.broadcast_to(position, (BATCH, T))
    packed = heads.outputs(CONFIGS[kind], params, FEATURES, TOKENS, EMBEDDING, 3, position)
    for part in (slice(0, first), slice(first, T)):
        alone = heads.outputs(CONFIGS[kind], params, FEATURES[:, part], TOKENS[:, part], EMBEDDING, 3)
        counted = heads.valid(3, jnp.ones((BATCH, alone.shape[2])))
        np.testing.assert_allclose(packed[:, :, part][counted], alone[counted], rtol=1e-4, atol=1e-5)
    count = heads.valid(2, jnp.ones((BATCH, T)), position)
    assert np.flatnonzero(~count[1, 0]).tolist() == [0, first]


def test_what_stands_before_the_first_draft_does_not_count():
    mask = jnp.asarray([[True, True, True, False], [False, True, True, True]])
    found = heads.valid(2, mask)
    assert found[0].tolist() == mask.tolist()
    assert found[1].tolist() == [[False, True, True, False], [False, True, True, True]]


@pytest.mark.parametrize("kind", heads.KINDS)
def test_a_new_head_has_its_shapes_and_every_parameter_can_learn(kind):
    config = CONFIGS[kind]
    params = heads.init(config, jax.random.key(3))
    assert {name: leaf.shape for name, leaf in params.items()} == config.shapes()
    start = random_head(kind)  # zeros hide their neighbours' gradients
    steps = 1 if kind == "early_exit" else 2

    def loss(params):
        found = heads.outputs(config, params, FEATURES, TOKENS, EMBEDDING, steps)
        scores = heads.logits_of(params, found, EMBEDDING)
        return -jnp.mean(jax.nn.log_softmax(scores)[..., 0])

    for name, grad in jax.jit(jax.grad(loss))(start).items():
        assert np.all(np.isfinite(grad)), name
        assert np.any(grad != 0), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "rnn"}, "kind is 'rnn'"),
        ({"mlp_width": 0}, "mlp_width is 0"),
        ({"num_ids": 30}, "num_ids is 30 of 24"),
        ({"kind": "eagle", "num_heads": 3, "num_kv_heads": 2, "head_dim": 4}, "3 query heads"),
    ],
)
def test_sizes_that_do_not_go_together_are_named(change, words):
    assert words in (dataclasses.replace(CONFIGS["mlp"], **change).problem() or "")
