"""Texts packed side by side give the logits that each has alone; products have gradients of their own precision."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specjax import cache as kv
from specjax.models import layers

FIXTURES = ("llama-gqa-tied", "gemma2-softcap", "gemma3-dual-rope", "mistral-window", "qwen3-qknorm")


@pytest.mark.parametrize("name", FIXTURES)
def test_packed_texts_have_the_logits_of_each_alone(name):
    """Windows, soft caps and norms of queries among them; the cached pass is the reference."""
    model = tiny.tiny(name)
    reference = tiny.reference(name)
    texts = [reference["prompt_1"], reference["prompt_2"]]
    length = sum(map(len, texts)) + 5
    tokens, segment, position = (np.zeros((1, length), np.int32) for _ in range(3))
    place = 0
    for number, ids in enumerate(texts, 1):
        there = slice(place, place + len(ids))
        tokens[0, there], segment[0, there], position[0, there] = ids, number, np.arange(len(ids))
        place += len(ids)
    packed = kv.Packed(segment=jnp.asarray(segment), position=jnp.asarray(position))
    found = np.asarray(jax.jit(lambda p, t, c: model.fn(p, t, c).logits)(model.params, tokens, packed))
    place = 0
    for ids in texts:
        alone, _ = tiny.all_logits(model.fn)(model.params, jnp.asarray(ids)[None], model.fn.init_cache(1, len(ids)))
        np.testing.assert_allclose(found[0, place : place + len(ids)], alone[0], rtol=2e-4, atol=2e-4)
        place += len(ids)


def test_what_stands_in_another_text_changes_no_bit():
    model = tiny.tiny()
    segment = jnp.asarray([[1, 1, 1, 2, 2, 2]])
    packed = kv.Packed(segment=segment, position=jnp.asarray([[0, 1, 2, 0, 1, 2]]))
    run = jax.jit(lambda p, t: model.fn(p, t, packed).logits)
    one, other = (run(model.params, jnp.asarray([[5, 6, 7, x, 9, 10]])) for x in (8, 99))
    assert np.array_equal(one[0, :3], other[0, :3])
    assert not np.array_equal(one[0, 3:], other[0, 3:])


def test_remat_changes_neither_loss_nor_gradient():
    model = tiny.tiny(layers=2)
    packed = kv.Packed(segment=jnp.ones((1, 8), jnp.int32), position=jnp.arange(8)[None])
    tokens = jnp.arange(8)[None] + 3

    def gradient(remat: bool):
        fn = dataclasses.replace(model.fn, remat=remat)
        return jax.jit(jax.value_and_grad(lambda p: jnp.mean(fn(p, tokens, packed).logits ** 2)))(model.params)

    (loss, grads), (loss_again, grads_again) = gradient(False), gradient(True)
    np.testing.assert_allclose(loss, loss_again, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    text = jax.jit(jax.grad(lambda p: jnp.mean(dataclasses.replace(model.fn, remat=True)(p, tokens, packed).logits)))
    assert "checkpoint" in str(jax.make_jaxpr(text)(model.params)) or "remat" in str(jax.make_jaxpr(text)(model.params))


def test_a_product_has_the_gradient_of_its_formula():
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 6), (5, 6), (2, 3, 5)))
    _, back = jax.vjp(layers.matmul, x, w)
    grad_x, grad_w = back(g)
    np.testing.assert_allclose(grad_x, np.einsum("bto,oi->bti", g, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_w, np.einsum("bto,bti->oi", g, x), rtol=1e-5, atol=1e-5)


def test_bfloat16_products_accumulate_in_float32_in_both_passes():
    """4096 ones and a small number: a bfloat16 sum would stop at 256; a float32 weight's gradient stays float32."""
    x = jnp.ones((4096, 4096), jnp.float32)
    w = jnp.ones((1, 4096), jnp.float32)
    y, back = jax.vjp(lambda x, w: layers.matmul(x, w, jnp.bfloat16), x, w)
    assert y.dtype == jnp.float32
    assert float(y[0, 0]) == 4096.0
    _, grad_w = back(jnp.ones_like(y))
    assert grad_w.dtype == jnp.float32
    assert float(grad_w[0, 0]) == 4096.0
    wide = jnp.ones((4096, 3), jnp.float32)
    _, back = jax.vjp(lambda x: layers.matmul(x, wide, jnp.bfloat16), jnp.ones((2, 3), jnp.float32))
    assert float(back(jnp.ones((2, 4096)))[0][0, 0]) == 4096.0
    lowered = jax.jit(jax.grad(lambda w: jnp.sum(layers.matmul(x, w, jnp.bfloat16)))).lower(w).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert products
    assert all("bf16" in line.split("->")[0] and "f32>" in line.split("->")[1] for line in products)
