"""Compare greedy decoding with rows that another implementation computed, and print a report.

    python scripts/check_reference.py --reference rows.jsonl --drafts none ngram /tmp/noisy --gamma 1 4 7

Each row of the reference: {"id", "messages", "prompt_ids", "greedy_ids", "margins"} (margins: the gap between the two
largest logits at each token). Every draft and gamma runs each row alone and all rows in one batch. In float32 the ids
must be equal; in bfloat16 a first difference must be a near-tie, shown with its margin. Exit 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import specjax
from specjax.checkpoint import cache_folder
from specjax.pair import Pair
from specjax.stats import merge_stats

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}  # a first difference at a larger margin is a fault
console = Console()


def main() -> None:
    """Run the comparison."""
    args = parse()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    rows = [json.loads(line) for line in args.reference.read_text().split("\n") if line.strip()]
    target = specjax.load(args.target, "none", dtype=args.dtype, progress=True).target
    faults = check_prompts(target, rows)

    table = Table("draft", "gamma", "rows", "equal", "first differences (row, token, margin)", "acceptance")
    plain: dict[Any, list[int]] = {}
    for draft, gamma in cases(args.drafts, args.gamma):
        pair = specjax.load(args.target, draft, dtype=args.dtype, require_draft=True)
        for batch in (1, len(rows)):
            outputs = run(pair, [row["prompt_ids"] for row in rows], gamma, batch, max(map(length, rows)), args.width)
            equal, differences, wrong = compare(rows, outputs, NEAR_TIE[args.dtype])
            faults += wrong
            rate = merge_stats([out.stats for out in outputs])["draft_acceptance_rate"]
            shown = "-" if rate is None else f"{rate:.3f}"
            label = "alone" if batch == 1 else f"batch of {batch}"
            table.add_row(Path(draft).name, str(gamma), label, f"{equal}/{len(rows)}", "; ".join(differences), shown)
    console.print(table)
    if args.long:
        faults += long_row(args, rows, target, plain)
    console.print("[green]no fault[/green]" if not faults else f"[red]{faults} faults[/red]")
    sys.exit(bool(faults))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", default=["none", "ngram"])
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 4, 7])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--long", type=int, default=0, metavar="TOKENS", help="also a row of at least so many tokens")
    return parser.parse_args()


def length(row: dict[str, Any]) -> int:
    """Return how many tokens a row's reference has."""
    return len(row["greedy_ids"])


def cases(drafts: list[str], gammas: list[int]):
    """Return each draft with each gamma; no draft has gamma 0 only."""
    return [(d, g) for d, g in itertools.product(drafts, gammas) if d != "none"] + [
        (d, 0) for d in drafts if d == "none"
    ]


def check_prompts(target: Any, rows: list[dict[str, Any]]) -> int:
    """Say whether the chat template gives each row's prompt_ids; return how many differ."""
    wrong = [row["id"] for row in rows if target.tokenizer.encode_chat(row["messages"]) != row["prompt_ids"]]
    console.print(f"prompt_ids from messages: {len(rows) - len(wrong)}/{len(rows)} equal {wrong or ''}")
    return len(wrong)


def run(pair: Pair, prompts: list[list[int]], gamma: int, batch: int, new: int, width: int | None):
    """Decode greedily and return the outputs in order."""
    return specjax.generate(
        pair, prompts, gamma=gamma, width=width, batch_size=batch, max_new_tokens=new, check=True, require_draft=True
    )


def compare(rows: list[dict[str, Any]], outputs: list[Any], near_tie: float) -> tuple[int, list[str], int]:
    """Return how many rows are equal, the first differences, and how many of those are no near-ties."""
    equal, differences, wrong = 0, [], 0
    for row, out in zip(rows, outputs, strict=True):
        ids, wanted = out.ids, row["greedy_ids"]
        count = min(len(ids), len(wanted))
        first = next((i for i in range(count) if ids[i] != wanted[i]), None)
        if first is None:
            equal += len(ids) == len(wanted) or out.finish_reason == "length"
            wrong += not (len(ids) == len(wanted) or out.finish_reason == "length")
            continue
        margin = row["margins"][first]
        differences.append(f"{row['id']} @{first} {margin:.4f}")
        wrong += margin > near_tie
    return equal, differences, wrong


def long_row(args: argparse.Namespace, rows: list[dict[str, Any]], target: Any, plain: dict[Any, list[int]]) -> int:
    """Decode one prompt of at least ``args.long`` tokens: every draft gives plain decoding's ids."""
    text = "\n".join(message["content"] for row in rows for message in row["messages"])
    ids: list[int] = []
    while len(ids) < args.long:
        ids += target.tokenizer.encode(text)
    ids = target.tokenizer.encode_chat(
        [{"role": "user", "content": target.tokenizer.decode(ids[: args.long]) + "\nSummarise this."}]
    )
    faults = 0
    for draft, gamma in [("none", 0), *[case for case in cases(args.drafts, [4]) if case[0] != "none"]]:
        pair = specjax.load(args.target, draft, dtype=args.dtype, require_draft=True)
        out = run(pair, [ids], gamma, 1, 64, args.width)[0]
        first = plain.setdefault("long", out.ids)
        same = out.ids == first
        faults += not same and args.dtype == "float32"
        console.print(
            f"long row, {len(ids)} prompt tokens, {Path(draft).name}, gamma {gamma}: "
            f"{len(out.ids)} new, {'equal to plain' if same else 'DIFFERS from plain'}, "
            f"acceptance {out.stats['draft_acceptance_rate']}"
        )
    return faults


if __name__ == "__main__":
    main()
