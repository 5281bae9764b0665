"""Continuous batching and jobs, measured: a table and JSON.

    python scripts/measure_jobs.py                                   # SmolLM2: batching, speculation, idle time
    python scripts/measure_jobs.py --only memory --rows 10000        # the tiny pair: memory, rows/s

Run nothing else meanwhile.

    batching     64 rows, new tokens log-uniform 8..256, through 16 slots: slots refilled as rows finish (continuous)
                 against whole batches of 16 that wait for their longest row (static). The same program, alternated.
    speculation  the same rows, speculative against plain, through 1, 4 and 16 slots.
    device idle  the most that the device can have waited for the host between chunks, as a share of all; the JSON
                 has also host_seconds, what the host did while chunks ran.
    memory       many rows through the embedded pair, tiny, as a job: resident memory as rows are written, every id
                 once, rows/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.api import compiled
from specjax.checkpoint import cache_folder
from specjax.engine import Engine, Request
from specjax.generate import Program, Prompt
from specjax.jobs import Place, run_job
from specjax.jobs.manifest import versions
from specjax.pair import Pair, load, no_draft
from specjax.pair_names import EMBEDDED_PAIR
from specjax.requests import Options
from specjax.rows import parse_rows
from specjax.sampling import row_key
from specjax.speculation import plan
from specjax.verify import RULES

TEXTS = (
    "Write a short story about a fox who finds a map.", "Explain how a bicycle stays upright.",
    "Give me a recipe for pancakes.", "What should I see in Rome in two days?",
    "Name three colours and why they matter.",
    "Describe the sea to someone who has never seen it.", "How do I learn to play the piano?", "Why is the sky blue?",
)  # fmt: skip
console = Console(width=110)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gamma", type=int, default=None)
    parser.add_argument("--only", nargs="+", choices=("batching", "speculation", "memory"),
                        default=["batching", "speculation", "memory"])  # fmt: skip
    parser.add_argument("--rows", type=int, default=10_000, help="of the tiny pair")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=("plain", "speculative"), default=["plain", "speculative"],
                        help="of batching")  # fmt: skip
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    report: dict[str, Any] = {"environment": versions(), "arguments": {**vars(args), "output": None}}
    if set(args.only) & {"batching", "speculation"}:
        pair = load(args.target, args.draft, dtype=args.dtype, require_draft=True, progress=True)
        rows = requests(pair, 64)
        if "batching" in args.only:
            report["batching"] = batching(pair, rows, args)
        if "speculation" in args.only:
            report["speculation"] = speculation(pair, rows, args)
    if "memory" in args.only:
        report["memory"] = memory(args.rows)
    line = json.dumps(report)
    if args.output:
        args.output.write_text(line + "\n")
    else:
        print(line)


def requests(pair: Pair, count: int) -> list[Request]:
    """Return rows whose budgets are log-uniform from 8 to 256 tokens, without an EOS."""
    assert pair.target.tokenizer is not None
    budgets = np.exp(np.random.default_rng(0).uniform(np.log(8), np.log(256), count)).round().astype(int)
    found = []
    for i, budget in enumerate(budgets):
        ids = pair.target.tokenizer.encode_chat([{"role": "user", "content": TEXTS[i % len(TEXTS)]}])
        found.append(Request(i, Prompt(ids, len(ids) + int(budget), (), row_key(0, i))))
    return found


def program_of(pair: Pair, gamma: int | None) -> Program:
    """Return the greedy program of a pair."""
    chosen = plan(gamma, pair.gamma, pair.draft.name, None, pair.target.dtype)
    return compiled(
        pair.target.fn, pair.draft.drafter, rule=RULES["greedy"], gamma=chosen.gamma,
        vocab_size=pair.target.vocab_size, width=chosen.widths,
    )  # fmt: skip


def engine_of(pair: Pair, rows: list[Request], slots: int, gamma: int | None) -> Engine:
    """Return an engine for these rows."""
    longest = max(row.prompt.limit for row in rows)
    params = {"target": pair.target.params, "draft": pair.draft.params}
    return Engine(program_of(pair, gamma), params, batch_size=slots, longest=longest)


def drain(engine: Engine, batches: Iterable[list[Request]]) -> dict[str, float]:
    """Run batches one after another; return seconds, tokens and the host's time."""
    began, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += sum(len(result.ids) for result in engine.run(batch))
    return {
        "seconds": time.perf_counter() - began,
        "num_tokens": tokens,
        "host_seconds": engine.pace.host_seconds,
        "idle_seconds": engine.pace.idle_seconds,
        "chunks": engine.num_chunks,
        "rounds_per_chunk": engine.pace.chunk,
    }


def alternate(runs: dict[str, Callable[[], dict[str, float]]], repeats: int) -> dict[str, Any]:
    """Run each once to compile, then all in turns; return each one's runs, and rates in tokens per second."""
    for run in runs.values():
        run()
    done: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            done[name].append(run())
    rates = {name: [one["num_tokens"] / one["seconds"] for one in ones] for name, ones in done.items()}
    return {"runs": done, "tokens_per_second": rates}


