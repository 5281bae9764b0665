"""Exact laws of the toy models by enumeration, and the test of outputs against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from scipy.special import chdtrc

from specjax.reference_transforms import transformed
from specjax.sampling import SamplingParams


def next_probs(logits: np.ndarray, prefix: tuple[int, ...], temperature: float) -> np.ndarray:
    """Return the exact next-token law in float64."""
    row = logits[prefix[-2] if len(prefix) > 1 else 0, prefix[-1]].astype(np.float64)
    if temperature == 0:
        return np.eye(len(row))[int(np.argmax(row))]
    row = row / temperature
    row = np.exp(row - row.max())
    return row / row.sum()


def output_law(logits, prompt, max_new: int, eos: int | None, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the exact joint law of whole outputs by enumeration."""
    law: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], mass: float) -> None:
        if len(output) == max_new or (output and output[-1] == eos):
            law[output] = law.get(output, 0.0) + mass
            return
        for token, p in enumerate(next_probs(logits, (*prompt, *output), temperature)):
            if p > 0:
                grow((*output, token), mass * p)

    grow((), 1.0)
    return law


def transformed_law(
    logits,
    prompt,
    max_new: int,
    eos: int | None,
    params: SamplingParams,
    mask: Callable[[tuple[int, ...]], np.ndarray] | None = None,
) -> dict[tuple[int, ...], float]:
    """Return the exact joint law of whole outputs under all transforms; ``mask(output)`` is a constraint's."""
    law: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], mass: float) -> None:
        if len(output) == max_new or (output and output[-1] == eos):
            law[output] = law.get(output, 0.0) + mass
            return
        before = (*prompt, *output)
        row = logits[before[-2] if len(before) > 1 else 0, before[-1]]
        allowed = None if mask is None else mask(output)
        p = transformed(row, params, prompt, output, eos=() if eos is None else (eos,), allowed=allowed)
        for token in np.flatnonzero(p):
            grow((*output, int(token)), mass * p[token])

    grow((), 1.0)
    return law


def greedy_chain(logits, prompt, count: int, eos: int | None = None) -> tuple[int, ...]:
    """Return the greedy output."""
    output: tuple[int, ...] = ()
    while len(output) < count and not (output and output[-1] == eos):
        output += (int(np.argmax(next_probs(logits, (*prompt, *output), 0.0))),)
    return output


def tally(outputs: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[np.ndarray, np.ndarray]:
    """Return observed and expected counts; cells of fewer than 5 expected draws are pooled.

    Raises:
        AssertionError: an output that the law gives no probability.
    """
    seen = Counter(outputs)
    assert set(seen) <= set(law), f"impossible outputs were drawn: {sorted(set(seen) - set(law))[:3]}"
    n = len(outputs)
    cells = sorted(law, key=law.__getitem__, reverse=True)
    big = [cell for cell in cells if law[cell] * n >= 5]
    observed = [seen[cell] for cell in big]
    expected = [law[cell] * n for cell in big]
    if small := cells[len(big) :]:
        observed.append(sum(seen[cell] for cell in small))
        expected.append(sum(law[cell] for cell in small) * n)
        if expected[-1] < 5 and len(expected) > 1:
            observed[-2:] = [sum(observed[-2:])]
            expected[-2:] = [sum(expected[-2:])]
    return np.asarray(observed, np.float64), np.asarray(expected, np.float64)


def chi_square(groups: Iterable[tuple[list[tuple[int, ...]], dict[tuple[int, ...], float]]]) -> tuple[float, int]:
    """Return the p-value of all groups of (outputs, their exact law) together, and the number of cells.

    The statistic is the sum of the groups' Pearson statistics: chi-square of (cells - groups) degrees.
    """
    statistic, degrees, cells = 0.0, 0, 0
    for outputs, law in groups:
        observed, expected = tally(outputs, law)
        statistic += float(np.sum((observed - expected) ** 2 / expected))
        degrees += len(observed) - 1
        cells += len(observed)
    return float(chdtrc(degrees, statistic)), cells
