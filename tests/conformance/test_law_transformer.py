"""The law on a real transformer with a noisy draft: caches, rollback and ragged prompts in play.

A fixture cut to one layer, the first 6 ids in use. n = 102,400 draws of 3 tokens after two prompts; the exact law
comes from plain teacher-forced logits of every prefix. 432 cells at most, those below 5 expected draws pooled; the
statistic is Pearson's, chi-square under the law; a right implementation fails with probability 1e-5.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny as t
import toy_laws
import toys
from kinds import SAMPLING_RULES

V, NEW, GAMMA, BATCH, CALLS = 6, 3, 2, 1024, 100
PROMPTS = [[5, 170], [44]]
TEMPERATURE = 3.0  # the fixture is sure of itself


def exact_law(model: t.Tiny, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return the law of NEW tokens from one plain pass over every prefix of NEW - 1 of them."""
    prefixes = list(itertools.product(range(V), repeat=NEW - 1))
    tokens = np.asarray([[*prompt, *prefix] for prefix in prefixes], np.int32)
    logits = t.all_logits(model.fn)(model.params, tokens, model.fn.init_cache(len(prefixes), 128))[0]
    scaled = np.asarray(logits[:, len(prompt) - 1 :, :V], np.float64) / TEMPERATURE
    probs = np.exp(scaled - scaled.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    law = {}
    for row, prefix in enumerate(prefixes):
        before = np.prod([probs[row, i, token] for i, token in enumerate(prefix)])
        law |= {(*prefix, last): before * probs[row, NEW - 1, last] for last in range(V)}
    return law


@pytest.mark.slow
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_outputs_of_a_transformer_have_exactly_its_law(rule):
    target, draft = t.tiny(layers=1), t.tiny(t.FAR, layers=1)
    outputs: list[list[tuple[int, ...]]] = [[] for _ in PROMPTS]
    rates = []
    for call in range(CALLS):
        run = toys.run_batch(
            target.fn,
            t.drafter("model", draft.fn, V),
            {"target": target.params, "draft": draft.params},
            [PROMPTS[i % 2] for i in range(BATCH)],
            rule=rule,
            gamma=GAMMA,
            max_new=NEW,
            vocab=V,
            temperature=TEMPERATURE,
            seed=call,
        )
        for i, output in enumerate(run.outputs):
            outputs[i % 2].append(output)
        rates.append(run.acceptance)
    assert 0.3 < np.mean(rates) < 0.9
    p_value, cells = toy_laws.chi_square(zip(outputs, [exact_law(target, p) for p in PROMPTS], strict=True))
    assert cells > 100
    assert p_value > 1e-5
