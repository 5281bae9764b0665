"""The transforms in plain NumPy, in their order, by sorting: for reading and for testing against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

REACHED = 2.0**-22  # a mass this close to top-p counts as reached (.5 + .3 reaches .8)


def transformed(
    logits: Any,
    params: Any,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    eos: Sequence[int] = (),
    allowed: Any | None = None,
) -> np.ndarray:
    """Return the distribution [V] that the next token is drawn from, after every transform.

    Args:
        logits: [V], the model's.
        params: an object with the fields of ``specjax.SamplingParams``.
        prompt, output: the tokens before.
        eos: ids that a minimum of new tokens keeps back.
        allowed: [V] bool, a constraint's mask.
    """
    return sampled(shaped(logits, params, prompt, output, eos=eos, allowed=allowed), params)


def shaped(
    logits: Any,
    params: Any,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    eos: Sequence[int] = (),
    allowed: Any | None = None,
) -> np.ndarray:
    """Return the logits [V] with bias, bans and penalties; -inf for what may not come."""
    scores = np.array(logits, np.float64)
    before = [*prompt, *output]
    for token, value in params.logit_bias:
        scores[token] += value
    if params.allow is not None:
        scores[[token for token in range(scores.size) if token not in params.allow]] = -np.inf
    banned = list(params.ban)
    for sequence in params.ban_sequences:
        *start, last = sequence
        if not start or before[-len(start) :] == start:
            banned.append(last)
    if len(output) < params.min_new_tokens:
        banned += eos
    scores[banned] = -np.inf
    if allowed is not None:
        scores[~np.asarray(allowed)] = -np.inf
    for token in set(before):
        scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    return scores


def sampled(scores: np.ndarray, params: Any) -> np.ndarray:
    """Return the distribution [V] of logits at a temperature, after min-p, top-k and top-p."""
    if params.temperature == 0:
        return np.eye(1, scores.size, int(np.argmax(scores)))[0]
    p = _normalised(np.exp((scores - scores.max()) / params.temperature))
    p = np.where(p >= params.min_p * p.max(), p, 0.0)
    order = np.sort(p)[::-1]
    if 0 < params.top_k < p.size:
        p = np.where(p >= order[params.top_k - 1], p, 0.0)
    p = _normalised(p)
    if params.top_p < 1:
        order = np.sort(p)[::-1]
        crosses = int(np.argmax(np.cumsum(order) >= params.top_p - REACHED))
        p = np.where(p >= order[crosses], p, 0.0)
    return _normalised(p)


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()
