"""Counters of a generation turned into the field's metrics, on the host.

The loop keeps three small integers per output token: ``place``, its index in its round (0..K); ``accepted``, 1 for
an accepted draft and 0 for the round's extra token (residual, bonus or plain); and ``drafted``, how many drafts its
round proposed. A stop trims them like the ids, so that only what is visible is ever counted. Names are vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Stats = dict[str, Any]

_SUMS = ("num_tokens", "num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
_LISTS = ("num_accepted_tokens_per_pos", "num_reached_per_pos", "acceptance_histogram")


def row_stats(place: Any, accepted: Any, drafted: Any, *, speculation: str, gamma: int | None = None) -> Stats:
    """Count one row's visible tokens.

    A round whose visible end is an accepted draft was cut short (EOS, stop, budget) and counts only its visible
    drafts as drafted; a round whose extra token is visible counts all of them.

    Args:
        place: [N] index of each token in its round.
        accepted: [N] 1 for an accepted draft, 0 for the round's extra token.
        drafted: [N] drafts the token's round proposed; 0 is a plain step.
        speculation: "on", or "off: reason".
        gamma: length of the per-position lists; None takes the most drafts of any round.

    Returns:
        ``num_tokens``; ``num_rounds``, the target's passes; ``num_drafts``, the rounds that drafted;
        ``num_draft_tokens``; ``num_accepted_tokens``; ``num_accepted_tokens_per_pos`` [gamma];
        ``num_reached_per_pos`` [gamma], rounds that drafted the position and accepted all before it;
        ``acceptance_histogram`` [gamma + 1], drafting rounds by their accepted drafts; ``mean_acceptance_length``,
        1 + accepted / num_drafts, and ``draft_acceptance_rate``, both None without drafts; ``speculation``.

    Raises:
        ValueError: the counters are not those of whole rounds followed by at most one that was cut short.
    """
    place, accepted, drafted = (np.asarray(x).astype(np.int64) for x in (place, accepted, drafted))
    if place.ndim != 1 or not place.shape == accepted.shape == drafted.shape:
        shapes = f"{place.shape}, {accepted.shape}, {drafted.shape}"
        raise ValueError(f"place, accepted, drafted: got shapes {shapes}, expected one shape [N].")
    _check_rounds(place, accepted, drafted)

    # one entry per round, read at its last visible token
    last = np.append(place[1:] == 0, True)[: place.size]
    round_accepted = place[last] + accepted[last]
    round_drafted = np.where(accepted[last] == 1, round_accepted, drafted[last])
    speculative = round_drafted > 0
    round_accepted, round_drafted = round_accepted[speculative], round_drafted[speculative]

    most = int(round_drafted.max(initial=0))
    gamma = most if gamma is None else gamma
    if gamma < most:
        raise ValueError(f"gamma: got {gamma}, expected at least {most}, the drafts of one of the rounds.")
    positions = np.arange(gamma)[:, None]
    stats: Stats = {
        "num_tokens": int(place.size),
        "num_rounds": int(last.sum()),
        "num_drafts": int(speculative.sum()),
        "num_draft_tokens": int(round_drafted.sum()),
        "num_accepted_tokens": int(accepted.sum()),
        "num_accepted_tokens_per_pos": (round_accepted > positions).sum(axis=1).tolist(),
        "num_reached_per_pos": ((round_accepted >= positions) & (round_drafted > positions)).sum(axis=1).tolist(),
        "acceptance_histogram": np.bincount(round_accepted, minlength=gamma + 1).tolist(),
    }
    return _with_rates(stats, speculation)


def _check_rounds(place: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
    """Refuse counters that no loop can have written."""
    follows = np.zeros_like(place)  # where the token before it is an accepted draft, a token goes on with its round
    follows[1:] = np.where(accepted[:-1] == 1, place[:-1] + 1, 0)
    same_round = place > 0
    same_drafted = np.ones_like(same_round)
    same_drafted[1:] = ~same_round[1:] | (drafted[1:] == drafted[:-1])
    faults = (
        ("accepted is neither 0 nor 1", (accepted != 0) & (accepted != 1)),
        ("place does not follow from the token before", place != follows),
        ("drafted differs inside a round", ~same_drafted),
        ("more tokens than the round's drafts allow", place + accepted > drafted),
    )
    for fault, where in faults:
        if where.any():
            i = int(np.argmax(where))
            raise ValueError(f"token {i}: {fault}: place {place[i]}, accepted {accepted[i]}, drafted {drafted[i]}.")


def _with_rates(stats: Stats, speculation: str) -> Stats:
    rounds, drafts, accepted = (stats[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    stats["mean_acceptance_length"] = 1 + accepted / rounds if rounds else None
    stats["draft_acceptance_rate"] = accepted / drafts if drafts else None
    stats["speculation"] = speculation
    return stats


def merge_stats(rows: Iterable[Mapping[str, Any]]) -> Stats:
    """Sum the stats of several rows and take the rates of the sums.

    ``speculation`` is the rows' own where they agree, else each value with its number of rows; "off: no rows"
    for none.
    """
    rows = list(rows)
    merged: Stats = {name: sum(row[name] for row in rows) for name in _SUMS}
    for name in _LISTS:
        total = [0] * max((len(row[name]) for row in rows), default=int(name == "acceptance_histogram"))
        for row in rows:
            for i, count in enumerate(row[name]):
                total[i] += count
        merged[name] = total
    kinds = Counter(row["speculation"] for row in rows)
    if len(kinds) > 1:
        return _with_rates(merged, "; ".join(f"{kind} ({count} rows)" for kind, count in sorted(kinds.items())))
    return _with_rates(merged, next(iter(kinds), "off: no rows"))


def conditional_rates(stats: Mapping[str, Any]) -> list[float | None]:
    """Return per position the share accepted among rounds that reached it: it was drafted and all before accepted."""
    pairs = zip(stats["num_accepted_tokens_per_pos"], stats["num_reached_per_pos"], strict=True)
    return [accepted / reached if reached else None for accepted, reached in pairs]


def unconditional_rates(stats: Mapping[str, Any]) -> list[float | None]:
    """Return per position the share of all drafting rounds that accepted it (never more than the position before)."""
    rounds = stats["num_drafts"]
    return [accepted / rounds if rounds else None for accepted in stats["num_accepted_tokens_per_pos"]]


def tokens_per_target_pass(stats: Mapping[str, Any]) -> float | None:
    """Return visible tokens per pass of the target, plain steps and cut rounds included; None without tokens."""
    return stats["num_tokens"] / stats["num_rounds"] if stats["num_rounds"] else None
