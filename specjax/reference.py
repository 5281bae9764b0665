"""Speculative decoding in plain NumPy, for reading and for testing against.

A *model* here is a function from a prefix (a tuple of token ids) to the probabilities of the next token [V].
p is the target's distribution and q the draft's, both after all transforms, as in Leviathan et al.
The rule itself stands once, in ``decide_round``; everything else draws the randomness, loops or enumerates.

    python -m specjax.reference --trials 200000 --seed 7
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

Model = Callable[[tuple[int, ...]], Any]
Law = dict[tuple[int, ...], float]

TOLERANCE = 1e-6
TOLERANCE_FLOAT32 = 1e-4  # a float32 softmax over a large vocabulary misses 1 by more than 1e-6


def check_distribution(p: Any, name: str = "p", *, tolerance: float = TOLERANCE) -> np.ndarray:
    """Return p as a floating array [V], or say what is wrong with it.

    Raises:
        ValueError: p is not one-dimensional, is empty, not finite, negative somewhere, or does not sum to 1.
    """
    array = np.asarray(p)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name}: got shape {array.shape}, expected one dimension [V], V >= 1. Pass one position.")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: got dtype {array.dtype}, expected real numbers.")
    array = array if array.dtype.kind == "f" else array.astype(np.float64)
    for fault, where in (("not finite", ~np.isfinite(array)), ("negative", array < 0)):
        if where.any():
            index = int(np.argmax(where))
            raise ValueError(f"{name}: {fault} at id {index}: got {array[index]}, expected a probability >= 0.")
    total = float(array.sum(dtype=np.float64))
    if abs(total - 1.0) > tolerance:
        raise ValueError(f"{name}: got a sum of {total:.9g}, expected 1 within {tolerance:g}. Normalise it first.")
    return array


def check_pair(p: Any, q: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return p and q as floating arrays [V] of one length.

    Raises:
        ValueError: one of them is not a distribution, or their lengths differ.
    """
    p, q = check_distribution(p, "p"), check_distribution(q, "q")
    if p.size != q.size:
        raise ValueError(f"q: got {q.size} ids, expected p's {p.size}. Give both one vocabulary.")
    return p, q


def one_hot(token: int, vocab_size: int) -> np.ndarray:
    """Return the distribution [V] of a deterministic draft that proposes ``token``."""
    if not 0 <= token < vocab_size:
        raise ValueError(f"token: got {token}, expected 0 <= token < {vocab_size}.")
    return np.eye(1, vocab_size, token)[0]


def greedy_model(model: Model) -> Model:
    """Return ``model`` at temperature 0: one-hot at its most probable token, the lowest id on ties."""

    def one_hot_model(prefix: tuple[int, ...]) -> np.ndarray:
        p = check_distribution(model(prefix))
        return one_hot(int(np.argmax(p)), p.size)

    return one_hot_model


def acceptance_probability(p: Any, q: Any, token: int) -> float:
    """Return min(1, p(token) / q(token)), the chance that a drafted ``token`` is accepted (0 where p is 0)."""
    p, q = check_pair(p, q)
    if not 0 <= token < p.size:
        raise ValueError(f"token: got {token}, expected 0 <= token < {p.size}.")
    if p[token] == 0:
        return 0.0
    return 1.0 if p[token] >= q[token] else float(p[token] / q[token])


def residual(p: Any, q: Any) -> np.ndarray:
    """Return (p - q)_+ normalised [V], what a rejected position is drawn from; p itself where that is empty."""
    p, q = check_pair(p, q)
    excess = np.maximum(p - q, 0)
    total = excess.sum()
    return excess / total if total > 0 else p.copy()


def theoretical_acceptance(p: Any, q: Any) -> float:
    """Return the sum of min(p, q): the chance that a draft drawn from q is accepted, 1 - TV(p, q)."""
    p, q = check_pair(p, q)
    return float(np.minimum(p, q).sum())


def gumbel_draw(weights: np.ndarray, gumbel: np.ndarray) -> np.ndarray:
    """Return argmax(log weights + gumbel) over the last axis: a draw in proportion to ``weights``."""
    with np.errstate(divide="ignore"):
        return np.argmax(np.log(weights) + gumbel, axis=-1)


