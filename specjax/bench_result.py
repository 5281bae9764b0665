"""From what was measured to what a report says: rates, spreads, percentiles, acceptance, equality. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from specjax import cost, stats
from specjax.rows import Row

SIDES = ("plain", "speculative")
Record = dict[str, Any]
PERCENTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One prompt to measure on.

    Attributes:
        row: as ``specjax.generate`` takes it.
        category: of the task, where the file names one.
    """

    row: Row
    category: str | None = None


def result(
    gamma: int | str,
    first_seconds: Mapping[str, float],
    runs: Mapping[str, Sequence[Record]],
    prompts: Sequence[BenchPrompt],
    temperature: float,
) -> Record:
    """Return what the runs of one gamma come to.

    Args:
        gamma: drafts per round, or "auto".
        first_seconds: by side, of the run that compiled.
        runs: by side, as ``specjax.bench.timed`` returns them, in the order of their turns.
        prompts: what was decoded.
        temperature: of rows that name none.
    """
    rows = runs["speculative"][-1]["rows"]
    total = stats.merge_stats(row["stats"] for row in rows)
    wasted = total["num_draft_tokens"] - total["num_accepted_tokens"]
    return {
        "gamma": gamma,
        **{side: _side(first_seconds[side], runs[side]) for side in SIDES},
        "ratio": _ratio(runs, "tokens_per_second"),
        "decode_ratio": _ratio(runs, "decode_tokens_per_second"),
        "coverage": coverage(len(runs["plain"])),
        "mean_acceptance_length": total["mean_acceptance_length"],
        "acceptance_rate": total["draft_acceptance_rate"],
        "acceptance_per_position": stats.unconditional_rates(total),
        "conditional_acceptance_per_position": stats.conditional_rates(total),
        "tokens_per_target_pass": stats.tokens_per_target_pass(total),
        "wasted_draft_tokens": wasted,
        "wasted_share": wasted / total["num_draft_tokens"] if total["num_draft_tokens"] else None,
        "stats": total,
        "equality": equality(prompts, runs["plain"][-1]["rows"], rows, temperature),
        "rows": [
            {"id": row["id"], "num_tokens": len(row["ids"]), "finish_reason": row["finish_reason"],
             "mean_acceptance_length": row["stats"]["mean_acceptance_length"],
             "acceptance_rate": row["stats"]["draft_acceptance_rate"]}
            for row in rows
        ],
        "categories": _categories(prompts, rows),
    }  # fmt: skip


def run_record(run: Record) -> Record:
    """Return a timed run as a report has it."""
    count = sum(len(row["ids"]) for row in run["rows"])
    return {
        **{name: run[name] for name in ("seconds", "prefill_seconds", "decode_seconds")},
        "num_tokens": count,
        "tokens_per_second": _per_second(count, run["seconds"]),
        "decode_tokens_per_second": _per_second(count, run["decode_seconds"]),
    }


def coverage(repeats: int) -> float:
    """Return how likely the span of so many runs holds the median that endless runs would have: 1 - 2^(1 - n)."""
    return 1.0 - 2.0 ** (1 - repeats)


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return median, min and max; None when a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95 and p99 (the smallest value that so many percent do not exceed); None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{percent}": ordered[-(-len(ordered) * percent // 100) - 1] for percent in PERCENTILES}


def latency_result(measured: Mapping[str, Sequence[Record]]) -> Record:
    """Return both sides' latencies, from rows looked at after each round (``specjax.bench.latencies``)."""
    return {side: _latency(measured[side]) for side in SIDES}


def category_speeds(measured: Mapping[str, Sequence[Record]], prompts: Sequence[BenchPrompt]) -> dict[str, Record]:
    """Return each category's tokens per second of its rows' own time, of both sides, and their ratio."""
    kinds = [prompt.category or "none" for prompt in prompts]
    speeds: dict[str, Record] = {}
    for kind in sorted(set(kinds)):
        rates: dict[str, float | None] = {}
        for side in SIDES:
            rows = [row for row, its in zip(measured[side], kinds, strict=True) if its == kind and row["seconds"]]
            seconds = sum(row["seconds"][-1] for row in rows)
            rates[side] = _per_second(sum(sum(row["num_tokens"]) for row in rows), seconds)
        plain, fast = (rates[side] for side in SIDES)
        names = {f"{side}_tokens_per_second": rates[side] for side in SIDES}
        speeds[kind] = {**names, "ratio": fast / plain if plain and fast else None}
    return speeds


