"""Is greedy text under each penalty and ban that of plain decoding, token by token, on a real model?

    python scripts/check_transforms.py --target smollm2-135m --drafts ngram DRAFT --dtype bfloat16

Every setting is a row of its own; all run in one batch at one width, plain and with each draft, so the texts must be
equal to the bit. Prints a line for each setting and draft with the acceptance, and exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax

import specjax
from specjax.checkpoint import cache_folder

PROMPT = "one two three four one two three four one two three"


def settings(words: list[int]) -> dict[str, dict[str, Any]]:
    """Return what is compared; ``words`` are ids that plain decoding would write again."""
    first, second, third = words
    return {
        "none": {},
        "logit bias": {"logit_bias": {str(first): -20.0, str(third): 3.0}},
        "ban": {"ban": [second]},
        "allow": {"allow": [first, third, *range(200, 4000)]},
        "minimum": {"min_new_tokens": 20},
        "repetition": {"repetition_penalty": 1.2},
        "presence": {"presence_penalty": 1.0},
        "frequency +2": {"frequency_penalty": 2.0},
        "frequency -2": {"frequency_penalty": -2.0},
        "all": {"logit_bias": {str(first): 1.0}, "ban": [third], "min_new_tokens": 9, "repetition_penalty": 1.1,
                "presence_penalty": 0.3, "frequency_penalty": 0.2},
    }  # fmt: skip


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", default=["ngram"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--ban-sequence", nargs="*", default=["four one", "five"])
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    base = specjax.load(args.target, "none", dtype=args.dtype)
    assert base.target.tokenizer is not None
    words = base.target.tokenizer.encode(PROMPT)[-3:]
    rows = [{"id": name, "prompt": PROMPT, **own} for name, own in settings(words).items()]
    options = {"width": args.gamma + 1, "gamma": args.gamma, "max_new_tokens": args.max_new_tokens, "batch_size": 5,
               "ban_sequence": args.ban_sequence}  # fmt: skip
    plain = specjax.generate(base, rows, **options)
    lost = 0
    for draft in args.drafts:
        pair = specjax.load(args.target, draft, dtype=args.dtype, require_draft=True)
        for theirs, ours in zip(plain, specjax.generate(pair, rows, **options), strict=True):
            equal = ours.error is None and ours.ids == theirs.ids
            lost += not equal
            rate = ours.stats["draft_acceptance_rate"]
            print(f"{draft}, {ours.id}: {'equal' if equal else 'DIFFERENT'}, {len(ours.ids)} tokens, "
                  f"acceptance {'-' if rate is None else f'{rate:.2f}'}")  # fmt: skip
    print(f"{len({tuple(out.ids) for out in plain})} different texts among {len(plain)} settings")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
