"""Compare the ids of a pair on meshes with those on one device.

    JAX_NUM_CPU_DEVICES=3 python scripts/check_mesh.py --target smollm2-135m --draft FOLDER --mesh data=1,model=3

Eight prompts of different lengths in float32, greedy or sampled (temperature 0.9, top-p 0.95) with one seed, under
each rule. For each mesh and rule one line of JSON: accepted and drafted tokens on one device, and each row's first
difference as [row, place, gap], the gap being that of the two likeliest tokens there. Exit code 1 where a difference is
no near-tie (greedy), or where there is one at all (sampled: noise decides, not the gap).
"""

from __future__ import annotations

import argparse
import json
import sys

import specjax
from specjax.api import Output

RULES = ("greedy", "rejection", "block", "coupled")
NEAR_TIE = 1e-3


def prompts(vocab: int, count: int = 8) -> list[list[int]]:
    """Return prompts of different lengths."""
    return [[(7 * i + 3 * j * j + 1) % vocab for j in range(2 + 5 * i)] for i in range(count)]


def differences(one: list[Output], other: list[Output]) -> list[tuple[int, int, float]]:
    """Return row, place and gap of each first difference."""
    found = []
    for row, (a, b) in enumerate(zip(one, other, strict=True)):
        place = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y), None)
        if place is None and len(a.ids) != len(b.ids):
            place = min(len(a.ids), len(b.ids))
        if place is not None:
            tops = a.top_logprobs or []
            (_, first), (_, second) = tops[place] if place < len(tops) else ((0, 0.0), (0, float("-inf")))
            found.append((row, place, first - second))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--mesh", nargs="+", required=True)
    parser.add_argument("--rule", nargs="+", default=RULES)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    found: dict[tuple[str, str | None], list[Output]] = {}
    for mesh in (None, *args.mesh):
        pair = specjax.load(args.target, args.draft, dtype="float32", mesh=mesh, require_draft=True)
        given = prompts(min(pair.target.vocab_size, 300))
        for rule in args.rule:
            hot = specjax.SamplingParams(temperature=0.9, top_p=0.95)
            found[rule, mesh] = specjax.generate(
                pair, given, rule=rule, sampling=specjax.SamplingParams() if rule == "greedy" else hot, seed=args.seed,
                gamma=3, max_new_tokens=args.new, ignore_eos=True, top_logprobs=2,
            )  # fmt: skip
    code = 0
    for rule in args.rule:
        one = found[rule, None]
        stats = {name: sum(out.stats[name] for out in one) for name in ("num_accepted_tokens", "num_draft_tokens")}
        for mesh in args.mesh:
            rows = found[rule, mesh]
            apart = differences(one, rows)
            errors = [out.error for out in (*one, *rows) if out.error]
            if errors or any(rule != "greedy" or gap >= NEAR_TIE for _, _, gap in apart):
                code = 1
            print(json.dumps({"rule": rule, "mesh": mesh, **stats, "tokens": sum(len(out.ids) for out in rows),
                              "differences": apart, "errors": errors}), flush=True)  # fmt: skip
    return code


if __name__ == "__main__":
    sys.exit(main())