def sample_position(p: Any, q: Any, rng: np.random.Generator) -> tuple[int, bool]:
    """Draw one token from p by way of q; return it and whether it is the draft's own.

    Reference: "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, Algorithm 1.
    """
    p, q = check_pair(p, q)
    token = int(gumbel_draw(q, rng.gumbel(size=q.size)))
    if rng.random() * q[token] < p[token]:
        return token, True
    return int(gumbel_draw(residual(p, q), rng.gumbel(size=p.size))), False


def sample_positions(
    p: Any, q: Any, draft_gumbel: np.ndarray, uniforms: np.ndarray, final_gumbel: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run ``sample_position`` for n trials at once, on noise [n, V], [n], [n, V]; return tokens [n], accepted [n]."""
    p, q = check_pair(p, q)
    drafts = gumbel_draw(q, draft_gumbel)
    accepted = uniforms * q[drafts] < p[drafts]
    return np.where(accepted, drafts, gumbel_draw(residual(p, q), final_gumbel)), accepted


def decide_round(p: Any, q: Any | None, drafts: Any, uniforms: Any, final_gumbel: Any) -> tuple[int, int]:
    """Apply the rejection rule to one round whose randomness is given.

    Draft i is accepted iff ``uniforms[i] * q[i, d] < p[i, d]``, strictly. The first rejection draws from
    (p - q)_+, or from p where rounding leaves that empty; a round without one draws from p[K]. Arithmetic stays
    in the dtype given, so that float32 inputs decide as a float32 program does.

    Args:
        p: [K+1, V] target probabilities.
        q: [K, V] draft probabilities, or None for deterministic drafts (q is one-hot at the draft).
        drafts: [K] drafted ids.
        uniforms: [K] in [0, 1).
        final_gumbel: [V] noise of the last draw.

    Returns:
        The number of accepted drafts, and the token after them.

    Raises:
        ValueError: a shape, an id, a distribution or a uniform does not fit.
    """
    p, drafts, uniforms, final_gumbel = (np.asarray(x) for x in (p, drafts, uniforms, final_gumbel))
    if p.ndim != 2 or p.size == 0:
        raise ValueError(f"p: got shape {p.shape}, expected [K+1, V].")
    gamma, vocab_size = p.shape[0] - 1, p.shape[1]
    if drafts.shape != (gamma,) or not all(token in range(vocab_size) for token in drafts.tolist()):
        raise ValueError(f"drafts: got {drafts.tolist()}, expected {gamma} ids in 0..{vocab_size - 1}.")
    drafts = drafts.astype(np.int64)
    q = np.eye(vocab_size, dtype=p.dtype)[drafts] if q is None else np.asarray(q)
    for name, array, shape in (
        ("q", q, (gamma, vocab_size)),
        ("uniforms", uniforms, (gamma,)),
        ("final_gumbel", final_gumbel, (vocab_size,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, expected {shape}, as p's {p.shape} asks.")
    if not ((uniforms >= 0) & (uniforms < 1)).all() or not np.isfinite(final_gumbel).all():
        raise ValueError(f"uniforms: got {uniforms}, expected [0, 1), and finite Gumbel noise.")
    for name, rows in (("p", p), ("q", q)):
        tolerance = TOLERANCE_FLOAT32 if rows.dtype == np.float32 else TOLERANCE
        for i, row in enumerate(rows):
            check_distribution(row, f"{name}[{i}]", tolerance=tolerance)

    for i, token in enumerate(drafts):
        if not uniforms[i] * q[i, token] < p[i, token]:
            excess = np.maximum(p[i] - q[i], 0)
            return i, int(gumbel_draw(excess if excess.any() else p[i], final_gumbel))
    return gamma, int(gumbel_draw(p[gamma], final_gumbel))


@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """All the randomness of one round: draft_gumbel [K, V], uniforms [K], final_gumbel [V]."""

    draft_gumbel: np.ndarray
    uniforms: np.ndarray
    final_gumbel: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, gamma: int, vocab_size: int) -> RoundNoise:
        """Draw fresh noise; no value serves two purposes."""
        return cls(rng.gumbel(size=(gamma, vocab_size)), rng.random(gamma), rng.gumbel(size=vocab_size))


def speculative_round(
    target: Model, draft: Model, prefix: Sequence[int], gamma: int, noise: np.random.Generator | RoundNoise
) -> tuple[int, tuple[int, ...]]:
    """Draft ``gamma`` tokens, keep what the rule accepts and add one token.

    Return the number of accepted drafts j, and the j + 1 tokens that follow ``prefix``.
    A deterministic draft is a model that returns ``one_hot``; ``gamma`` 0 is plain decoding.
    """
    prefix = tuple(prefix)
    p = [check_distribution(target(prefix), "p")]
    if isinstance(noise, np.random.Generator):
        noise = RoundNoise.draw(noise, gamma, p[0].size)
    q: list[np.ndarray] = []
    drafts: tuple[int, ...] = ()
    for i in range(gamma):
        q_i = check_pair(p[i], draft(prefix + drafts))[1]
        q.append(q_i)
        drafts += (int(gumbel_draw(q_i, noise.draft_gumbel[i])),)
        p.append(check_distribution(target(prefix + drafts), "p"))
    q_rows = np.stack(q) if q else np.empty((0, p[0].size))
    accepted, token = decide_round(np.stack(p), q_rows, np.array(drafts, int), noise.uniforms, noise.final_gumbel)
    return accepted, (*drafts[:accepted], token)


def greedy_round(target: Model, draft: Model, prefix: Sequence[int], gamma: int) -> tuple[int, tuple[int, ...]]:
    """Keep drafts while they are the target's most probable token, then add that token (lowest id on ties)."""
    prefix = tuple(prefix)
    emitted: tuple[int, ...] = ()
    while True:
        p = check_distribution(target(prefix + emitted), "p")
        best = int(np.argmax(p))
        if len(emitted) == gamma or np.argmax(check_pair(p, draft(prefix + emitted))[1]) != best:
            return len(emitted), (*emitted, best)
        emitted += (best,)


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generated row. ``place``, ``accepted`` and ``drafted`` are per id, as ``specjax.stats`` reads them."""

    ids: tuple[int, ...]  # the new tokens, an EOS kept
    finish_reason: str  # "eos" or "length"
    accepted_counts: tuple[int, ...]  # visible accepted drafts of each round
    place: tuple[int, ...]  # index in its round
    accepted: tuple[int, ...]  # 1: an accepted draft, 0: the round's extra token
    drafted: tuple[int, ...]  # drafts its round proposed


def generate(
    target: Model,
    draft: Model | None,
    prefix: Sequence[int] = (),
    *,
    gamma: int,
    max_new_tokens: int,
    eos: Collection[int] = (),
    rng: np.random.Generator | None = None,
    greedy: bool = False,
) -> Generation:
    """Generate until an EOS or the budget, round after round; nothing past either is kept or counted.

    A ``draft`` of None decodes plainly, whatever ``gamma``; ``rng`` is unused when ``greedy``.

    Raises:
        ValueError: a negative ``gamma`` or budget, or neither ``rng`` nor ``greedy``.
    """
    if gamma < 0 or max_new_tokens < 0:
        raise ValueError(f"got gamma {gamma} and max_new_tokens {max_new_tokens}, expected both >= 0.")
    if rng is None and not greedy:
        raise ValueError("got no rng, expected one to sample with. Pass rng, or greedy=True.")
    gamma = 0 if draft is None else gamma
    draft = target if draft is None else draft
    ids: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    origin: list[tuple[int, int, int]] = []
    ended = False
    while len(ids) < max_new_tokens and not ended:
        here = (*prefix, *ids)
        if greedy or rng is None:
            accepted, emitted = greedy_round(target, draft, here, gamma)
        else:
            accepted, emitted = speculative_round(target, draft, here, gamma, rng)
        visible, ended = _visible(emitted, max_new_tokens - len(ids), eos)
        ids += visible
        counts += (min(accepted, len(visible)),)
        origin += [(i, int(i < accepted), gamma) for i in range(len(visible))]
    place, was_accepted, drafted = zip(*origin, strict=True) if origin else ((), (), ())
    return Generation(ids, "eos" if ended else "length", counts, place, was_accepted, drafted)


def _visible(emitted: tuple[int, ...], budget: int, eos: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Cut a round after its first EOS or at the budget; say whether an EOS ended it."""
    kept = emitted[:budget]
    for i, token in enumerate(kept):
        if token in eos:
            return kept[: i + 1], True
    return kept, False


def _support(p: np.ndarray) -> list[tuple[int, float]]:
    return [(int(token), float(p[token])) for token in np.flatnonzero(p)]


def enumerate_round(target: Model, draft: Model, prefix: Sequence[int], gamma: int) -> Law:
    """Return the exact law of one round: emitted tokens -> probability. j + 1 tokens mean j accepted drafts."""
    prefix = tuple(prefix)
    law: defaultdict[tuple[int, ...], float] = defaultdict(float)

    def walk(emitted: tuple[int, ...], weight: float) -> None:
        p = check_distribution(target(prefix + emitted), "p")
        if len(emitted) == gamma:
            for token, chance in _support(p):
                law[(*emitted, token)] += weight * chance
            return
        p, q = check_pair(p, draft(prefix + emitted))
        rejected = 0.0
        for token, chance in _support(q):
            accept = acceptance_probability(p, q, token)
            rejected += chance * (1 - accept)
            if accept > 0:
                walk((*emitted, token), weight * chance * accept)
        if rejected > 0:
            for token, chance in _support(residual(p, q)):
                law[(*emitted, token)] += weight * rejected * chance

    walk((), 1.0)
    return dict(law)


def accepted_law(round_law: Law, gamma: int) -> np.ndarray:
    """Return the law [K+1] of the number of accepted drafts, from ``enumerate_round``'s result."""
    counts = [len(emitted) - 1 for emitted in round_law]
    return np.bincount(counts, weights=list(round_law.values()), minlength=gamma + 1)


def enumerate_outputs(target: Model, max_new_tokens: int, eos: Collection[int] = (), prefix: Sequence[int] = ()) -> Law:
    """Return the exact joint law of whole plain outputs: ids (an EOS kept) -> probability."""
    law: Law = {(): 1.0}
    for _ in range(max_new_tokens):
        longer: Law = {}
        for ids, weight in law.items():
            if ids and ids[-1] in eos:
                longer[ids] = weight
                continue
            p = check_distribution(target((*prefix, *ids)), "p")
            longer |= {(*ids, token): weight * chance for token, chance in _support(p)}
        law = longer
    return law


def enumerate_speculative_outputs(
    target: Model,
    draft: Model,
    gamma: int,
    max_new_tokens: int,
    eos: Collection[int] = (),
    prefix: Sequence[int] = (),
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], float]:
    """Return the exact law of (ids, visible accepted drafts of each round) of whole outputs, for small cases."""
    rounds: dict[tuple[int, ...], Law] = {}  # by the ids so far: other counts share them
    done: defaultdict[Any, float] = defaultdict(float)
    going: dict[Any, float] = {((), ()): 1.0}
    while going:
        after: defaultdict[Any, float] = defaultdict(float)
        for (ids, counts), weight in going.items():
            if len(ids) == max_new_tokens or (ids and ids[-1] in eos):
                done[ids, counts] += weight
                continue
            if ids not in rounds:
                rounds[ids] = enumerate_round(target, draft, (*prefix, *ids), gamma)
            for emitted, probability in rounds[ids].items():
                visible, _ = _visible(emitted, max_new_tokens - len(ids), eos)
                after[ids + visible, (*counts, min(len(emitted) - 1, len(visible)))] += weight * probability
        going = after
    return dict(done)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the single-position sampler at work: frequencies, acceptance, the residual and the greedy rule."""
    parser = argparse.ArgumentParser(prog="python -m specjax.reference", description=main.__doc__)
    parser.add_argument("--trials", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    if options.trials < 1 or options.seed < 0:
        parser.error(f"got --trials {options.trials} --seed {options.seed}, expected trials >= 1 and seed >= 0")
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.5, 0.25])
    rng, shape = np.random.default_rng(options.seed), (options.trials, p.size)
    tokens, accepted = sample_positions(
        p, q, rng.gumbel(size=shape), rng.random(options.trials), rng.gumbel(size=shape)
    )
    _, (greedy_token,) = greedy_round(lambda _: [0.45, 0.40, 0.15], lambda _: one_hot(1, 3), (), 1)
    for name, values in (
        ("target p", p),
        ("draft q", q),
        ("output frequencies", np.bincount(tokens, minlength=p.size) / options.trials),
        ("empirical acceptance", [accepted.mean()]),
        ("theoretical acceptance", [theoretical_acceptance(p, q)]),
        ("residual", residual(p, q)),
    ):
        print(f"{name:24}" + "  ".join(f"{value:.4f}" for value in values))
    print(f"{'greedy':24}p = (0.45, 0.40, 0.15), draft B -> {'ABC'[greedy_token]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
