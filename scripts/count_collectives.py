"""What travels between devices in one round, read from the compiled program: nothing is run, nothing is loaded.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/count_collectives.py --target llama-3-8b \
        --layers 1 --mesh data=2,model=4 --batch 8

The program is that of sampled rows under the rejection rule with a draft of the target's own shape, top-p, penalties
and a bias. Each line of the output is one collective: its kind, where in the round it is, its result's shape on one
device, and its bytes. "round" is once per round, "draft" once per drafted token, "branch" where a condition chooses it:
the draw among few candidates, or the exact fall-back where candidates do not decide.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from typing import Any

import jax
import numpy as np

from specjax.draft import model_drafter
from specjax.generate import Program
from specjax.layout import Whole, padded
from specjax.models.decoder import DecoderFn
from specjax.placement import OnMesh, placement
from specjax.plan import read_shapes
from specjax.sampling import Features
from specjax.types import RoundState
from specjax.verify import RULES

KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
_LINE = re.compile(rf"= (?P<result>\(?[^=]*?\)?) (?P<kind>{KINDS})(-start)?\(.*?op_name=\"(?P<name>[^\"]*)\"")
_ANY = re.compile(rf"= (?P<result>\(?[^=]*?\)?) (?P<kind>{KINDS})(-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+)(?P<bits>\d*)\[(?P<shape>[\d,]*)\]")


def collectives(text: str) -> list[dict[str, Any]]:
    """Return the collectives of a compiled program's text."""
    found = []
    for line in text.splitlines():
        match = _LINE.search(line) or _ANY.search(line)
        if match is None:
            continue
        name = match.groupdict().get("name") or ""
        loops = name.count("while/body")
        where = "branch" if "cond/" in name or "branch_" in name else "round" if loops < 2 else "draft"
        for array in _ARRAY.finditer(match["result"]):
            shape = [int(size) for size in array["shape"].split(",") if size]
            size = 1 if array["dtype"] == "pred" else int(array["bits"]) // 8
            found.append({"kind": match["kind"], "where": where, "shape": shape, "elements": math.prod(shape),
                          "bytes": size * math.prod(shape), "name": name})  # fmt: skip
    return found


def compiled(fn: DecoderFn, mesh: str, batch: int, *, gamma: int, longest: int, rule: str) -> str:
    """Return the text of the decode step on a mesh."""
    there = OnMesh.of(mesh)
    sizes = there.shape
    where = placement(fn, sizes)
    small = placement(fn, sizes, replicated=sizes.draft == "replicated")
    vocab = fn.config.vocab_size
    features = Features(bias=True, penalties=True, truncation=True)
    target = dataclasses.replace(fn, config=where.expanded)
    draft = dataclasses.replace(fn, config=small.expanded)
    draft_fn = Whole(draft) if small.replicated else draft
    program = Program(
        padded(target, vocab, vocab), model_drafter(draft_fn, vocab), rule=RULES[rule], gamma=gamma, vocab_size=vocab,
        layout=there.layout, features=features, logprobs=True,
    )  # fmt: skip
    params = {"target": _abstract(target, where, there), "draft": _abstract(draft, small, there)}
    state = _state(program, params, batch, longest, there)
    return program._step.lower(params, state, np.int32(4)).compile().as_text()  # type: ignore[attr-defined]


def _abstract(fn: DecoderFn, where: Any, there: OnMesh) -> Any:
    shapes = jax.eval_shape(fn.init_params, jax.random.key(0))

    def laid_out(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = where.expanded_spec(tuple(entry.key for entry in path), leaf.shape)
        place = jax.sharding.NamedSharding(there.mesh, spec.partition)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(laid_out, shapes)


def _state(program: Program, params: Any, batch: int, longest: int, there: OnMesh) -> RoundState:
    shapes = program.shapes(params, batch, longest)
    places = there.layout.shardings(shapes)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a config.json, or a name in configs/plan")
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--layers", type=int, help="only so many of its layers")
    parser.add_argument("--vocab", type=int, help="another size of the vocabulary")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--rule", default="rejection")
    args = parser.parse_args()
    config = read_shapes(args.target).config
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers, kinds=config.kinds[: args.layers])
    if args.vocab is not None:
        config = dataclasses.replace(config, vocab_size=args.vocab)
    text = compiled(DecoderFn(config), args.mesh, args.batch, gamma=args.gamma, longest=args.longest, rule=args.rule)
    for line in collectives(text):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
