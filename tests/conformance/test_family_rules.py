"""Every family under every kind of decoding: a noisy draft of its own, greedy rows and sampled rows in one batch.

Past the window, where the family has one: prompts are longer than the windows of the examples.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import tiny as t
from scipy.stats import chisquare

from specjax.models.decoder import DecoderFn
from specjax.models.registry import FAMILIES

PROMPT, NEW, GAMMA, SAMPLES = 8, 24, 3, 480
VOCAB = 24
# Between them: windows, soft caps, two rotary bases. Compiling is what the others cost.
QUICK = {"gemma3"}
NAMES = [
    pytest.param(family.name, marks=[] if family.name in QUICK else pytest.mark.slow, id=family.name)
    for family in FAMILIES
]


@functools.cache
def models(name: str) -> tuple[t.Tiny, t.Tiny]:
    """Return a random model of the family's first example, and a noisy copy."""
    family = next(family for family in FAMILIES if family.name == name)
    fn = DecoderFn(family.parse(family.examples[0]))
    assert fn.config.vocab_size == VOCAB
    params = jax.tree.map(np.asarray, jax.jit(fn.init_params)(jax.random.key(1)))
    rng = np.random.default_rng(2)
    # Loud enough to have preferences, not so loud that a tied model repeats its last token.
    std, noise = (0.125, 0.15) if fn.config.scaled_embedding else (0.5, 0.1)
    loud = {key: std / params[key].std() * params[key] for key in ("embedding", "head") if key in params}
    params = {**params, **loud}
    noisy = jax.tree.map(
        lambda leaf: leaf + noise * leaf.std() * rng.normal(size=leaf.shape).astype(np.float32), params
    )
    return t.Tiny(fn, params), t.Tiny(fn, noisy)


def full_logits(model: t.Tiny, texts: np.ndarray) -> np.ndarray:
    """Return logits of whole texts [24, PROMPT + NEW], each in one pass."""
    cache = model.fn.init_cache(len(texts), texts.shape[1])
    return np.asarray(t.all_logits(model.fn)(model.params, texts, cache)[0])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@functools.cache
def results(name: str):
    """Run four greedy rows and SAMPLES rows of one prompt at temperature 1, through one program."""
    target, draft = models(name)
    prompts = np.random.default_rng(3).integers(0, VOCAB, size=(4, PROMPT))
    program = t.program(target.fn, "model", draft.fn, rule="rejection", gamma=GAMMA, vocab=VOCAB)
    found = t.run(
        program,
        target,
        draft,
        [*prompts, *[prompts[0]] * SAMPLES],
        [NEW] * 4 + [3] * SAMPLES,
        temperature=[0.0] * 4 + [1.0] * SAMPLES,
        batch_size=64,
        longest=PROMPT + NEW,
    )
    return prompts, found[:4], found[4:]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_rows_are_the_targets_own(name):
    target, _ = models(name)
    prompts, greedy, _ = results(name)
    texts = np.zeros((VOCAB, PROMPT + NEW), np.int32)
    texts[:4] = [np.concatenate([prompt, row.ids]) for prompt, row in zip(prompts, greedy, strict=True)]
    logits = full_logits(target, texts)[:4, PROMPT - 1 : -1]
    best = np.sort(logits, axis=-1)
    sure = best[..., -1] - best[..., -2] > 1e-3
    assert sure.mean() > 0.9
    np.testing.assert_array_equal(logits.argmax(-1)[sure], texts[:4, PROMPT:][sure])


@pytest.mark.parametrize("name", NAMES)
def test_sampled_rows_have_the_targets_law(name):
    """The first and the second token, whose exact law is a sum over 24 first ones."""
    target, _ = models(name)
    prompts, _, sampled = results(name)
    texts = np.zeros((VOCAB, PROMPT + NEW), np.int32)
    texts[:, :PROMPT], texts[:, PROMPT] = prompts[0], np.arange(VOCAB)
    probs = softmax(full_logits(target, texts)[:, PROMPT - 1 : PROMPT + 1])
    laws = (probs[0, 0], probs[0, 0] @ probs[:, 1])
    for place, law in enumerate(laws):
        counts = np.bincount([row.ids[place] for row in sampled], minlength=VOCAB)
        order = np.argsort(law)
        groups = np.searchsorted(np.cumsum(law[order]), np.linspace(0, 1, 13)[1:-1])
        counts, law = (np.add.reduceat(x[order], np.unique([0, *groups])) for x in (counts, law))
        assert len(law) >= 5
        assert chisquare(counts, law / law.sum() * SAMPLES).pvalue > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_draft_is_neither_perfect_nor_useless(name):
    _, greedy, sampled = results(name)
    assert 0.2 < t.acceptance(greedy) < 0.95
    assert 0.2 < np.mean([row.accepted[0] for row in sampled]) < 0.95
