"""What every model family promises, on tiny random models of its own examples."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import Family
from specjax.models.decoder import DecoderFn
from specjax.models.registry import FAMILIES

CASES = [(family, family.parse(example)) for family in FAMILIES for example in family.examples]


def test_every_family_gives_an_example():
    assert {family.name for family, _ in CASES} == {family.name for family in FAMILIES}


def made(family: Family, config) -> tuple[Family, DecoderFn, dict]:
    """Return a random model; the shapes are those of ``init_params``, which would take a second to compile."""
    fn, rng = DecoderFn(config), np.random.default_rng(0)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=shape.shape)
        values = 1 + 0.1 * noise if len(shape.shape) == 1 else noise / np.sqrt(shape.shape[-1])
        return jnp.asarray(values, shape.dtype)

    return family, fn, jax.tree.map(leaf, jax.eval_shape(fn.init_params, jax.random.key(0)))


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].name}{CASES.index(case)}", scope="module")
def case(request) -> tuple[Family, DecoderFn, dict]:
    return made(*request.param)


# Each of these costs two more compilations a family.
DEARER = [case if case[0].name == "llama" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.fixture(params=DEARER, ids=lambda case: f"{case[0].name}{CASES.index(case)}", scope="module")
def dear_case(request) -> tuple[Family, DecoderFn, dict]:
    return made(*request.param)


@functools.cache
def compiled(fn: DecoderFn):
    return jax.jit(fn.__call__, static_argnames=("features",))


def test_the_leaves_are_the_models_parameters(case):
    family, fn, params = case
    found = {tuple(key.key for key in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert found == {leaf.path: leaf.shape for leaf in family.leaves(fn.config)}


def test_the_leaves_hold_every_row_of_every_tensor_once(case):
    family, fn, _ = case
    done: dict[str, tuple[int, int]] = {}  # rows that leaves hold so far, and all rows
    for leaf in family.leaves(fn.config):
        rows = [shape[-1] if leaf.transposed else shape[0] for shape in leaf.source_shapes]
        first, last = leaf.rows or (0, sum(rows))
        assert last - first == leaf.shape[0]
        for source, count in zip(leaf.sources, rows, strict=True):
            held = done.get(source, (0, count))[0]
            assert held == first if leaf.rows else source not in done
            done[source] = (last if leaf.rows else count, count)
    assert all(held == count for held, count in done.values())


def test_cached_blocks_give_the_logits_of_one_pass(case):
    """Rows of one batch at different lengths, blocks of 1 and 4 tokens, tokens beyond the valid length overwritten."""
    _, fn, params = case
    tokens = np.random.default_rng(0).integers(0, 24, size=(2, 13)).astype(np.int32)
    call = compiled(fn)
    whole = call(params, tokens, fn.init_cache(2, 16)).logits
    assert whole.dtype == jnp.float32
    cache, at = fn.init_cache(2, 16), 0
    for size in (4, 1, 4):
        ahead = call(params, tokens[:, at : at + size][:, ::-1], cache)  # a block that is rolled back
        cache = ahead.cache.replace(length=cache.length)
        out = call(params, tokens[:, at : at + size], cache)
        np.testing.assert_allclose(out.logits, whole[:, at : at + size], atol=1e-5)
        cache, at = out.cache, at + size
    # From here row 1 is two tokens behind.
    cache = cache.replace(length=jnp.asarray([9, 7]))
    block = np.stack([tokens[0, 9:13], tokens[1, 7:11]])
    out = call(params, block, cache)
    np.testing.assert_allclose(out.logits[0], whole[0, 9:13], atol=1e-5)
    np.testing.assert_allclose(out.logits[1], whole[1, 7:11], atol=1e-5)
    assert out.cache.length.tolist() == [13, 11]


def test_less_can_be_asked_for(dear_case):
    _, fn, params = dear_case
    tokens = np.random.default_rng(1).integers(0, 24, size=(2, 5)).astype(np.int32)
    whole = compiled(fn)(params, tokens, fn.init_cache(2, 16), features=True)
    one = compiled(fn)(params, tokens, fn.init_cache(2, 16), logits=np.asarray([3, 1]), features=True)
    none = jax.jit(functools.partial(fn, logits="none"))(params, tokens, fn.init_cache(2, 16))
    assert none.logits is None
    np.testing.assert_allclose(one.logits, np.asarray(whole.logits)[np.arange(2), [3, 1]], atol=1e-5)
    assert whole.features.shape == (2, 5, fn.config.width)
    np.testing.assert_allclose(whole.features, one.features, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), none.cache, whole.cache)


def test_a_model_function_is_a_static_argument(case):
    _, fn, _ = case
    assert hash(fn) == hash(dataclasses.replace(fn))
    assert fn == dataclasses.replace(fn)


def test_bfloat16_gives_float32_logits(dear_case):
    _, fn, params = dear_case
    narrow = dataclasses.replace(fn, dtype="bfloat16")
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim == 2 else leaf, params)
    tokens = np.random.default_rng(2).integers(0, 24, size=(1, 6)).astype(np.int32)
    found, exact = (compiled(f)(p, tokens, f.init_cache(1, 6)).logits for f, p in ((narrow, cast), (fn, params)))
    assert found.dtype == jnp.float32
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max() + 1e-3
