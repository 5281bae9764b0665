"""Compare ``specjax plan`` with what a pair really takes on this machine's devices.

    JAX_NUM_CPU_DEVICES=4 python scripts/check_plan.py --target smollm2-135m --draft smollm2-135m --mesh data=2,model=2

Weights, caches and records are the sizes of the live buffers on one device, from their shards. Temporaries are the
compiler's own numbers (``memory_analysis``): the larger of a chunk of rounds and of the longest prompt's insertion,
with its row beside the batch.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import numpy as np

import specjax
from specjax import plan as p
from specjax.generate import Program, Prompt
from specjax.prefill import bucket
from specjax.sampling import row_key
from specjax.sharding import MeshShape, parse_mesh
from specjax.verify import RULES


def on_one_device(tree: Any) -> int:
    """Return the bytes that the first device holds of a tree."""
    first = jax.devices()[0]
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards if part.device == first)


def measured(args: argparse.Namespace) -> dict[str, int]:
    """Load the pair, make its state, compile its programs, and return bytes on one device."""
    pair = specjax.load(args.target, args.draft or "ngram", dtype=args.dtype, mesh=args.mesh, require_draft=True)
    program = Program(
        pair.target.program_fn, pair.draft.drafter, rule=RULES["rejection"], gamma=args.gamma,
        vocab_size=pair.target.num_logits, layout=pair.layout,
    )  # fmt: skip
    params = {"target": pair.target.params, "draft": pair.draft.params}
    state = program.empty(params, args.batch, args.cache_length)
    step = program._step.lower(params, state, np.int32(8)).compile().memory_analysis()  # type: ignore[attr-defined]
    prompt = Prompt([1] * (args.cache_length - 1), args.cache_length, (), row_key(0, 0))
    tokens = np.ones((1, bucket(len(prompt.ids))), np.int32)
    count = np.asarray([len(prompt.ids)], np.int32)
    row = program._fill.lower(params, tokens, count, None).compile().memory_analysis()  # type: ignore[attr-defined]
    views = step.output_size_in_bytes - step.alias_size_in_bytes
    return {
        "target": on_one_device(params["target"]),
        "draft": on_one_device(params["draft"]),
        "caches": on_one_device((state.cache.k, state.cache.v, state.draft)),
        "rest": max(step.temp_size_in_bytes + views, row.temp_size_in_bytes + row.output_size_in_bytes),
        "step_temporaries": step.temp_size_in_bytes,
        "row_temporaries": row.temp_size_in_bytes,
        "row_output": row.output_size_in_bytes,
    }


def planned(args: argparse.Namespace) -> dict[str, int]:
    """Return what the plan says of the same."""
    cpu = jax.default_backend() == "cpu"
    work = p.Work(args.batch, args.cache_length, args.gamma, args.dtype, "float32" if cpu else args.dtype, cpu=cpu)
    draft = None if args.draft is None else p.read_shapes(args.draft)
    mesh = MeshShape() if args.mesh is None else parse_mesh(args.mesh)
    found = p.needs(p.read_shapes(args.target), draft, mesh, work)
    caches = found.target_cache + found.draft_cache
    return {"target": found.target, "draft": found.draft, "caches": caches, "rest": found.records + found.temporaries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--mesh")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--cache-length", type=int, default=1000)
    parser.add_argument("--gamma", type=int, default=4)
    args = parser.parse_args()
    real, said = measured(args), planned(args)
    total = [sum(side[name] for name in said) for side in (real, said)]
    off = total[1] / total[0] - 1
    print(json.dumps({"measured": real, "planned": said, "totals": total, "off": round(off, 4), "mesh": args.mesh,
                      "dtype": args.dtype, "batch": args.batch, "cache_length": args.cache_length,
                      "draft": args.draft}))  # fmt: skip


if __name__ == "__main__":
    main()
