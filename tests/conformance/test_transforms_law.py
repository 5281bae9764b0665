"""Each transform, alone and all together, under every lossless rule: the joint law of whole outputs is exact.

As test_law.py: a Markov chain of 4 tokens that reads its context from a real cache, prompts of 1 to 5 tokens, an EOS,
blocks of 3 drafts from a noisy copy that is shaped in the same way. Groups of settings and prompts stand side by side
in one batch, and the exact law of each comes from the transforms in plain NumPy (``specjax.reference_transforms``).
n = 65,536 draws, 104 groups where all settings share a batch, 8 to 16 elsewhere; a right implementation fails with
probability 1e-5. In 8 groups of about 100 cells a total variation of 0.04 in each moves the statistic by 4 n 0.04^2 =
420, ten of its deviations; one of the 104 groups alone is seen from a total variation of 0.4 on.
"""

from __future__ import annotations

import numpy as np
import pytest
import toy_laws
import toys
from kinds import SAMPLING_RULES

from specjax.constraint import automaton
from specjax.draft import model_drafter, ngram_drafter, no_drafter
from specjax.sampling import SamplingParams

V, EOS, GAMMA, NEW = toys.LAW_VOCAB, toys.LAW_EOS, toys.LAW_GAMMA, 4
TABLE = toys.LAW_TABLE
DRAFT = toys.noisy(TABLE, 1.0, seed=1)
PROMPTS = [[1], [2, 3], [3, 1, 2, 1, 2], [3, 3, 1, 0, 2]]
DRAFTER = model_drafter(toys.MarkovFn(V), V)
FALSE_ALARM = 1e-5
ONE_FAST = [SAMPLING_RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in SAMPLING_RULES[1:])]

