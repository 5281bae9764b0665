"""Show that results at one width are the same bits, whatever the draft, gamma, batch, place or capacity.

    python scripts/check_width.py --target smollm2-135m --dtype bfloat16 --drafts ngram /tmp/noisy --width 8
    python scripts/check_width.py --drafts ngram /tmp/noisy --rule coupled --temperature 1

Plain decoding of each prompt, alone, at the smallest capacity, is compared with every other way: ids must be equal and
log-probabilities equal bit for bit. Exit 1 at the first way that differs, after printing all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.checkpoint import cache_folder
from specjax.engine import Engine, Request
from specjax.generate import Program, Prompt
from specjax.pair import Draft, Model, load
from specjax.sampling import SamplingParams, row_key
from specjax.stats import row_stats
from specjax.verify import RULES

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Repeat this list three times: apple, pear, plum, fig.",
    "Translate to French: The cat sleeps on the warm roof.",
    "Count from one to thirty in words.",
)
console = Console()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", default=["ngram"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--gamma", type=int, nargs="+", default=None, help="default: 1 to width - 1")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--rule", default="greedy", choices=["greedy", "coupled"], help="rules with one text per seed")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))

    target = load(args.target, "none", dtype=args.dtype, progress=True).target
    prompts = [encode(target, text) for text in PROMPTS]
    ways = [("none", 0)] + [(d, g) for d in args.drafts for g in args.gamma or range(1, args.width)]
    table = Table("draft", "gamma", "batch", "capacity", "rows equal", "log-probability bits equal", "acceptance")
    wanted: dict[int, tuple[list[int], bytes]] = {}
    faults = 0
    for draft, gamma in ways:
        source = load(args.target, draft, dtype=args.dtype, require_draft=True).draft
        program = Program(
            target.fn, source.drafter, rule=RULES[args.rule], gamma=gamma, vocab_size=target.vocab_size,
            width=args.width, logprobs=True, check=True,
        )  # fmt: skip
        for order, batch, longest in (((0, 1, 2, 3), 1, 240), ((2, 0, 3, 1), 4, 240), ((3, 1, 0, 2), 4, 1000)):
            found, rate = decode(program, target, source, prompts, order, batch, longest, args)
            for i, row in found.items():
                wanted.setdefault(i, row)
            ids = sum(found[i][0] == wanted[i][0] for i in found)
            bits = sum(found[i][1] == wanted[i][1] for i in found)
            faults += 2 * len(found) - ids - bits
            capacity = 256 if longest < 256 else 1024
            table.add_row(Path(draft).name, str(gamma), str(batch), str(capacity), f"{ids}/4", f"{bits}/4", rate)
    console.print(table)
    console.print("[green]all equal[/green]" if not faults else f"[red]{faults} differences[/red]")
    sys.exit(bool(faults))


def encode(target: Model, text: str) -> list[int]:
    """Return a chat prompt's ids."""
    assert target.tokenizer is not None, "the target needs a tokenizer"
    return target.tokenizer.encode_chat([{"role": "user", "content": text}])


def decode(
    program: Program,
    target: Model,
    draft: Draft,
    prompts: list[list[int]],
    order: tuple[int, ...],
    batch: int,
    longest: int,
    args: argparse.Namespace,
) -> tuple[dict[int, tuple[list[int], bytes]], str]:
    """Return each prompt's ids and log-probability bits, and the acceptance rate."""
    params = {"target": target.params, "draft": draft.params}
    sampling = SamplingParams(temperature=args.temperature)
    engine = Engine(program, params, batch_size=batch, longest=longest)
    requests = [
        Request(i, Prompt(prompts[i], len(prompts[i]) + args.max_new_tokens, target.eos_ids, row_key(0, i), sampling))
        for i in order
    ]
    found, accepted, drafted = {}, 0, 0
    for result in engine.run(requests):
        assert result.status == 0, f"status {result.status!r}"
        found[result.key] = (result.ids.tolist(), np.asarray(result.logprobs).tobytes())
        stats = row_stats(result.place, result.accepted, result.drafted, speculation="on")
        accepted, drafted = accepted + stats["num_accepted_tokens"], drafted + stats["num_draft_tokens"]
    return found, f"{accepted / drafted:.3f}" if drafted else "-"


if __name__ == "__main__":
    main()
