"""Layers in a loop: the same numbers as unrolled ones, caches in place, speculation with rejections."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny as t

from specjax.models import scan
from specjax.models.config import LayerKind
from specjax.models.decoder import DecoderFn

GAMMA, NEW = 4, 24


def scanned(model: t.Tiny) -> t.Tiny:
    fn = dataclasses.replace(model.fn, scan_layers=True)
    return t.Tiny(fn, scan.stack(fn.config, dict(model.params)))


@pytest.mark.parametrize(("pattern", "layers", "size", "stacked"), [
    ("aaaa", 4, 1, 4), ("abab", 4, 2, 4), ("ababa", 5, 2, 4), ("aab", 3, 3, 3), ("aabaabaa", 8, 3, 6),
])  # fmt: skip
def test_the_period_is_that_of_the_kinds(pattern, layers, size, stacked):
    kinds = tuple(LayerKind(window=8 if kind == "a" else None) for kind in pattern)
    config = dataclasses.replace(t.tiny().fn.config, num_layers=layers, kinds=kinds)
    assert (scan.period(config), scan.num_stacked(config)) == (size, stacked)


def test_fresh_parameters_have_the_stacked_form():
    fn = dataclasses.replace(t.tiny(layers=2).fn, scan_layers=True)
    shapes = jax.eval_shape(fn.init_params, jax.random.key(0))
    wanted = jax.tree.map(lambda leaf: leaf.shape, scanned(t.tiny(layers=2)).params)
    assert jax.tree.map(lambda leaf: leaf.shape, dict(shapes)) == wanted


@pytest.mark.parametrize("name", [t.TARGET, pytest.param("gemma3-dual-rope", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_text_is_that_of_unrolled_layers(name):
    """Plain against speculative with a noisy draft, both scanned, ragged and past the window where there is one."""
    target, draft = t.tiny(name), t.tiny(f"{name}.draft-near")
    plain = t.run(t.program(target.fn), target, None, t.prompts(name), NEW)
    loops = scanned(target), scanned(draft)
    program = t.program(loops[0].fn, "model", loops[1].fn, gamma=GAMMA)
    found = t.run(program, *loops, t.prompts(name), NEW)
    assert [row.ids.tolist() for row in found] == [row.ids.tolist() for row in plain]
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert 0.2 < t.acceptance(found) < 0.95


def step_text(fn: DecoderFn, params) -> str:
    cache = fn.init_cache(2, 512)
    step = jax.jit(lambda params, tokens, cache: fn(params, tokens, cache).cache, donate_argnums=2)
    return step.lower(params, np.zeros((2, 3), np.int32), cache).compile().as_text()


def test_the_program_does_not_grow_with_depth_and_copies_no_cache():
    """Compared at 2 and at 3 layers: unrolled, the second program is nearly half again the first."""
    models = {layers: scanned(t.tiny(layers=layers)) for layers in (2, 3)}
    texts = {layers: step_text(model.fn, model.params) for layers, model in models.items()}
    assert len(texts[3].splitlines()) < 1.05 * len(texts[2].splitlines())
    shape = ",".join(str(n) for n in models[3].fn.init_cache(2, 512).k[0].shape)
    assert f"f32[{shape}]" in texts[3]
    assert re.findall(rf"^.*f32\[{shape}\]\S* copy\(.*$", texts[3], re.MULTILINE) == []
