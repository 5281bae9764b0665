"""What a step of the target costs on this machine, by width, batch, valid length and capacity.

    python scripts/step_costs.py --target smollm2-135m --dtype bfloat16 --widths 1 2 3 4 5 6 7 8
    python scripts/step_costs.py --lengths 200 1000 --capacities 256 4096
    python scripts/step_costs.py --prefill 200 2000

Each figure is from compiled loops of one and of --steps steps on a cache of the given valid length (their difference:
what a call costs by itself does not count), every step's tokens being the argmax of the last one's logits (so nothing
can be left out), repeated --repeats times in turns with the others; medians.

A step of one row is plain decoding as this program family runs it: bfloat16 pads it to two rows. Weight
bytes per second are set against what the machine copies (reads and writes counted), measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.bench_parts import clocked, in_turns, machine, step_loop, weight_bytes
from specjax.checkpoint import cache_folder
from specjax.pair import Model, load
from specjax.prefill import bucket, prefill
from specjax.speculation import default_width
from specjax.timing import per_round


@dataclass(frozen=True)
class Case:
    """One step: W rows for each of B texts that hold ``length`` tokens, in a cache of ``capacity``."""

    width: int
    batch: int
    length: int
    capacity: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--batches", type=int, nargs="*", default=[1])
    parser.add_argument("--lengths", type=int, nargs="*", default=[100])
    parser.add_argument("--capacities", type=int, nargs="*", default=[256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompt lengths to prefill instead")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="the figures as JSON")
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    target = load(args.target, "none", dtype=args.dtype, progress=True).target
    figures = prefills(target, args) if args.prefill else steps(target, args)
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n")


def steps(target: Model, args: argparse.Namespace) -> dict:
    """Measure steps; the first case is the unit of the last column."""
    cases = [
        Case(width, batch, length, capacity)
        for capacity in args.capacities
        for length in args.lengths
        for batch in args.batches
        for width in args.widths
        if length + width <= capacity
    ]
    calls = [functools.partial(call, count) for call in (step_call(target, case) for case in cases)
             for count in (1, args.steps)]  # fmt: skip
    whole = in_turns(calls, args.repeats)
    seconds = [per_round(one, several, args.steps) for one, several in zip(whole[::2], whole[1::2], strict=True)]
    copied = machine(args.dtype)["copy_bytes_per_second"]
    held = weight_bytes(target.params)
    table = Table(
        "width", "batch", "valid", "capacity", "ms a step", "to the first", "weights, GB/s", "of the copy rate"
    )
    rows = []
    for case, step in zip(cases, seconds, strict=True):
        row = {**case.__dict__, "seconds": step, "ratio": step / seconds[0]}
        row |= {"weight_bytes_per_second": held / step, "of_copy": held / step / copied}
        rows.append(row)
        table.add_row(*map(str, (case.width, case.batch, case.length, case.capacity)), f"{step * 1e3:.2f}",
                      f"{row['ratio']:.2f}", f"{held / step / 1e9:.1f}", f"{row['of_copy']:.0%}")  # fmt: skip
    console = Console()
    console.print(table)
    console.print(f"{args.dtype}: weights {held / 1e6:.0f} MB; the machine copies {copied / 1e9:.1f} GB/s")
    return {"dtype": args.dtype, "weight_bytes": held, "copy_bytes_per_second": copied, "steps": rows}


def step_call(target: Model, case: Case) -> Callable[[int], float]:
    """Return a call that runs some steps, compiled, and returns their seconds."""
    width = max(case.width, default_width(0, target.dtype)) if case.batch == 1 else case.width
    return step_loop(target.fn, target.params, width, case.batch, case.length, case.capacity, target.vocab_size)


def prefills(target: Model, args: argparse.Namespace) -> dict:
    """Measure the prefill of prompts, one at a time."""
    runs = []
    for length in args.prefill:
        size = bucket(length)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :length] = np.random.default_rng(0).integers(0, target.vocab_size, length)
        fill = jax.jit(functools.partial(prefill, target.fn, capacity=size))
        count = np.asarray([length], np.int32)
        runs.append(clocked(lambda fill=fill, tokens=tokens, count=count: fill(target.params, tokens, count)))
    seconds = in_turns(runs, args.repeats)
    table = Table("prompt, tokens", "s", "tokens/s")
    for length, spent in zip(args.prefill, seconds, strict=True):
        table.add_row(str(length), f"{spent:.3f}", f"{length / spent:.0f}")
    Console().print(table)
    rows = [{"length": n, "seconds": s, "tokens_per_second": n / s} for n, s in zip(args.prefill, seconds, strict=True)]
    return {"dtype": args.dtype, "prefill": rows}


if __name__ == "__main__":
    main()
