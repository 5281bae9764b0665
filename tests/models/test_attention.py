"""Every implementation of attention: the chunk loop's numbers, in blocks, with rejections and past a window."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t

from specjax import UsageError, load
from specjax import cache as kv
from specjax.models.attention import ATTENTION, Attention, chunks, refuse

OTHERS = [name for name in ATTENTION if name != "chunks"]
GAMMA, NEW = 4, 24


@functools.cache
def compiled(name: str):
    return jax.jit(ATTENTION[name].attend, static_argnames=("scale", "window", "cap"))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_new", [1, 5])
def test_a_candidate_block_attends_as_over_chunks(name, window, num_new):
    """Ragged rows; what lies past their tokens is large garbage."""
    rng, start = np.random.default_rng(0), np.asarray([0, 60, kv.CHUNK - 2])
    q = rng.normal(size=(3, 4, num_new, 8)).astype(np.float32)
    k, v = (rng.normal(size=(3, 2, 2 * kv.CHUNK, 8)).astype(np.float32) for _ in range(2))
    for row, first in enumerate(start + num_new):
        k[row, :, first:], v[row, :, first:] = 1e3, -1e6
    at = jnp.asarray(start, jnp.int32)
    found, wanted = (compiled(which)(q, k, v, at, scale=0.4, window=window) for which in (name, "chunks"))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def decoded(attention: str, source: str, model: str):
    target, draft = t.tiny(model), t.tiny(f"{model}.draft-near")
    fns = [dataclasses.replace(m.fn, attention=attention) for m in (target, draft)]
    program = t.program(fns[0], source, fns[1] if source == "model" else None, gamma=GAMMA if source == "model" else 0)
    prompts = t.prompts(model)
    return t.run(program, t.Tiny(fns[0], target.params), t.Tiny(fns[1], draft.params), prompts, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("model", ["llama-gqa-tied", "gemma3-dual-rope"])
def test_greedy_text_is_that_of_the_chunk_loop(name, model):
    """With a noisy draft and without: margins of these fixtures are far above the rounding of two orders of summing."""
    wanted = [row.ids.tolist() for row in decoded("chunks", "none", model)]
    assert [row.ids.tolist() for row in decoded(name, "none", model)] == wanted
    speculative = decoded(name, "model", model)
    assert [row.ids.tolist() for row in speculative] == wanted
    assert 0.2 < t.acceptance(speculative) < 0.95


@pytest.mark.parametrize("num_new", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 16), (9, 3, 64)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_at_every_width(heads, groups, size, num_new):
    rng = np.random.default_rng(num_new)
    shapes = ((4, heads, num_new, size), *[(4, groups, 2 * kv.CHUNK, size)] * 2)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    start = np.asarray([20, kv.CHUNK + 2, kv.CHUNK + 30, 50], np.int32)
    run = jax.jit(functools.partial(chunks, scale=0.25))
    together = np.asarray(run(q, k, v, start))
    for i in range(2):
        one = slice(i, i + 1)
        np.testing.assert_array_equal(np.asarray(run(q[one], k[one], v[one], start[one])), together[one])


def test_what_cannot_be_had_is_refused_by_name(monkeypatch):
    plain, capped = t.tiny().fn.config, t.tiny("gemma2-softcap").fn.config
    monkeypatch.setitem(ATTENTION, "kernel", Attention(chunks, backends=("tpu",)))
    assert refuse("chunks", capped, "cpu") is None
    assert refuse("kernel", plain, "tpu") is None
    assert "soft cap" in (refuse("dot_product", capped, "cpu") or "")
    assert "runs on tpu and this is cpu" in (refuse("kernel", plain, "cpu") or "")
    with pytest.raises(UsageError, match="known: chunks, dot_product"):
        load(t.DATA / t.TARGET, "none", attention="flash")
    with pytest.raises(UsageError, match="gemma2-softcap: attention 'dot_product' knows no soft cap"):
        load(t.DATA / "gemma2-softcap", "none", attention="dot_product")
