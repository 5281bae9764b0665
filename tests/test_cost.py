"""The cost model against worked examples and against its own definitions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specjax import cost
from specjax.cost import Costs

MS = 1e-3


def example(drafts: float = 8.0) -> Costs:
    return Costs(plain=10 * MS, draft={4: drafts * MS}, verify={5: 12 * MS}, other=2 * MS)


def test_the_worked_examples():
    assert cost.expected_tokens(cost.geometric(0.8, 4)) == pytest.approx(3.3616)
    assert cost.time_per_token(example(), 4, 3.2) == pytest.approx(6.875 * MS)
    assert cost.speedup(example(), 4, 3.2) == pytest.approx(1.4545, abs=1e-4)
    assert cost.time_per_token(example(15), 4, 3.2) == pytest.approx(9.0625 * MS)
    assert cost.speedup(example(15), 4, 3.2) == pytest.approx(1.1034, abs=1e-4)
    assert cost.time_per_token(example(15), 4, 2.0) == pytest.approx(14.5 * MS)
    assert cost.speedup(example(15), 4, 2.0) < 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_the_geometric_form_is_the_mean_of_simulated_rounds(alpha):
    accepted = np.cumprod(np.random.default_rng(0).random((200_000, 5)) < alpha, axis=1)
    assert cost.expected_tokens(cost.geometric(alpha, 5)) == pytest.approx(1 + accepted.sum(1).mean(), abs=0.02)
    assert cost.expected_tokens(accepted.mean(0)) == pytest.approx(1 + accepted.sum(1).mean())


def test_rounds_walk_along_a_text():
    yes, no = True, False
    text = [yes, yes, yes, no, no, yes, yes]
    assert cost.rounds_along(text, 0) == len(text)
    assert cost.rounds_along(text, 1) == 4  # yes yes | yes no | no | yes yes
    assert cost.rounds_along(text, 2) == 4  # yes yes yes | no | no | yes yes, and the end
    assert cost.rounds_along(text, 3) == 3  # yes yes yes no | no | yes yes
    assert cost.rounds_along([], 3) == 0


@pytest.mark.parametrize("gamma", [1, 4])
def test_along_a_long_text_of_chances_the_mean_is_the_geometric_one(gamma):
    text = (np.random.default_rng(1).random(200_000) < 0.7).tolist()
    mean = len(text) / cost.rounds_along(text, gamma)
    assert mean == pytest.approx(cost.expected_tokens(cost.geometric(0.7, gamma)), rel=0.01)


def test_shares_that_rise_are_refused():
    for wrong in ([0.5, 0.6], [1.2], [-0.1]):
        with pytest.raises(ValueError, match="never rise"):
            cost.expected_tokens(wrong)
    with pytest.raises(ValueError, match="alpha is 2"):
        cost.geometric(2, 3)


def linear(per_draft: float, per_row: float, most: int = 8, **others: float) -> Costs:
    return Costs(
        plain=10 * MS,
        draft={n: n * per_draft * MS for n in range(most + 1)},
        verify={n: (10 + (n - 1) * per_row) * MS for n in range(1, most + 2)},
        other=0.2 * MS,
        **others,
    )


@pytest.mark.parametrize("alpha", [0.4, 0.7, 0.9])
def test_the_best_gamma_is_where_one_more_stops_paying(alpha):
    costs, acceptance = linear(1.0, 0.3), cost.geometric(alpha, 8)
    gamma, gain = cost.best_gamma(costs, acceptance)
    gains = {n: cost.speedup(costs, n, cost.expected_tokens(acceptance[:n])) for n in costs.gammas}
    assert gain == max(gains.values()) == gains[gamma]
    assert cost.worth_of_one_more(costs, acceptance, gamma - 1) > 0
    if gamma < 8:
        assert cost.worth_of_one_more(costs, acceptance, gamma) < 0


def test_break_even_is_a_speed_up_of_one():
    costs = linear(1.0, 0.3)
    alpha = cost.break_even_alpha(costs, 4)
    assert alpha is not None
    assert cost.speedup(costs, 4, cost.expected_tokens(cost.geometric(alpha, 4))) == pytest.approx(1)
    assert cost.break_even_alpha(linear(20.0, 0.3), 4) is None


def test_a_verdict_names_what_stands_in_the_way():
    good, poor = cost.geometric(0.7, 8), cost.geometric(0.05, 8)
    yes = cost.advise(linear(1.0, 0.3), good)
    assert yes.gamma > 0
    assert yes.speedup > 1
    cases = [
        (linear(15.0, 0.3), good, None, "draft too slow"),
        (linear(1.0, 0.3), poor, None, "acceptance too low"),
        (linear(0.5, 6.5), good[:2], None, "verification not cheap"),
        (linear(0.5, 9.9), good[:2], None, "compute saturated"),
        (linear(1.0, 0.3, start=1.0), good, 16, "output too short"),
    ]
    for costs, acceptance, length, words in cases:
        no = cost.advise(costs, acceptance, length)
        assert (no.gamma, no.speedup) == (0, 1.0)
        assert no.reason.startswith("do not speculate: ")
        assert words in no.reason, (words, no.reason)
    assert cost.advise(linear(1.0, 0.3, start=1.0), good, 4096).gamma > 0
    assert "no draft length" in cost.advise(dataclasses.replace(example(), draft={}), good).reason
