"""Is the predicted speed-up the measured one? The cost model against runs that it has not seen.

    python scripts/predict.py --drafts ngram NOISY1 NOISY2 --gamma 1 2 4 6 --prompts scripts/prompts/copy.jsonl

For each draft, its inputs are measured apart: what rounds and steps cost, by ``specjax.bench_parts`` (rounds over
caches of zeros), and which tokens of the text it drafts right, from the trace of one greedy run with --calibration
drafts a round, a length that is not predicted. The rounds that another gamma takes follow by walking along the text
(``specjax.cost.rounds_along``). Then plain and speculative decoding are measured in turns, without prefill, as
``specjax bench`` does, and set beside the prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from specjax import cost, generate
from specjax.bench import bench, given_to, read_prompts
from specjax.bench_parts import measure_parts
from specjax.checkpoint import cache_folder
from specjax.pair import Pair, load, no_draft

WITHIN = 0.10


def main() -> int:
    """Measure, predict and print; 1 where a prediction is further off than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", default=["ngram"])
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 2, 4, 6])
    parser.add_argument("--calibration", type=int, default=8, help="drafts a round of the traced run")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="the figures as JSON")
    args = parser.parse_args()
    if args.calibration in args.gamma:
        parser.error("--calibration is one of --gamma; expected a length that is not predicted.")
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    found = [row for draft in args.drafts for row in one_draft(draft, args)]
    table = Table(
        "draft", "γ", "round ms", "tokens a round", "predicted", "measured (min to max)", "off by", "tokens/s"
    )
    for row in found:
        ratio = row["measured"]
        table.add_row(
            Path(row["draft"]).name, str(row["gamma"]), f"{1e3 * row['round_seconds']:.1f}",
            f"{row['tokens_a_round']:.2f}", f"{row['predicted']:.3f}",
            f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})", f"{row['off']:+.1%}",
            f"{row['plain_tokens_per_second']:.1f}, {row['tokens_per_second']:.1f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    worst = max(found, key=lambda row: abs(row["off"]))
    console.print(f"furthest off: {worst['off']:+.1%}, {worst['draft']} at gamma {worst['gamma']}")
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(abs(worst["off"]) > WITHIN)


def one_draft(draft: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return predicted and measured speed-ups of a draft."""
    pair = load(args.target, draft, dtype=args.dtype, require_draft=True, progress=True)
    prompts = read_prompts(args.prompts, pair.target)
    rows = [prompt.row for prompt in prompts]
    options = {"batch_size": 1, "max_new_tokens": args.max_new_tokens, "ignore_eos": True}
    texts = drafted_right(pair, rows, args.calibration, options)
    pairs = {"plain": dataclasses.replace(pair, draft=no_draft()), "speculative": pair}
    parts = {gamma: measure_parts(pairs, rows, gamma, given_to(options), repeats=5, rounds=4) for gamma in args.gamma}
    found = []
    for result in bench(pair, prompts, gammas=args.gamma, repeats=args.repeats, on_run=say(draft), **options):
        gamma, part = result["gamma"], parts[result["gamma"]]
        tokens = sum(map(len, texts)) / sum(cost.rounds_along(text, gamma) for text in texts)
        mine = part["speculative"]
        costs = cost.Costs(
            plain=part["plain"]["round_seconds"],
            draft={gamma: mine["draft_seconds"]},
            verify={gamma + 1: mine["target_seconds"]},
            other=mine["other_seconds"],
        )
        predicted = cost.speedup(costs, gamma, tokens)
        found.append(
            {
                "draft": draft,
                "gamma": gamma,
                "round_seconds": costs.round(gamma),
                "plain_seconds": costs.plain,
                "tokens_a_round": tokens,
                "measured_tokens_a_round": result["tokens_per_target_pass"],
                "predicted": predicted,
                "measured": result["decode_ratio"],
                "off": predicted / result["decode_ratio"]["median"] - 1,
                "plain_tokens_per_second": result["plain"]["decode_tokens_per_second"]["median"],
                "tokens_per_second": result["speculative"]["decode_tokens_per_second"]["median"],
            }
        )
    return found


def drafted_right(pair: Pair, rows: list, gamma: int, options: dict[str, Any]) -> list[list[bool]]:
    """Return, for each row and new token, whether the draft proposes it, from the trace of one greedy run.

    The token after a round whose drafts were all right was not judged: it counts as right where the round drafted as
    many as it could.
    """
    texts: dict[Any, list[bool]] = {}

    def on_round(record: dict[str, Any]) -> None:
        drafts, accepted = record["num_drafted"], record["num_accepted"]
        marks = [True] * accepted + [accepted == drafts == gamma]
        texts.setdefault(record["id"], []).extend(marks[: len(record["emitted"])])

    generate(pair, rows, gamma=gamma, trace=on_round, **options)
    return list(texts.values())


def say(draft: str):
    """Return what shows each run on standard error."""
    return lambda words: print(f"{draft}: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
