"""What a round costs beside the target's step: draft bookkeeping, transforms, rule, draws and commit.

    python scripts/round_costs.py --target smollm2-135m --dtype bfloat16
    python scripts/round_costs.py --rounds 400 --repeats 5 --gamma 4 --output round_costs.json

For each setting the whole loop runs twice, in turns: with the target, and with a stand-in that returns logits recorded
from it (one gather, no layers, no cache). The second is all that a round costs beside the target's step, over the same
shapes and with real logits; its share is its time by the first one's. Medians of --repeats pairs, plain decoding beside
n-gram lookup. ``everything`` has bias, bans, a banned sequence, all penalties, a minimum of new tokens, min-p, top-k,
top-p and a constraint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import cache as kv
from specjax.checkpoint import cache_folder
from specjax.draft import ngram_drafter, no_drafter
from specjax.generate import Program, Prompt
from specjax.pair import Model, load
from specjax.proof_stages import raw_logits
from specjax.sampling import SamplingParams, features_of, row_key
from specjax.speculation import default_width
from specjax.types import Constraint, ModelOutput
from specjax.verify import RULES

TEXT = "The quick brown fox jumps over the lazy dog, and the lazy dog looks at the quick brown fox. " * 8


@dataclass(frozen=True)
class Recorded:
    """A target without layers: its parameters are logits [N, V], taken by position."""

    def init_cache(self, batch: int, capacity: int):
        return kv.init(batch, capacity, 1, 1, 1, jnp.float32)

    def __call__(self, params, tokens, cache, *, logits="all", features=False):
        at = cache.length[:, None] + jnp.arange(tokens.shape[1])
        moved = kv.rollback(cache, cache.length + tokens.shape[1])
        return ModelOutput(None if isinstance(logits, str) and logits == "none" else params[at % len(params)], moved)


def everything_allowed(vocab: int) -> Constraint:
    """Return a constraint with a state and a mask that it computes anew at each position."""
    return Constraint(
        lambda: jnp.int32(0),
        lambda state, token: (jnp.arange(vocab) != state % 7, state + jnp.where(token < 0, 0, 1)),
    )


def settings(vocab: int) -> dict[str, tuple[SamplingParams, Constraint | None]]:
    """Return what is measured."""
    truncated = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    others = {"logit_bias": {5: 0.5}, "ban": [7], "ban_sequences": [[8, 9]], "min_new_tokens": 4, "min_p": 0.01}
    return {
        "greedy": (SamplingParams(), None),
        "T .7": (SamplingParams(temperature=0.7), None),
        "T .7, top-k 50, top-p .9": (SamplingParams(**truncated), None),
        "T .7, top-p .9": (SamplingParams(temperature=0.7, top_p=0.9), None),
        "everything": (SamplingParams(**truncated, **penalties, **others), everything_allowed(vocab)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100, help="of each run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--settings", nargs="*", help="names of the table's first column; default all")
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    target = load(options.target, "none", dtype=options.dtype, progress=True).target
    assert target.tokenizer is not None
    ids = target.tokenizer.encode(TEXT)[:128]
    tape = raw_logits(target, ids, default_width(options.gamma, options.dtype))
    table = Table("setting", "draft", "round ms", "beside the target ms", "share")
    found = []
    chosen = settings(target.vocab_size)
    for name in options.settings or chosen:
        params, constraint = chosen[name]
        for draft in ("none", "ngram"):
            gamma = options.gamma if draft == "ngram" else 0
            whole, beside = measure(target, tape, ids, params, constraint, gamma, options.rounds, options.repeats)
            found.append({"setting": name, "draft": draft, "round_ms": whole, "beside_ms": beside})
            table.add_row(name, draft, f"{whole:.2f}", f"{beside:.2f}", f"{beside / whole:.1%}")
    Console().print(table)
    if options.output:
        options.output.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, "rows": found}))


def measure(target: Model, tape, ids, params, constraint, gamma: int, rounds: int, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a round with the target, and with what it recorded."""
    real = _runner(target.fn, target.params, target, ids, params, constraint, gamma, rounds)
    fake = _runner(Recorded(), jnp.asarray(tape), target, ids, params, constraint, gamma, rounds)
    for run in (real, fake):
        run()  # compiles
    times = [(real(), fake()) for _ in range(repeats)]
    whole, beside = (statistics.median(side) for side in zip(*times, strict=True))
    return whole, beside


def _runner(fn, weights, target: Model, ids, params, constraint, gamma: int, rounds: int) -> Callable[[], float]:
    sources = {True: ngram_drafter(), False: no_drafter()}
    program = Program(
        fn,
        sources[gamma > 0],
        rule=RULES["greedy" if params.greedy else "rejection"],
        gamma=gamma,
        vocab_size=target.vocab_size,
        width=default_width(gamma, target.dtype),
        features=features_of([params], constraint),
    )
    limit = len(ids) + rounds * (gamma + 1)
    parts = {"target": weights, "draft": {}}
    prompt = Prompt(ids, limit, (), row_key(0, 1), params)
    empty = program.empty(parts, 1, limit)

    def run() -> float:
        """Return the milliseconds of a round."""
        state = program.insert(parts, jax.tree.map(jnp.copy, empty), prompt, 0)
        state = jax.block_until_ready(program.decode(parts, state, 2))  # warm
        before = int(np.asarray(state.round)[0])
        began = time.perf_counter()
        state = jax.block_until_ready(program.decode(parts, state, rounds - 2))
        seconds = time.perf_counter() - began
        return 1e3 * seconds / (int(np.asarray(state.round)[0]) - before)

    return run


if __name__ == "__main__":
    main()
