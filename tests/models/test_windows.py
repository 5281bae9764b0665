"""Sliding windows: what a query sees, where the loop begins, and speculation past the window."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t

from specjax import cache as kv
from specjax.models import attention

attend = jax.jit(attention.chunks, static_argnames=("scale", "window", "cap"))


def windowed(q, k, v, start, scale, window, cap=None):
    """Attend in float64, query by query, over what each sees."""
    out = np.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for b, n, i in np.ndindex(*q.shape[:3]):
        seen = slice(max(0, start[b] + i - window + 1), start[b] + i + 1)
        scores = k[b, n // share, seen].astype(np.float64) @ q[b, n, i] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[b, n, i] = weights / weights.sum() @ v[b, n // share, seen]
    return out


def arrays(batch: int, num_new: int, capacity: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, 4, num_new, 8)).astype(np.float32)
    k, v = (rng.normal(size=(batch, 2, capacity, 8)).astype(np.float32) for _ in range(2))
    return q, k, v


def test_a_window_of_8_shows_a_query_itself_and_7_before():
    """Case 74: values are one-hot by position, all scores equal, so the output says what is seen."""
    num_new, start = 3, np.asarray([0, 5, 20])
    q, k = np.zeros((3, 1, num_new, 128), np.float32), np.zeros((3, 1, kv.CHUNK, 128), np.float32)
    v = np.broadcast_to(np.eye(kv.CHUNK, 128, dtype=np.float32), k.shape)
    found = np.asarray(attend(q, k, v, jnp.asarray(start, jnp.int32), scale=1.0, window=8))
    for row, first in enumerate(start):
        for i in range(num_new):
            seen = np.flatnonzero(found[row, 0, i] > 0)
            at = first + i
            assert seen.tolist() == list(range(max(0, at - 7), at + 1))


@pytest.mark.parametrize("window", [1, 8, 127, 128, 129, 300])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_window_over_chunks_is_a_softmax_over_what_is_seen(window, cap):
    """Rows before, at and after the edges of chunks; what lies past a row's tokens is large garbage."""
    start = np.asarray([0, kv.CHUNK - 2, kv.CHUNK + 5, 2 * kv.CHUNK - 1, 3 * kv.CHUNK + 60])
    q, k, v = arrays(5, 3, 4 * kv.CHUNK)
    for row, first in enumerate(start + 3):
        k[row, :, first:], v[row, :, first:] = 1e3, -1e6
    found = attend(q, k, v, jnp.asarray(start, jnp.int32), scale=0.5, window=window, cap=cap)
    np.testing.assert_allclose(found, windowed(q, k, v, start, 0.5, window, cap), atol=3e-6)


def test_mates_capacity_and_old_entries_change_no_bit():
    """A chunk in which a row sees nothing adds exactly nothing, also before the row's first."""
    q, k, v = arrays(2, 3, 4 * kv.CHUNK, seed=1)
    run = functools.partial(attend, scale=0.4, window=20)
    far = jnp.asarray([300, 420], jnp.int32)  # the loop begins at chunk 2
    alone = np.asarray(run(q, k, v, far))
    with_short_mate = run(q, k, v, jnp.asarray([300, 2], jnp.int32))  # it begins at chunk 0
    np.testing.assert_array_equal(alone[0], with_short_mate[0])
    grown = [np.pad(x, ((0, 0), (0, 0), (0, 4 * kv.CHUNK), (0, 0)), constant_values=7.0) for x in (k, v)]
    np.testing.assert_array_equal(alone, run(q, *grown, far))
    k[:, :, :280], v[:, :, :280] = 50.0, -3e30  # older than the window of 300
    np.testing.assert_array_equal(alone[0], run(q, k, v, jnp.asarray([300, 2], jnp.int32))[0])


def test_the_loop_begins_where_the_first_window_does():
    """NaN spreads from any chunk that is read, so none before the window's is."""
    q, k, v = arrays(1, 2, 4 * kv.CHUNK, seed=2)
    k[:, :, : 2 * kv.CHUNK], v[:, :, : 2 * kv.CHUNK] = np.nan, np.nan
    at = jnp.asarray([2 * kv.CHUNK + 19], jnp.int32)
    assert np.isfinite(attend(q, k, v, at, scale=1.0, window=20)).all()
    assert np.isnan(attend(q, k, v, at - 1, scale=1.0, window=20)).any()
    assert np.isnan(attend(q, k, v, at, scale=1.0)).any()


def noisy(model: t.Tiny, noise: float) -> t.Tiny:
    """Return the model with matrices moved by ``noise`` standard deviations."""
    rng = np.random.default_rng(7)

    def move(leaf):
        return leaf if leaf.ndim < 2 else leaf + noise * np.asarray(leaf).std() * rng.normal(size=leaf.shape)

    return t.Tiny(model.fn, jax.tree.map(lambda leaf: move(leaf).astype(leaf.dtype), model.params))


# Noise: standard deviations of random matrices added to the target, or a draft of the fixture.
DRAFTS = {
    "mistral-window": [0.03],
    "gemma2-softcap": [0.015],
    "gemma3-dual-rope": ["near", "mid", "far"],
    "qwen2-bias": [0.03],
    "qwen3-qknorm": [0.03],
}
GAMMA, NEW = 4, 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(name, kind, id=f"{name}-{kind}") for name, kinds in DRAFTS.items() for kind in kinds],
)
def test_speculative_greedy_equals_plain_past_the_window(name, kind):
    """Case 20: window 16, prompts of 1 to 90 tokens, 64 new ones with rejections; one width, so equal to the bit."""
    target = t.tiny(name)
    draft = t.tiny(f"{name}.draft-{kind}") if isinstance(kind, str) else noisy(target, kind)
    plain = t.run(t.program(target.fn, width=GAMMA + 1), target, None, t.prompts(name), NEW)
    program = t.program(target.fn, "model", draft.fn, gamma=GAMMA, width=GAMMA + 1)
    speculative = t.run(program, target, draft, t.prompts(name), NEW)
    for a, b in zip(plain, speculative, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert 0.2 < t.acceptance(speculative) < 0.95
