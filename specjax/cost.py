"""The cost model: how many tokens a round gives, what it costs, whether it pays.

Symbols and units: all times are seconds. gamma drafts are proposed per round; ``plain`` is one plain step (one
token), ``draft(gamma)`` drafting gamma tokens, ``verify(gamma + 1)`` one target step over that many rows, ``other`` the
rest of a round (rule, sampling, bookkeeping). N is the number of tokens a round commits, 1 .. gamma + 1.

    E[N]            = 1 + sum_i a_i                     a_i: the first i drafts of a round are all accepted
                    = (1 - alpha^(gamma+1)) / (1 - alpha)  one alpha for every place (2211.17192, equation 1)
    time per token  = (draft(gamma) + verify(gamma + 1) + other) / E[N]
    speed-up        = plain / (time per token + start / length)   (2211.17192, theorem 3.8, with measured costs)
    best gamma      : the one with the greatest speed-up; 0 where none is above 1
    break-even alpha: (1 - alpha^(gamma+1)) / (1 - alpha) = (draft(gamma) + verify(gamma + 1) + other) / plain
    one more draft  : time per token at gamma, less that at gamma + 1

Assumptions: costs do not depend on what is accepted; a row's rounds are alike (or, in ``rounds_along``, its text is
known); in a batch every row waits for the same step, so costs are those of the batch and N is a row's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

SATURATED = 0.8  # of the cost of as many plain steps: then rows of a step are worth no less apart


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Return E[N] from acceptance by position.

    Args:
        acceptance: a_1 .. a_gamma, each the share of rounds whose first i drafts were all accepted (unconditional).

    Raises:
        ValueError: not falling within 0..1.
    """
    previous = 1.0
    for share in acceptance:
        if not 0.0 <= share <= previous + 1e-12:
            raise ValueError(f"acceptance by position is {list(acceptance)}; expected shares in 0..1 that never rise.")
        previous = share
    return 1.0 + sum(acceptance)


def geometric(alpha: float, gamma: int) -> list[float]:
    """Return a_1 .. a_gamma when each draft is accepted with probability alpha, whatever came before.

    Raises:
        ValueError: alpha outside 0..1, or gamma below 0.
    """
    if not 0.0 <= alpha <= 1.0 or gamma < 0:
        raise ValueError(f"alpha is {alpha} and gamma {gamma}; expected 0..1 and at least 0.")
    return [alpha**i for i in range(1, gamma + 1)]


