"""Two-sample statistics of generated texts: do speculative and plain decoding draw from one law?"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

LEAST = 10  # draws of both sides together in a cell; rarer ones are pooled
_Z = 5.1  # deviations between the law and a difference found: false alarm 1e-5, four times in five


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One statistic.

    Attributes:
        name: what was compared.
        draws: of each side.
        cells: in all groups.
        p_value: of Pearson's statistic under one law.
        effect: the total variation, in every group, that would be found four times in five; None without freedom.
    """

    name: str
    draws: int
    cells: int
    p_value: float
    effect: float | None


def compare(name: str, groups: Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> Comparison:
    """Compare two samples in each group: Pearson's statistic for homogeneity, summed over the groups.

    Args:
        name: of the statistic.
        groups: (plain, speculative) draws.
    """
    statistic, degrees, cells, draws = 0.0, 0, 0, 0
    for ours, theirs in groups:
        table = _table(ours, theirs)
        draws += min(len(ours), len(theirs))
        cells += table.shape[1]
        if table.shape[1] < 2:
            continue
        expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
        statistic += float(np.sum((table - expected) ** 2 / expected))
        degrees += table.shape[1] - 1
    effect = math.sqrt(_Z * math.sqrt(2 * degrees) / (2 * draws)) if degrees and draws else None
    return Comparison(name, draws, cells, chi_square_tail(degrees, statistic), effect)


def against(name: str, groups: Iterable[tuple[np.ndarray, np.ndarray]]) -> Comparison:
    """Compare counts with known probabilities in each group; small cells are pooled, an impossible draw decides.

    Args:
        name: of the statistic.
        groups: (counts [C], probabilities [C]).
    """
    statistic, degrees, cells, draws, impossible = 0.0, 0, 0, 0, False
    for counts, p in groups:
        n = counts.sum()
        impossible |= bool(np.any((p == 0) & (counts > 0)))
        big = p * n >= LEAST / 2
        seen = np.append(counts[big], counts[~big].sum())
        expected = np.append(p[big] * n, p[~big].sum() * n)
        if expected[-1] < LEAST / 2 and len(expected) > 1:
            seen, expected = np.append(seen[:-2], seen[-2:].sum()), np.append(expected[:-2], expected[-2:].sum())
        draws += int(n)
        cells += len(seen)
        statistic += float(np.sum((seen - expected) ** 2 / np.maximum(expected, 1e-12)))
        degrees += len(seen) - 1
    effect = math.sqrt(_Z * math.sqrt(2 * degrees) / (4 * draws)) if degrees and draws else None
    p_value = 0.0 if impossible else chi_square_tail(degrees, statistic)
    return Comparison(name, draws, cells, p_value, effect)


def chi_square_tail(degrees: int, statistic: float) -> float:
    """Return the probability that a chi-square variable of so many degrees is at least so large."""
    if degrees == 0:
        return 1.0
    # jax's own incomplete gamma function: scipy is not among what users install.
    from jax.scipy.special import gammaincc

    return float(gammaincc(degrees / 2, statistic / 2))


def _table(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> np.ndarray:
    """Return the counts [2, C] by value, rare values together."""
    counts = Counter(ours), Counter(theirs)
    values = sorted(set(ours) | set(theirs), key=lambda value: (-(counts[0][value] + counts[1][value]), repr(value)))
    columns = [[side[value] for side in counts] for value in values]
    big = [column for column in columns if sum(column) >= LEAST]
    rest = [column for column in columns if sum(column) < LEAST]
    if rest:
        pooled = np.sum(rest, axis=0).tolist()
        if sum(pooled) < LEAST and big:
            big[-1] = [a + b for a, b in zip(big[-1], pooled, strict=True)]
        else:
            big.append(pooled)
    return np.asarray(big, np.float64).reshape(-1, 2).T