def ratio(rates: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Return the ratio of each pair of runs: median, least and most."""
    each = [a / b for a, b in zip(rates[above], rates[below], strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def batching(pair: Pair, rows: list[Request], args: argparse.Namespace) -> dict[str, Any]:
    """Compare refilled slots with whole batches, without a draft and with it."""
    table = Table("16 slots, 64 rows", "continuous", "static", "ratio (min-max)", "device idle")
    report = {}
    groups = [rows[i : i + 16] for i in range(0, len(rows), 16)]
    sides = {"plain": Pair(pair.target, no_draft()), "speculative": pair}
    for name, one in ((side, sides[side]) for side in args.sides):
        found = alternate(
            {
                "continuous": lambda one=one: drain(engine_of(one, rows, 16, args.gamma), [rows]),
                "static": lambda one=one: drain(engine_of(one, rows, 16, args.gamma), groups),
            },
            args.repeats,
        )  # fmt: skip
        rates = found["tokens_per_second"]
        found["ratio"] = ratio(rates, "continuous", "static")
        runs = found["runs"]["continuous"]
        found["idle_share"] = max(run["idle_seconds"] / run["seconds"] for run in runs)
        report[name] = found
        table.add_row(
            name, *(f"{statistics.median(rates[kind]):.1f} tokens/s" for kind in ("continuous", "static")),
            f"{found['ratio']['median']:.2f} ({found['ratio']['min']:.2f}-{found['ratio']['max']:.2f})",
            f"{found['idle_share']:.2%}",
        )  # fmt: skip
    console.print(table)
    return report


def speculation(pair: Pair, rows: list[Request], args: argparse.Namespace) -> dict[str, Any]:
    """Compare speculative with plain decoding at several numbers of slots."""
    table = Table("slots", "speculative", "plain", "ratio (min-max)", "device idle")
    plain, report = Pair(pair.target, no_draft()), {}
    for slots in args.slots:
        some = rows[: max(4 * slots, 8)]
        found = alternate(
            {
                "speculative": lambda s=slots, r=some: drain(engine_of(pair, r, s, args.gamma), [r]),
                "plain": lambda s=slots, r=some: drain(engine_of(plain, r, s, 0), [r]),
            },
            args.repeats,
        )
        rates = found["tokens_per_second"]
        found["ratio"] = ratio(rates, "speculative", "plain")
        found["idle_share"] = max(run["idle_seconds"] / run["seconds"] for run in found["runs"]["speculative"])
        report[str(slots)] = found
        table.add_row(
            str(slots), *(f"{statistics.median(rates[kind]):.1f} tokens/s" for kind in ("speculative", "plain")),
            f"{found['ratio']['median']:.2f} ({found['ratio']['min']:.2f}-{found['ratio']['max']:.2f})",
            f"{found['idle_share']:.2%}",
        )  # fmt: skip
    console.print(table)
    return report


def memory(count: int) -> dict[str, Any]:
    """Run many rows through the tiny pair; watch the resident memory."""
    pair = load(pair=EMBEDDED_PAIR, dtype="float32", require_draft=True)
    generator = np.random.default_rng(0)
    lines = (
        json.dumps({"id": i, "prompt_ids": generator.integers(1, 320, 6).tolist(),
                    "max_new_tokens": int(generator.integers(4, 33))})
        for i in range(count)
    )  # fmt: skip
    rows = parse_rows("\n".join(lines).encode())
    seen: list[tuple[int, int]] = []
    numbers = itertools.count(1)

    def look(output: Any) -> None:
        written = next(numbers)
        if written % max(count // 20, 1) == 0:
            seen.append((written, resident()))

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = run_job(pair, rows, Place(Path(folder) / "out"), Options(gamma=3, batch_size=16), on_output=look)
        seconds = time.perf_counter() - began
        parts = sorted((Path(folder) / "out").glob("part-*.jsonl"))
        ids = [json.loads(line)["id"] for part in parts for line in part.read_text().splitlines()]
    once = sorted(ids) == list(range(count))
    table = Table("rows", "rows/s", "parts", "every id once", "MiB after a tenth", "MiB at the end", "peak MiB")
    first, last = seen[max(len(seen) // 10, 1) - 1][1], seen[-1][1]
    table.add_row(str(count), f"{count / seconds:.1f}", str(len(parts)), str(once),
                  *(f"{size / 2**20:.0f}" for size in (first, last, peak())))  # fmt: skip
    console.print(table)
    return {
        "rows": count, "seconds": seconds, "rows_per_second": count / seconds, "every_id_once": once,
        "resident": seen, "peak": peak(), "manifest": result.manifest,
    }  # fmt: skip


def resident() -> int:
    """Return the bytes of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    """Return the most it has held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    main()
