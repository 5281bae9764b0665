"""Draft sources and gamma against plain decoding, by component costs and by category.

    python scripts/compare_drafts.py --target smollm2-135m --questions question.jsonl \\
        --drafts ngram NOISY mixed:NOISY early-exit:8 --random RANDOM --output drafts.json

NOISY and RANDOM are folders from scripts/make_noisy_copy.py (noise 0.05, and 1.0). The questions are Spec-Bench's.

Costs are those that `specjax tune --draft ... --batch-size 1 16` has kept, or are measured in the same way: single
rounds, alternated. What each gamma drafts and accepts is counted on real generations, which need no quiet machine; the
two give the time per token, and so the speed against plain decoding, without the noise of whole runs. A copy of the
target costs as much as the target: with --draft-step SHARE a model's draft step counts as that share of a plain step,
and `auto` decides by it. With --wall-clock a few runs of the first source are timed too. The JSON grows with each
source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import cache as kv
from specjax import tune
from specjax.bench import BenchPrompt, environment, read_prompts
from specjax.checkpoint import cache_folder
from specjax.engine import Engine, Request, Result
from specjax.generate import Program, Prompt
from specjax.pair import DEFAULT_DTYPE, Pair, load
from specjax.requests import prompt_ids
from specjax.sampling import SamplingParams, row_key
from specjax.speculation import AUTO, Gamma, plan
from specjax.types import DraftView, RoundKeys
from specjax.verify import RULES

COUNTING_BATCH = 8  # what is accepted does not depend on the batch
console = Console(width=150)


def main() -> None:
    """Measure every source; print tables; write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", default=["ngram", "early-exit:8"])
    parser.add_argument("--random", help="a draft that is never right: auto must stay within 3%% of plain")
    parser.add_argument("--questions", required=True)
    parser.add_argument("--limit", type=int, default=24, help="spread over all categories")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 3, 7], help="widths that auto compiles too")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-step", type=float, help="count a model's draft step as this share of a plain step")
    parser.add_argument("--large-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15, help="that each cost stands on")
    parser.add_argument("--dtype", default=DEFAULT_DTYPE)
    parser.add_argument("--wall-clock", action="store_true", help="time auto with the first source, at the end")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    target = load(args.target, "none", dtype=args.dtype, progress=True).target
    prompts = spread(read_prompts(args.questions, target), args.limit)
    report: dict[str, Any] = {"environment": environment(args.dtype), "settings": vars(args) | {"output": None}}
    report["components"] = {"head": head_share(target), "ngram_lookup_seconds": lookup_seconds(target)}
    console.print(report["components"])
    report["sources"] = []
    for name in [*args.drafts, *([args.random] if args.random else [])]:
        pair = load(args.target, name, dtype=args.dtype, require_draft=True)
        for temperature in args.temperature:
            found = source(pair, prompts, temperature, args)
            show(found)
            report["sources"].append(found)
            keep(report, args.output)
    report["large_batch"] = large_batch(args, prompts)
    console.print(report["large_batch"])
    keep(report, args.output)
    if args.wall_clock:
        report["wall_clock"] = wall_clock(args, prompts[:4])
        console.print(report["wall_clock"])
        keep(report, args.output)


def keep(report: dict[str, Any], output: Path | None) -> None:
    """Write what there is."""
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n")


def spread(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """Return up to ``limit`` prompts, one of each category in turns."""
    turns: dict[str | None, list[BenchPrompt]] = defaultdict(list)
    for prompt in prompts:
        turns[prompt.category].append(prompt)
    longest = max(map(len, turns.values()))
    return [group[i] for i in range(longest) for group in turns.values() if i < len(group)][:limit]


def source(pair: Pair, prompts: list[BenchPrompt], temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one source at one temperature: its costs, each fixed gamma, auto."""
    rule = "greedy" if temperature == 0 else "rejection"
    costs = cost_table(pair, rule, 1, args)
    plain = costs.draft_seconds[0] + costs.verify_seconds[0]
    kinds: list[Gamma] = [*args.gamma, AUTO]
    runs = []
    for gamma in kinds:
        results = decode(pair, prompts, gamma, temperature, args, costs)
        by_category: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for prompt, result in zip(prompts, results, strict=True):
            spent = seconds_of(pair, prompt, result, gamma, costs)
            for name in ("all", prompt.category or "none"):
                sums = by_category[name]
                sums[0] += sum(spent)
                sums[1] += spent[0]
                sums[2] += len(result.ids)
        runs.append(
            {
                "gamma": gamma,
                **acceptance(results),
                "draft_share_of_round": by_category["all"][1] / by_category["all"][0],
                "speed_against_plain": {name: n * plain / spent for name, (spent, _, n) in by_category.items()},
            }
        )
    best = {
        name: max(1.0, *(run["speed_against_plain"][name] for run in runs if run["gamma"] != AUTO))
        for name in runs[0]["speed_against_plain"]
    }
    auto = runs[-1]["speed_against_plain"]
    return {
        "draft": pair.draft.name,
        "temperature": temperature,
        "plain_seconds": plain,
        "draft_step_share": costs.draft_seconds[1] / plain,
        "round_share_by_width": dict(zip(costs.widths, [v / plain for v in costs.verify_seconds], strict=True)),
        "catch_up_share": costs.catch_up_seconds / plain,
        "runs": runs,
        "auto_against_best_fixed": {name: auto[name] / best[name] for name in auto},
    }


def cost_table(pair: Pair, rule: str, batch: int, args: argparse.Namespace) -> tune.CostTable:
    """Return a source's costs, kept or measured now; a model's draft step as asked."""
    chosen = plan(AUTO, None, pair.draft.name, None, pair.target.dtype)
    params = {"target": pair.target.params, "draft": pair.draft.params}
    table = tune.read(tune.key_of(params, pair.draft.kind, rule, batch, chosen.widths))
    if table is None:
        table = tune.tune(pair, batch_size=batch, rule=rule, rounds=args.rounds)
        tune.write(table)
    if args.draft_step is None or pair.draft.kind not in ("model", "mixed"):
        return table
    plain = table.draft_seconds[0] + table.verify_seconds[0]
    step = args.draft_step * plain
    draft = [step * d for d in range(len(table.draft_seconds))]
    scale = step / max(table.draft_seconds[1], 1e-9)
    values = {name: getattr(table, name) for name in table.__struct_fields__}
    caught_up = table.catch_up_seconds * scale
    return tune.CostTable(**{**values, "draft_seconds": draft, "catch_up_seconds": caught_up})


def decode(
    pair: Pair,
    prompts: list[BenchPrompt],
    gamma: Gamma,
    temperature: float,
    args: argparse.Namespace,
    costs: tune.CostTable,
    batch: int | None = None,
) -> list[Result]:
    """Decode every prompt; results in their order. Auto runs one row at a time, as its costs are."""
    target, rule = pair.target, RULES["greedy" if temperature == 0 else "rejection"]
    chosen = plan(gamma, None, pair.draft.name, None, target.dtype)
    program = Program(
        target.fn, pair.draft.drafter, rule=rule, gamma=chosen.gamma, vocab_size=target.vocab_size,
        width=chosen.widths, controller=chosen.controller,
    )  # fmt: skip
    params = {"target": target.params, "draft": pair.draft.params, "costs": costs.costs()}
    sampling = SamplingParams(temperature=temperature)
    requests = []
    for i, prompt in enumerate(prompts):
        ids = prompt_ids(prompt.row, target)
        requests.append(Request(i, Prompt(ids, len(ids) + args.max_new_tokens, (), row_key(0, i), sampling)))
    batch = batch or (1 if gamma == AUTO else COUNTING_BATCH)
    engine = Engine(program, params, batch_size=batch, longest=max(r.prompt.limit for r in requests))
    results = {result.key: result for result in engine.run(requests)}
    return [results[i] for i in range(len(prompts))]


def seconds_of(
    pair: Pair, prompt: BenchPrompt, result: Result, gamma: Gamma, costs: tune.CostTable
) -> tuple[float, float]:
    """Return what a row's draft steps and the rest of its rounds cost, by the table."""
    starts = np.flatnonzero(result.place == 0)
    text = [*prompt_ids(prompt.row, pair.target), *result.ids.tolist()]
    first = len(text) - len(result.ids)
    drafting = rest = 0.0
    for start in starts:
        drafted = int(result.drafted[start])
        looked_up = pair.draft.kind == "ngram" or (
            pair.draft.kind == "mixed" and text[first + start - 1] in text[: first + start - 1]
        )
        steps = (drafted if gamma == AUTO else int(gamma)) if not looked_up else 0
        width = (drafted if gamma == AUTO else int(gamma)) + 1
        drafting += costs.draft_seconds[steps]
        rest += costs.verify_seconds[int(np.searchsorted(costs.widths, width))]
    return drafting, rest


def acceptance(results: list[Result]) -> dict[str, Any]:
    """Return acceptance over whole rounds that drafted: mean length, and by position."""
    drafted = np.concatenate([r.drafted[~r.accepted] for r in results])
    accepted = np.concatenate([r.place[~r.accepted] for r in results])
    some = drafted > 0
    drafted, accepted = drafted[some], accepted[some]
    return {
        "num_rounds": int(sum(np.sum(r.place == 0) for r in results)),
        "num_drafting_rounds": len(drafted),
        "mean_acceptance_length": float(1 + accepted.mean()) if len(accepted) else None,
        "acceptance_rate": float(accepted.sum() / drafted.sum()) if len(accepted) else None,
        "acceptance_by_position": [float((accepted > i).mean()) for i in range(int(drafted.max(initial=0)))],
    }


def large_batch(args: argparse.Namespace, prompts: list[BenchPrompt]) -> dict[str, Any]:
    """Let auto choose at a large batch: how often it drafts, and its time against plain decoding's, by costs."""
    found = {}
    for name in args.drafts:
        pair = load(args.target, name, dtype=args.dtype, require_draft=True)
        costs = cost_table(pair, "greedy", args.large_batch, args)
        rows = (prompts * args.large_batch)[: args.large_batch]
        results = decode(pair, rows, AUTO, 0.0, args, costs, args.large_batch)
        drafted = np.concatenate([r.drafted[r.place == 0] for r in results])
        plain = costs.draft_seconds[0] + costs.verify_seconds[0]
        found[name] = {
            "round_share_by_width": dict(zip(costs.widths, [v / plain for v in costs.verify_seconds], strict=True)),
            "mean_drafted": float(drafted.mean()),
            "tokens_per_row_round": sum(len(r.ids) for r in results) / len(drafted),
        }
    return found


def wall_clock(args: argparse.Namespace, prompts: list[BenchPrompt]) -> dict[str, Any]:
    """Time auto with the first source against plain decoding, alternated, and say what the costs predict."""
    pair = load(args.target, args.drafts[0], dtype=args.dtype, require_draft=True)
    costs = cost_table(pair, "greedy", 1, args)
    seconds: dict[str, list[float]] = {"plain": [], "auto": []}
    spent = tokens = 0.0
    sides: list[tuple[str, Gamma]] = [("plain", 0), ("auto", AUTO)]
    for turn in range(4):
        for name, gamma in sides:
            began = time.perf_counter()
            results = decode(pair, prompts, gamma, 0.0, args, costs, 1)
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - began)
            if gamma == AUTO:
                spent = sum(sum(seconds_of(pair, *both, AUTO, costs)) for both in zip(prompts, results, strict=True))
                tokens = sum(len(r.ids) for r in results)
    plain = costs.draft_seconds[0] + costs.verify_seconds[0]
    return {
        "draft": args.drafts[0],
        "seconds": seconds,
        "measured": statistics.median(seconds["plain"]) / statistics.median(seconds["auto"]),
        "predicted_without_prefill": tokens * plain / spent,
    }


def head_share(target: Any, rows: int = 2) -> float:
    """Return the share of a plain step that the output head takes."""

    def step(logits: str):
        def run(params, cache):
            out = target.fn(params, jnp.ones((1, rows), jnp.int32), cache, logits=logits, features=True)
            total = out.features.sum() if out.logits is None else out.logits.max()
            return total, kv.rollback(out.cache, cache.length)

        return jax.jit(run, donate_argnums=1)

    seconds = {}
    for logits in ("all", "none"):
        run, cache = step(logits), dataclasses.replace(target.fn.init_cache(1, 256), length=jnp.asarray([64]))
        seconds[logits] = _median(run, target.params, cache)
    return 1 - seconds["none"] / seconds["all"]


def _median(run: Any, params: Any, cache: Any, count: int = 30) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        total, cache = run(params, cache)
        total.block_until_ready()
        times.append(time.perf_counter() - began)
    return statistics.median(times[5:])


def lookup_seconds(target: Any, capacity: int = 1024, gamma: int = 7) -> float:
    """Return the seconds of one n-gram lookup for one row."""
    from specjax.draft import ngram_drafter

    drafter, count = ngram_drafter(), 200
    tokens = jnp.arange(capacity, dtype=jnp.int32)[None] % 97
    keys = RoundKeys(round=jnp.zeros((1, 2), jnp.uint32), place=jnp.zeros((1, gamma + 1, 2), jnp.uint32))
    state = Program(
        target.fn, drafter, rule=RULES["greedy"], gamma=0, vocab_size=target.vocab_size
    ).empty({"target": target.params, "draft": {}}, 1, 64)  # fmt: skip

    @jax.jit
    def run(tokens):
        def once(i, tokens):
            view = DraftView(tokens, jnp.asarray([capacity - 64]) + i % 2, state.sampling, keys, jnp.asarray([gamma]))
            return tokens.at[:, -1].set(drafter.propose({}, (), view, gamma, True)[0].tokens[:, 0])

        return jax.lax.fori_loop(0, count, once, tokens)

    run(tokens).block_until_ready()
    began = time.perf_counter()
    run(tokens).block_until_ready()
    return (time.perf_counter() - began) / count


def show(found: dict[str, Any]) -> None:
    """Print one source's table: gammas down, categories across."""
    categories = list(found["runs"][0]["speed_against_plain"])
    table = Table("γ", "mean length", "acceptance", "by position", "draft share", *categories)
    for run in found["runs"]:
        speeds = run["speed_against_plain"]
        length, rate = run["mean_acceptance_length"], run["acceptance_rate"]
        table.add_row(
            str(run["gamma"]),
            "-" if length is None else f"{length:.2f}",
            "-" if rate is None else f"{rate:.2f}",
            " ".join(f"{x:.2f}" for x in run["acceptance_by_position"]),
            f"{run['draft_share_of_round']:.2f}",
            *(f"{speeds[name]:.2f}" for name in categories),
        )
    worst = min(found["auto_against_best_fixed"].values())
    console.print(
        f"{found['draft']}, temperature {found['temperature']:g}: plain {found['plain_seconds'] * 1e3:.1f} ms, a draft "
        f"step {found['draft_step_share']:.3f} of it, widths {found['round_share_by_width']}; speed against plain; "
        f"auto is at least {worst:.3f} of the best fixed gamma in each category",
        highlight=False,
    )
    console.print(table)


if __name__ == "__main__":
    main()
