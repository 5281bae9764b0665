"""Every family against logits and greedy tokens of transformers, on small random checkpoints.

The folders of tests/data/families are made by scripts/make_family_references.py: windows shorter than the prompt,
heads that do not add up to the width, soft caps, biases, routing, and configs as transformers 4 wrote them.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DATA, all_logits, reference, tiny

from specjax.checkpoint.hf import read_config
from specjax.models.registry import FAMILIES

FIXTURES = ["mistral-window", "qwen2-bias", "qwen3-qknorm", "gemma2-softcap", "gemma3-dual-rope"]
FOLDERS = FIXTURES + sorted(f"families/{path.name}" for path in (DATA / "families").iterdir())
# One pass sees most of what these see.
FEW = [
    pytest.param(name, marks=[pytest.mark.slow] if name.startswith("families/") else [], id=name) for name in FOLDERS
]
CAPACITY = 256
TOLERANCE = 5e-5  # relative to the largest logit; the largest difference seen is 8e-6
STEP = 7
KEYS = ("greedy", "margin")


@functools.cache
def prompts(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a folder's prompts side by side, padded with 5, and their lengths."""
    found = [reference(name)[key] for key in sorted(reference(name)) if key.startswith("prompt_")]
    sizes = np.asarray([len(prompt) for prompt in found], np.int32)
    return np.stack([np.pad(prompt, (0, sizes.max() - len(prompt)), constant_values=5) for prompt in found]), sizes


@functools.cache
def fed_whole(name: str):
    """Run all prompts in one pass; return logits and a cache that holds each row's own prompt."""
    model, (tokens, sizes) = tiny(name), prompts(name)
    logits, cache = all_logits(model.fn)(model.params, tokens, model.fn.init_cache(len(tokens), CAPACITY))
    return np.asarray(logits), dataclasses.replace(cache, length=jnp.asarray(sizes))


def assert_references(name: str, logits: np.ndarray) -> None:
    for i, size in enumerate(prompts(name)[1]):
        expected = reference(name)[f"logits_{i}"]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(logits[i, :size] / scale, expected / scale, atol=TOLERANCE, rtol=0)


def test_every_family_has_a_folder():
    covered = {read_config(DATA / name)[1].name for name in FOLDERS}
    assert covered | {"llama"} == {family.name for family in FAMILIES}


@pytest.mark.parametrize("name", FOLDERS)
def test_whole_prompts(name):
    assert_references(name, fed_whole(name)[0])


@pytest.mark.parametrize("name", FEW)
def test_one_token_at_a_time(name):
    model, (tokens, _) = tiny(name), prompts(name)
    cache, found = model.fn.init_cache(len(tokens), CAPACITY), []
    for at in range(tokens.shape[1]):
        logits, cache = all_logits(model.fn)(model.params, tokens[:, at : at + 1], cache)
        found.append(np.asarray(logits))
    assert_references(name, np.concatenate(found, axis=1))


@pytest.mark.parametrize("name", FEW)
def test_ragged_blocks_with_rejections(name):
    """Each row keeps 1 to 7 tokens of a block of 7; the rest of it is wrong, and rolled back (case 20)."""
    rng = np.random.default_rng(0)
    model, (tokens, _) = tiny(name), prompts(name)
    batch, longest = tokens.shape
    wide = np.pad(tokens, ((0, 0), (0, STEP)))
    cache, at = model.fn.init_cache(batch, CAPACITY), np.zeros(batch, np.int32)
    vocab = reference(name)["logits_0"].shape[-1]
    found = np.zeros((batch, longest + STEP, vocab), np.float32)
    while at.min() < longest:
        keep = np.minimum(rng.integers(1, STEP + 1, batch), longest - at)
        block = np.stack([wide[row, start : start + STEP] for row, start in enumerate(at)])
        block[np.arange(STEP) >= keep[:, None]] += 1
        logits, cache = all_logits(model.fn)(model.params, block % vocab, cache)
        for row, (start, count) in enumerate(zip(at, keep, strict=True)):
            found[row, start : start + count] = logits[row, :count]
        at = at + keep
        cache = dataclasses.replace(cache, length=jnp.asarray(at))
    assert_references(name, found)


@pytest.mark.parametrize("name", FEW)
def test_greedy_tokens(name):
    """Step by step along the reference's own text; past it by up to 48 tokens, over the edge of a chunk."""
    model, (_, sizes) = tiny(name), prompts(name)
    logits, cache = fed_whole(name)
    expected, margins = (np.stack([reference(name)[f"{key}_{i}"] for i in range(len(sizes))]) for key in KEYS)
    chosen = [logits[np.arange(len(sizes)), sizes - 1].argmax(-1)]
    for step in range(expected.shape[1] - 1):
        logits, cache = all_logits(model.fn)(model.params, expected[:, step : step + 1], cache)
        chosen.append(np.asarray(logits[:, 0]).argmax(-1))
    sure = margins > 1e-3
    assert sure.mean() > 0.95
    np.testing.assert_array_equal(np.stack(chosen, axis=1)[sure], expected[sure])


# What must not be missed: changing it in the config moves logits far beyond the tolerance.
TELLING = {
    "mistral-window": {"sliding_window": 17},
    "qwen3-qknorm": {"rms_norm_eps": 1e-3},
    "gemma2-softcap": {"attn_logit_softcapping": None, "query_pre_attn_scalar": 25, "sliding_window": 15},
    "gemma3-dual-rope": {"sliding_window": 17, "query_pre_attn_scalar": 33},
    "families/mistral-old": {"sliding_window": 8, "rope_theta": 5100.0},
    "families/qwen2-upper-window": {"sliding_window": 9, "layer_types": ["full_attention"] * 3},
    "families/gemma2-old": {"final_logit_softcapping": 7.0, "attn_logit_softcapping": 4.1},
    "families/gemma3-old": {"rope_local_base_freq": 110.0, "rope_theta": 6000.0, "sliding_window_pattern": 2},
    "families/phi3-partial": {"sliding_window": 10, "rope_parameters": {"partial_rotary_factor": 1.0}},
    "families/gpt2": {"layer_norm_epsilon": 1e-3, "activation_function": "gelu"},
    "families/mixtral-old": {"num_experts_per_tok": 1, "sliding_window": 11},
    "families/qwen3-moe": {"norm_topk_prob": False},
    "families/qwen3-moe-unnormalised": {"norm_topk_prob": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [(name, key) for name, changes in TELLING.items() for key in changes])
def test_the_references_tell(name, key):
    """Each of these settings shows in the references: a reader that dropped it would fail the tests above."""
    model, (tokens, _) = tiny(name), prompts(name)
    hf, family, config = read_config(DATA / name)
    changed = family.parse({**json.loads(json.dumps(hf)), key: TELLING[name][key]})
    assert changed != config
    row = len(tokens) - 1
    fn = dataclasses.replace(model.fn, config=changed)
    out = fn(model.params, tokens[row:], fn.init_cache(1, CAPACITY))
    expected = reference(name)[f"logits_{row}"]
    assert np.abs(out.logits[0] - expected).max() > 4 * TOLERANCE * np.abs(expected).max()