def _latency(rows: Sequence[Record]) -> Record:
    """Return seconds: to a row's first token, between looks that brought tokens, per later token, and of a row."""
    some = [row for row in rows if row["seconds"]]
    later = [(row["seconds"][-1] - row["seconds"][0], sum(row["num_tokens"][1:])) for row in some]
    return {
        "first_token": percentiles([row["seconds"][0] for row in some]),
        "round": percentiles([b - a for row in some for a, b in itertools.pairwise(row["seconds"])]),
        "later_token": percentiles([seconds / count for seconds, count in later if count]),
        "request": percentiles([row["seconds"][-1] for row in some]),
        "num_requests": len(some),
    }


def predicted(parts: Record, total: Mapping[str, Any]) -> float | None:
    """Return the speed-up that measured parts and measured acceptance come to (``specjax.cost``)."""
    rounds = total["num_rounds"]
    if not rounds:
        return None
    shares = [accepted / rounds for accepted in total["num_accepted_tokens_per_pos"]]  # rounds without drafts count
    gamma, mine, plain = len(shares), parts["speculative"], parts["plain"]
    costs = cost.Costs(
        plain=plain["round_seconds"],
        draft={gamma: mine["draft_seconds"]},
        verify={gamma + 1: mine["target_seconds"]},
        other=mine["other_seconds"],
    )
    return cost.speedup(costs, gamma, cost.expected_tokens(shares))


def advice(results: Sequence[Record], length: int) -> str | None:
    """Return what the cost model says of the results of one setting: how to speculate, or why not to."""
    measured = [found for found in results if found.get("parts")]
    if not measured:
        return None
    widest = max(measured, key=lambda found: found["gamma"])
    rounds = widest["stats"]["num_rounds"]
    if not rounds:
        return None
    parts = {found["gamma"]: found["parts"]["speculative"] for found in measured}
    costs = cost.Costs(
        plain=statistics.median(found["parts"]["plain"]["round_seconds"] for found in measured),
        draft={gamma: part["draft_seconds"] for gamma, part in parts.items()},
        verify={gamma + 1: part["target_seconds"] + part["other_seconds"] for gamma, part in parts.items()},
    )
    shares = [accepted / rounds for accepted in widest["stats"]["num_accepted_tokens_per_pos"]]
    return cost.advise(costs, shares, length).reason


def equality(
    prompts: Sequence[BenchPrompt], plain: Sequence[Record], speculative: Sequence[Record], temperature: float
) -> Record:
    """Compare the ids of greedy rows; others are equal in law only."""
    compared, divergences = 0, []
    for prompt, ours, theirs in zip(prompts, plain, speculative, strict=True):
        if (temperature if prompt.row.temperature is None else prompt.row.temperature) > 0:
            continue
        compared += 1
        pairs = itertools.zip_longest(ours["ids"], theirs["ids"])
        if first := next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None):
            divergences.append({"id": ours["id"], "position": first[0], "plain": first[1], "speculative": first[2]})
    return {"num_compared": compared, "num_equal": compared - len(divergences), "divergences": divergences}


def _categories(prompts: Sequence[BenchPrompt], rows: Sequence[Record]) -> Record:
    groups: dict[str, list[Record]] = defaultdict(list)
    for prompt, row in zip(prompts, rows, strict=True):
        groups[prompt.category or "none"].append(row["stats"])
    found = {}
    for kind in sorted(groups):
        total = stats.merge_stats(groups[kind])
        found[kind] = {
            "num_prompts": len(groups[kind]),
            "mean_acceptance_length": total["mean_acceptance_length"],
            "acceptance_rate": total["draft_acceptance_rate"],
            "tokens_per_target_pass": stats.tokens_per_target_pass(total),
        }
    return found


def _side(first_seconds: float, runs: Sequence[Record]) -> Record:
    records = [run_record(run) for run in runs]
    return {
        "compile_seconds": max(0.0, first_seconds - statistics.median(run["seconds"] for run in runs)),
        **{
            name: spread([record[name] for record in records])
            for name in ("tokens_per_second", "decode_tokens_per_second", "seconds", "prefill_seconds")
        },
        "runs": records,
    }


def _ratio(runs: Mapping[str, Sequence[Record]], name: str) -> dict[str, float] | None:
    """Compare the runs that stood side by side."""
    rates = [[run_record(run)[name] for run in runs[side]] for side in SIDES]
    return spread([fast / slow if slow and fast is not None else None for slow, fast in zip(*rates, strict=True)])


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None
