"""Validation by the real decoder on held-out prompts: what is accepted, what that predicts, what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import bench, cost, stats, tune
from specjax.api import compiled, generate
from specjax.distill.config import ValidationSpec
from specjax.distill.examples import Example
from specjax.gamma import auto_controller
from specjax.pair import Pair
from specjax.rows import Row
from specjax.sampling import SamplingParams
from specjax.speculation import default_width
from specjax.verify import rule_for

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
_LONGEST = 512


def prompts_of(held: Sequence[Example], spec: ValidationSpec, prompt_tokens: int) -> list[tuple[int, ...]]:
    """Return the prompts to validate on: different ones, in the order of the file."""
    begun = dict.fromkeys(example.begun(prompt_tokens) for example in held)
    return list(begun)[: spec.prompts]


def acceptance(pair: Pair, prompts: Sequence[Sequence[int]], spec: ValidationSpec, *, seed: int = 0) -> dict[str, Any]:
    """Decode prompts greedily and at temperature 1, and count.

    Returns:
        For "greedy" and "sampled": ``mean_acceptance_length``; ``alpha``, the share of drafts accepted among those that
        were reached, by position; ``by_position``, among all rounds; ``text``, of the first prompt.
    """
    found = {}
    for name, temperature in TEMPERATURES.items():
        rows = [{"id": i, "prompt_ids": list(prompt)} for i, prompt in enumerate(prompts)]
        outputs = generate(
            pair, rows, gamma=spec.gamma, max_new_tokens=spec.max_new_tokens, seed=seed,
            sampling=SamplingParams(temperature=temperature), batch_size=min(len(rows), 16), require_draft=True,
        )  # fmt: skip
        total = stats.merge_stats(out.stats for out in outputs)
        found[name] = {
            "mean_acceptance_length": total["mean_acceptance_length"],
            "alpha": stats.conditional_rates(total),
            "by_position": stats.unconditional_rates(total),
            "num_tokens": total["num_tokens"],
            "text": outputs[0].text,
        }
    return found


def score_of(found: dict[str, Any]) -> float:
    """Return what checkpoints are compared by: the mean acceptance length, greedy and sampled in equal parts."""
    return float(np.mean([found[name]["mean_acceptance_length"] or 1.0 for name in TEMPERATURES]))


def predict(pair: Pair, found: dict[str, Any], spec: ValidationSpec, *, rounds: int = tune.BRIEF_ROUNDS) -> dict:
    """Predict the speed-up of one row from measured costs and from its acceptance, for each temperature.

    Returns:
        ``costs`` in seconds, ``speedup`` at the recipe's gamma, and ``best``, the gamma that the model of costs would
        take with its speed-up.
    """
    target, gamma = pair.target, spec.gamma
    widths = tuple(sorted({default_width(d, target.dtype) for d in (0, gamma // 2, gamma)}))
    predicted = {}
    for name, temperature in TEMPERATURES.items():
        rule = rule_for("rejection" if temperature else "greedy")
        program = compiled(
            target.fn, pair.draft.drafter, rule=rule, gamma=gamma, vocab_size=target.vocab_size, width=widths,
            controller=auto_controller(gamma, widths),
        )  # fmt: skip
        params = {"target": target.params, "draft": pair.draft.params}
        key = tune.key_of(params, pair.draft.kind, rule.name, 1, widths)
        longest = min(_LONGEST, target.max_positions)
        sampling = SamplingParams(temperature=temperature)
        table = tune.measure(program, params, key, longest=longest, sampling=sampling, rounds=rounds)
        costs = costs_of(table)
        rates = [rate or 0.0 for rate in found[name]["by_position"]]
        best, gain = cost.best_gamma(costs, rates)
        predicted[name] = {
            "plain_seconds": costs.plain,
            "draft_step_seconds": table.draft_seconds[1],
            "round_seconds": costs.round(gamma),
            "speedup": cost.speedup(costs, gamma, cost.expected_tokens(rates[:gamma])),
            "best": {"gamma": best, "speedup": gain},
        }
    return predicted


def costs_of(table: tune.CostTable) -> cost.Costs:
    """Return a measured table as the cost model takes it; a step costs what the next compiled width does."""
    top = len(table.draft_seconds) - 1
    return cost.Costs(
        plain=table.verify_seconds[0],
        draft=dict(enumerate(table.draft_seconds)),
        verify={
            rows: table.verify_seconds[int(np.searchsorted(table.widths, rows))]
            for rows in range(1, top + 2)
            if rows <= table.widths[-1]
        },
    )


def measure(pair: Pair, prompts: Sequence[Sequence[int]], spec: ValidationSpec) -> dict[str, Any]:
    """Measure the speed-up against plain decoding, one row at a time, plain and speculative in turns."""
    rows = [bench.BenchPrompt(Row(i, i, prompt_ids=tuple(prompt))) for i, prompt in enumerate(prompts, 1)]
    measured = {}
    for name, temperature in TEMPERATURES.items():
        (result,) = bench.bench(
            pair, rows, gammas=[spec.gamma], repeats=spec.repeats, sampling=SamplingParams(temperature=temperature),
            max_new_tokens=spec.max_new_tokens,
        )  # fmt: skip
        measured[name] = {
            "ratio": result["ratio"],
            "decode_ratio": result["decode_ratio"],
            "plain_tokens_per_second": result["plain"]["tokens_per_second"],
            "mean_acceptance_length": result["mean_acceptance_length"],
            "device": jax.devices()[0].device_kind,
        }
    return measured