ALL = {
    "logit_bias": {1: 0.7, 3: -0.5},
    "ban_sequences": [[1, 2], [2, 3, 1], [3, 3]],
    "min_new_tokens": 2,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "temperature": 0.9,
    "min_p": 0.02,
    "top_k": 3,
    "top_p": 0.95,
}
SETTINGS = {
    "bias": [{"logit_bias": {1: 0.7, 3: -1.5}}, {"logit_bias": {0: 2.0}}],
    "ban": [{"ban": [2]}, {"ban": [1, 3]}],
    "allow": [{"allow": [0, 1, 3]}, {"allow": [1, 2], "ban": [2]}],
    "sequences": [{"ban_sequences": [[1, 2], [3, 3]]}, {"ban_sequences": [[2, 3, 1], [2], [0, 1]]}],
    "minimum": [{"min_new_tokens": 2}, {"min_new_tokens": 3}],
    "repetition": [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.6}],
    "presence": [{"presence_penalty": 0.8}, {"presence_penalty": -0.8}],
    "frequency": [{"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}],  # case 12
    "min-p": [{"min_p": 0.2}, {"min_p": 0.5}],
    "top-k": [{"top_k": 2}, {"top_k": 3, "temperature": 0.3}],  # case 6
    "top-p": [{"top_p": 0.6}, {"top_p": 0.9}],
    "draft": [
        {"draft_temperature": 0.5, "draft_top_k": 2},
        {"temperature": 0.7, "top_p": 0.9, "draft_temperature": 1.5, "draft_top_p": 1.0},
    ],
    "all": [ALL, {**ALL, "draft_temperature": 0.5, "draft_top_k": 2, "draft_top_p": 0.7}],
}
# A row that may begin with anything, then only moves up or back to 0: state = the newest token.
UPWARD = automaton(
    [[0, 1, 2, 3], [0, -1, 2, 3], [0, -1, -1, 3], [0, -1, -1, -1]],
)


def upward(output: tuple[int, ...]) -> np.ndarray:
    newest = output[-1] if output else 0
    return np.asarray([token == 0 or token > newest for token in range(V)])


def p_value(settings, rule, drafter=DRAFTER, draft=DRAFT, *, mask=None, constraint=None, batches=4, seed=0, check=True):
    """Return the p-value of all groups together, and the acceptance."""
    rows = [(prompt, SamplingParams(**{"temperature": 1.0, **each})) for each in settings for prompt in PROMPTS]
    per_batch = 16384 // len(rows) * len(rows)
    outputs: list[list[tuple[int, ...]]] = [[] for _ in rows]
    rates = []
    for batch in range(batches):
        run = toys.run_batch(
            toys.MarkovFn(V),
            drafter,
            {"target": TABLE, "draft": draft},
            [rows[i % len(rows)][0] for i in range(per_batch)],
            rule=rule,
            gamma=GAMMA,
            max_new=NEW,
            vocab=V,
            eos=EOS,
            sampling=[rows[i % len(rows)][1] for i in range(per_batch)],
            constraint=constraint,
            check=check,
            seed=1000 * seed + batch,
        )
        for i, output in enumerate(run.outputs):
            outputs[i % len(rows)].append(output)
        rates.append(run.acceptance)
    laws = [toy_laws.transformed_law(TABLE, prompt, NEW, EOS, params, mask) for prompt, params in rows]
    return toy_laws.chi_square(zip(outputs, laws, strict=True))[0], float(np.mean(rates))


@pytest.mark.parametrize("rule", ONE_FAST, ids=lambda rule: rule.name)
def test_every_transform_alone_and_all_together_keep_the_law(rule):
    """All settings in one batch: rows of one program, each with its own."""
    settings = [each for pair in SETTINGS.values() for each in pair]
    found, acceptance = p_value(settings, rule)
    assert 0.3 < acceptance < 0.95
    assert found > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_each_transform_alone_keeps_the_law_in_a_program_of_its_own(name):
    for rule in SAMPLING_RULES:
        found, acceptance = p_value(SETTINGS[name], rule)
        assert 0.2 < acceptance < 0.99
        assert found > FALSE_ALARM


@pytest.mark.parametrize("rule", ONE_FAST, ids=lambda rule: rule.name)
def test_a_constraint_that_rolls_back_keeps_the_law(rule):
    settings = [{}, {"temperature": 0.7, "repetition_penalty": 1.3, "top_p": 0.9}]
    found, acceptance = p_value(settings, rule, mask=upward, constraint=UPWARD)
    assert 0.3 < acceptance < 0.95
    assert found > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [no_drafter(), ngram_drafter()], ids=["none", "ngram"])
def test_plain_decoding_and_lookup_have_the_same_law(drafter):
    settings = [each for pair in SETTINGS.values() for each in pair]
    found, _ = p_value(settings, SAMPLING_RULES[0], drafter, {})
    assert found > FALSE_ALARM


def test_a_token_that_the_draft_may_not_propose_comes_as_often_as_the_target_says():
    """The target allows {A, B, C}, the draft only {A, B} (top-k 2): the frequency of C is p(C).

    n = 32,768 rows: within 5 standard deviations; the draft's q(C) is 0 and p(C) about 0.2.
    """
    table = np.zeros((V, V, V), np.float32) + np.log(np.asarray([0.45, 0.35, 0.2, 1e-9], np.float32))
    n = 32768
    params = SamplingParams(temperature=1.0, top_k=3, draft_top_k=2)
    run = toys.run_batch(
        toys.MarkovFn(V),
        DRAFTER,
        {"target": table, "draft": table},
        [[1]] * n,
        rule=SAMPLING_RULES[0],
        gamma=GAMMA,
        max_new=3,
        vocab=V,
        sampling=[params] * n,
    )
    drafted = run.state.accepted & (np.arange(run.state.tokens.shape[1]) >= 1)
    assert not np.any(drafted & (run.state.tokens >= 2))  # never a draft: every C is a correction or a bonus
    for place in range(3):
        seen = np.mean([output[place] == 2 for output in run.outputs])
        assert abs(seen - 0.2) < 5 * np.sqrt(0.2 * 0.8 / n)
    assert 0.5 < run.acceptance < 0.95
