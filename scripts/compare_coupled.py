"""The coupled rule across drafts, gammas and widths: one text per seed, and what it accepts beside rejection.

    python scripts/compare_coupled.py --target smollm2-135m --drafts ngram /tmp/near /tmp/far --gamma 1 4 7

Each prompt is sampled at temperature 1 without a draft, then with each draft and gamma under `--rule coupled`, each at
its own width: the ids must be the same but where two tokens' scores, log p and Gumbel noise together, lie closer than
float32 sums of another order can tell. Each first difference is printed with that gap, which is recomputed from the
target's logits; a larger one than --near-tie is a fault, and the exit code 1. Beside it stands what the same drafts
reach under rejection.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import specjax
from specjax.api import Output
from specjax.checkpoint import cache_folder
from specjax.pair import Model
from specjax.proof_stages import raw_logits
from specjax.sampling import SamplingParams, fold, gumbel, purpose_key, row_key
from specjax.stats import merge_stats
from specjax.types import Purpose

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Repeat this list three times: apple, pear, plum, fig.",
    "Translate to French: The cat sleeps on the warm roof.",
    "Count from one to thirty in words.",
)
console = Console(width=120)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 4, 7])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--near-tie", type=float, default=1e-3, help="of a score; bfloat16 wants about 0.3")
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    table = Table(
        "draft", "γ", "batch", "texts equal", "first differences (prompt, token, gap)", "accepted", "by rejection"
    )
    faults, wanted, plain = 0, [], None
    for draft in ["none", *args.drafts]:
        pair = specjax.load(args.target, draft, dtype=args.dtype, require_draft=True, progress=True)
        for gamma in args.gamma if draft != "none" else [0]:
            accepted = share(sample(pair, "rejection", gamma, 4, args)) if gamma else "–"
            for batch in (1, 4):
                outputs = sample(pair, "coupled", gamma, batch, args)
                plain = plain or outputs
                found = differences(pair.target, plain, outputs)
                faults += sum(gap > args.near_tie for _, _, gap in found)
                wanted += [gap for _, _, gap in found]
                listed = "; ".join(f"{row} @{at} {gap:.1g}" for row, at, gap in found)
                equal = f"{len(outputs) - len(found)}/{len(outputs)}"
                table.add_row(Path(draft).name, str(gamma), str(batch), equal, listed, share(outputs), accepted)
    console.print(table)
    console.print(f"{len(wanted)} first differences, the largest gap {max(wanted, default=0):.2g}; {faults} faults")
    sys.exit(bool(faults))


def sample(pair: specjax.Pair, rule: str, gamma: int, batch: int, args: argparse.Namespace) -> list[Output]:
    """Return the prompts' outputs at temperature 1; ids name the rows, and with the seed their noise."""
    rows = [{"id": i, "messages": [{"role": "user", "content": text}]} for i, text in enumerate(PROMPTS)]
    return specjax.generate(
        pair, rows, sampling=SamplingParams(temperature=1.0), rule=rule, gamma=gamma or 1, batch_size=batch,
        max_new_tokens=args.max_new_tokens, require_draft=bool(gamma),
    )  # fmt: skip


def differences(target: Model, expected: list[Output], found: list[Output]) -> list[tuple[int, int, float]]:
    """Return (prompt, new token, gap) of each text's first difference; the gap is of the two tokens' scores."""
    assert target.tokenizer is not None
    differing = []
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        both = zip(ours.ids, theirs.ids, strict=False)
        first = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if first is None:
            if len(ours.ids) != len(theirs.ids):
                differing.append((row, min(len(ours.ids), len(theirs.ids)), float("inf")))
            continue
        prompt = target.tokenizer.encode_chat([{"role": "user", "content": PROMPTS[row]}])
        ids = [*prompt, *theirs.ids[:first]]
        logits = raw_logits(target, ids, 1)[-1]
        key = fold(purpose_key(jnp.asarray(row_key(0, row))[None], Purpose.COUPLED), len(ids))[0]
        scores = jax.nn.log_softmax(logits) + gumbel(key, jnp.arange(len(logits)))
        differing.append((row, first, abs(float(scores[ours.ids[first]] - scores[theirs.ids[first]]))))
    return differing


def share(outputs: list[Output]) -> str:
    """Return the accepted share of what was drafted."""
    stats = merge_stats(out.stats for out in outputs)
    drafted = stats["num_draft_tokens"]
    return f"{stats['num_accepted_tokens'] / drafted:.3f}" if drafted else "–"


if __name__ == "__main__":
    main()