def rounds_along(drafted: Sequence[bool], gamma: int) -> int:
    """Return how many rounds of gamma drafts walk along one text.

    Exact where a draft does not depend on where its round began, as a greedy model's does not: E[N] of any gamma then
    follows from one look at the text. (Shares a_i of rounds do not carry over from one gamma to another where drafts
    are right in long stretches: short rounds begin more often inside of them.)

    Args:
        drafted: for each token of the text, whether the draft proposes it after the tokens before it.
        gamma: drafts per round.
    """
    place = rounds = 0
    while place < len(drafted):
        kept = 0
        while kept < gamma and place + kept < len(drafted) and drafted[place + kept]:
            kept += 1
        place, rounds = place + kept + 1, rounds + 1
    return rounds


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured seconds of one pair at one batch size.

    Attributes:
        plain: one plain step.
        draft: by gamma, drafting that many tokens.
        verify: by width, one target step over that many rows.
        other: the rest of a round.
        start: before the first round, what a speculative run spends more than a plain one (the draft's prefill).
    """

    plain: float
    draft: Mapping[int, float]
    verify: Mapping[int, float]
    other: float = 0.0
    start: float = 0.0

    @property
    def gammas(self) -> list[int]:
        """Draft lengths whose costs are known."""
        return sorted(gamma for gamma in self.draft if gamma > 0 and gamma + 1 in self.verify)

    def round(self, gamma: int) -> float:
        """Return the seconds of one round."""
        return self.draft[gamma] + self.verify[gamma + 1] + self.other


def time_per_token(costs: Costs, gamma: int, tokens: float) -> float:
    """Return seconds per token, for rounds that commit ``tokens`` on average."""
    return costs.round(gamma) / tokens


def speedup(costs: Costs, gamma: int, tokens: float, length: int | None = None) -> float:
    """Return how many times as fast as plain decoding.

    Args:
        costs: measured.
        gamma: drafts per round.
        tokens: E[N].
        length: new tokens of a row, over which ``costs.start`` is spread; None: many.
    """
    start = costs.start / length if length else 0.0
    return costs.plain / (time_per_token(costs, gamma, tokens) + start)


def best_gamma(costs: Costs, acceptance: Sequence[float], length: int | None = None) -> tuple[int, float]:
    """Return the gamma with the greatest speed-up, and that; (0, 1.0) when none is above 1.

    Args:
        costs: measured.
        acceptance: a_1 .. a_k by position; a gamma above k is not considered.
        length: as in ``speedup``.
    """
    found = (0, 1.0)
    for gamma in costs.gammas:
        if gamma <= len(acceptance):
            gain = speedup(costs, gamma, expected_tokens(acceptance[:gamma]), length)
            found = max(found, (gamma, gain), key=lambda pair: pair[1])
    return found


def break_even_alpha(costs: Costs, gamma: int) -> float | None:
    """Return the alpha at which a round of gamma drafts costs what plain decoding does; None: not even at alpha 1."""
    needed = costs.round(gamma) / costs.plain
    if needed > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = expected_tokens(geometric(middle, gamma)) >= needed
        low, high = (low, middle) if enough else (middle, high)
    return high


def worth_of_one_more(costs: Costs, acceptance: Sequence[float], gamma: int) -> float:
    """Return the seconds per token that gamma + 1 drafts save over gamma (negative: they lose).

    It is positive exactly when the added acceptance a_(gamma+1), times the time per token so far, exceeds what the
    added draft and row cost.
    """
    now = time_per_token(costs, gamma, expected_tokens(acceptance[:gamma])) if gamma else costs.plain
    return now - time_per_token(costs, gamma + 1, expected_tokens(acceptance[: gamma + 1]))


@dataclasses.dataclass(frozen=True)
class Advice:
    """Whether to speculate.

    Attributes:
        gamma: the best draft length; 0: do not speculate.
        speedup: predicted at that gamma; 1 without speculation.
        reason: in words.
    """

    gamma: int
    speedup: float
    reason: str


def advise(costs: Costs, acceptance: Sequence[float], length: int | None = None) -> Advice:
    """Say whether to speculate, and if not, what stands in the way most.

    The reason is the one part that, made ideal by itself, helps the most: a draft that costs nothing, verification at
    the cost of a plain step, acceptance of every draft, or rows long enough to pay for the start.

    Args:
        costs: measured, at the batch size in question.
        acceptance: a_1 .. a_k by position.
        length: new tokens of a row, or None for many.
    """
    gamma, gain = best_gamma(costs, acceptance, length)
    if gamma:
        return Advice(gamma, gain, f"speculate with gamma {gamma}: {gain:.2f} times plain decoding")
    if not costs.gammas or not acceptance:
        return Advice(0, 1.0, "do not speculate: no draft length has measured costs")
    replace = dataclasses.replace
    if length and best_gamma(costs, acceptance)[0]:
        return Advice(0, 1.0, f"do not speculate: output too short ({length} tokens) for what the draft costs to start")
    flat = dict.fromkeys(costs.verify, costs.plain)
    tries = {
        "draft too slow": best_gamma(replace(costs, draft=dict.fromkeys(costs.draft, 0.0)), acceptance)[1],
        "verification not cheap at this batch": best_gamma(replace(costs, verify=flat), acceptance)[1],
        "acceptance too low": best_gamma(costs, [1.0] * len(acceptance))[1],
    }
    reason = max(tries, key=lambda name: tries[name])
    if tries[reason] <= 1.0:
        reason = "draft too slow"  # not even one ideal part would make it pay: the rounds cost too much
    widest = max(costs.verify)
    if reason.startswith("verification") and costs.verify[widest] >= SATURATED * widest * costs.plain:
        reason = "compute saturated: a row of a step costs as much as a step of its own"
    return Advice(0, 1.0, f"do not speculate: {reason}")
