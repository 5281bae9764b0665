"""Compare scores and greedy texts with transformers on the same checkpoint, in float32 (extra: peers).

    python scripts/compare_transformers.py reference --model model.gguf --output reference.npz
    python scripts/compare_transformers.py compare --target model.gguf --reference reference.npz

The two steps may run in different environments: the first needs torch and transformers (and gguf for a GGUF file),
the second this package. Logits are compared over every prompt, relative to the largest; the likeliest token must be the
same wherever the reference's two best differ by more than --near-tie; so must greedy texts, plain and with a draft, up
to the first near-tie. Log-probabilities from ``score`` are compared with the reference's logits. Exit 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1905, Albert Einstein published four papers that",
    "Zutaten für einen Apfelkuchen: 200 g Mehl, 100 g Zucker,",
    "東京は日本の首都であり、",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "It was a bright cold day in April, and the clocks were striking thirteen.  Two spaces,\n\nand a blank line.",
)


def main() -> int:
    """Parse, run one step, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    made = steps.add_parser("reference", help="run transformers")
    made.add_argument("--model", required=True, type=Path, help="a .gguf file or a folder in Hugging Face layout")
    made.add_argument("--output", required=True, type=Path)
    made.add_argument("--max-new-tokens", type=int, default=48)
    compared = steps.add_parser("compare", help="run this package and compare")
    compared.add_argument("--target", required=True, help="the same model, as the command line takes it")
    compared.add_argument("--reference", required=True, type=Path)
    compared.add_argument("--draft", default="ngram")
    compared.add_argument("--gamma", type=int, default=4)
    compared.add_argument("--tolerance", type=float, default=2e-4, help="of logits, relative to the largest")
    compared.add_argument("--near-tie", type=float, default=1e-3)
    args = parser.parse_args()
    return reference(args) if args.step == "reference" else compare(args)


def reference(args: argparse.Namespace) -> int:
    """Write transformers' ids, logits and greedy tokens."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

    gguf = args.model.suffix == ".gguf"
    where = args.model.parent if gguf else args.model
    options: dict[str, Any] = {"gguf_file": args.model.name} if gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="eager", **options)
    model.eval()
    arrays: dict[str, np.ndarray] = {"count": np.array(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            grown = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.max_new_tokens,
                use_cache=True,
            )  # fmt: skip
            logits = model(grown[:, :-1]).logits[0].float().numpy()
        arrays |= {f"prompt_{i}": ids[0].numpy(), f"ids_{i}": grown[0].numpy(), f"logits_{i}": logits}
        print(f"{prompt[:40]!r}: {ids.shape[1]} tokens, {grown.shape[1] - ids.shape[1]} new")
    np.savez(args.output, **arrays)  # type: ignore[arg-type]
    return 0


def compare(args: argparse.Namespace) -> int:
    """Compare this package with a reference; print a table and one line of JSON."""
    from rich.console import Console
    from rich.table import Table

    import specjax

    arrays = np.load(args.reference)
    plain = specjax.load(args.target, "none", dtype="float32", progress=True)
    drafted = specjax.load(args.target, args.draft, dtype="float32", require_draft=True)
    tokenizer = plain.target.tokenizer
    table = Table("prompt", "tokens", "ids", "logits", "top-1", "scores", "greedy", f"with {args.draft}")
    worst, faults = {"logits": 0.0, "scores": 0.0}, 0
    for i in range(int(arrays["count"])):
        prompt, ids, wanted = (arrays[f"{name}_{i}"] for name in ("prompt", "ids", "logits"))
        got = logits_of(plain.target, ids[:-1], wanted.shape[1])
        margins = margins_of(wanted)
        clear = margins > args.near_tie
        error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        top = int((got.argmax(-1) == wanted.argmax(-1))[clear].sum())
        score_error = compare_scores(plain.target, ids, wanted)
        same_ids = tokenizer is None or tokenizer.encode(PROMPTS[i]) == prompt.tolist()
        greedy = [first_difference(pair, prompt, ids, margins, args) for pair in (plain, drafted)]
        worst = {"logits": max(worst["logits"], error), "scores": max(worst["scores"], score_error)}
        faults += (error > args.tolerance) + (top < clear.sum()) + (not same_ids)
        faults += sum(place is not None and clear[place] for place in greedy)
        table.add_row(
            repr(PROMPTS[i][:24]),
            str(len(ids)),
            "equal" if same_ids else "DIFFER",
            f"{error:.1e}",
            f"{top}/{clear.sum()}",
            f"{score_error:.1e}",
            *("equal" if place is None else f"@{place} margin {margins[place]:.1e}" for place in greedy),
        )
    Console().print(table)
    print(json.dumps({"target": args.target, **worst, "tolerance": args.tolerance, "faults": int(faults)}))
    return 1 if faults else 0


def logits_of(target: Any, ids: np.ndarray, vocab: int) -> np.ndarray:
    """Return logits [T, V] of one pass over ids."""
    import jax.numpy as jnp

    cache = target.fn.init_cache(1, len(ids))
    out = target.fn(target.params, jnp.asarray(ids, jnp.int32)[None], cache, logits="all")
    return np.asarray(out.logits)[0, :, :vocab]


def margins_of(logits: np.ndarray) -> np.ndarray:
    """Return the gap between the two best logits of each position."""
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    return best[:, 1] - best[:, 0]


def compare_scores(target: Any, ids: np.ndarray, logits: np.ndarray) -> float:
    """Return the largest difference of log-probabilities."""
    import specjax

    (result,) = specjax.score(target, [ids.tolist()])
    wide = logits.astype(np.float64)[:, : target.vocab_size]
    wide -= wide.max(axis=-1, keepdims=True)
    logs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    wanted = logs[np.arange(len(ids) - 1), ids[1:]]
    return float(np.abs(np.asarray(result["logprobs"][1:], np.float64) - wanted).max())


def first_difference(
    pair: Any, prompt: np.ndarray, ids: np.ndarray, margins: np.ndarray, args: argparse.Namespace
) -> int | None:
    """Return the position whose logits chose another token than the reference's text has next; None: the same text."""
    import specjax

    wanted = ids[len(prompt) :].tolist()
    (out,) = specjax.generate(
        pair, [prompt.tolist()], gamma=args.gamma, max_new_tokens=len(wanted), ignore_eos=True, check=True
    )
    for place, (a, b) in enumerate(zip(out.ids, wanted, strict=True)):
        if a != b:
            return len(prompt) + place - 1
    return None


if __name__ == "__main__":
    sys.exit(main())
