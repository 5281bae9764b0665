"""Measured costs of drafting and verifying, which ``gamma="auto"`` decides by: measured once, kept in the cache folder.

A table holds for one machine, target, draft, rule, batch size and set of widths; greedy rows have one of their own.
It is measured with the very program that will run: single rounds with a given number of draft steps, from the same
state each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from specjax.checkpoint import cache_folder
from specjax.gamma import Costs
from specjax.generate import Program
from specjax.pair import Pair
from specjax.sampling import SamplingParams
from specjax.speculation import AUTO, plan
from specjax.timing import RoundTimer, per_round
from specjax.types import Params
from specjax.verify import rule_for

BRIEF_ROUNDS = 5
ROUNDS = 25
_LEAST_SHARE = 0.1  # of a call of one round, that the round costs
SEVERAL = 5  # rounds of a call, to tell what the call itself costs


class TuneWarning(UserWarning):
    """Costs were measured in passing; ``specjax tune`` measures them well."""


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """What rounds cost, in seconds.

    Attributes:
        key: what it was measured for.
        widths: rows of the target's step.
        draft_seconds: of 0..K draft steps.
        verify_seconds: of the rest of a round at each width.
        catch_up_seconds: of one entry that the draft's cache lacks.
        rounds: how many rounds each number stands on.
    """

    key: dict[str, Any]
    widths: list[int]
    draft_seconds: list[float]
    verify_seconds: list[float]
    catch_up_seconds: float
    rounds: int
    schema: int = 1

    def costs(self) -> Costs:
        """Return the table as the controller takes it."""
        parts = (self.draft_seconds, self.verify_seconds, self.catch_up_seconds)
        return Costs(*(jnp.asarray(part, jnp.float32) for part in parts), force=jnp.int32(-1))


def costs_for(
    program: Program, params: dict[str, Params], key: dict[str, Any], *, longest: int, sampling: SamplingParams
) -> Costs:
    """Return the costs kept for a key; where there are none, measure briefly, keep that, and warn.

    Args:
        program: with the automatic controller.
        params: ``{"target": ..., "draft": ...}``.
        key: from ``key_of``.
        longest: as the rows' engine takes it, so that nothing is compiled twice.
        sampling: as the rows sample.
    """
    table = read(key)
    if table is None:
        table = measure(program, params, key, longest=longest, sampling=sampling, rounds=BRIEF_ROUNDS)
        kept = write(table)
        warnings.warn(
            f"gamma auto: no costs were known for this pair on this machine at batch size {key['batch_size']}; they "
            "were measured briefly"
            + ("" if kept else " and could not be kept")
            + ". 'specjax tune' measures them well.",
            TuneWarning,
            stacklevel=3,
        )
    return table.costs()


def tune(
    pair: Pair,
    *,
    batch_size: int,
    rule: str = "greedy",
    width: int | None = None,
    rounds: int = ROUNDS,
    longest: int = 512,
) -> CostTable:
    """Measure a pair as ``generate(pair, gamma="auto")`` runs it; ``write`` keeps the table.

    Args:
        pair: target and draft.
        batch_size: rows at once.
        rule: the name of the rule; other rules than greedy are measured at temperature 1.
        width: the one width, or None for those that "auto" chooses among.
        rounds: that each number stands on.
        longest: tokens of the longest row.

    Raises:
        UsageError: an unknown rule.
    """
    target = pair.target
    chosen = plan(AUTO, None, pair.draft.name, width, target.dtype)
    program = Program(
        target.program_fn, pair.draft.drafter, rule=rule_for(rule), gamma=chosen.gamma, vocab_size=target.num_logits,
        width=chosen.widths, exact=chosen.exact, controller=chosen.controller,
    )  # fmt: skip
    params = {"target": target.params, "draft": pair.draft.params}
    key = key_of(params, pair.draft.kind, rule, batch_size, chosen.widths)
    sampling = SamplingParams(temperature=0.0 if rule == "greedy" else 1.0)
    return measure(program, params, key, longest=longest, sampling=sampling, rounds=rounds)


def key_of(params: dict[str, Params], draft: str, rule: str, batch_size: int, widths: Sequence[int]) -> dict[str, Any]:
    """Return what a table's costs depend on."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "num_cpus": os.cpu_count(),
        "target": _shapes(params["target"]),
        "draft": f"{draft} {_shapes(params['draft'])}",
        "rule": rule,
        "batch_size": batch_size,
        "widths": list(widths),
    }


def _shapes(params: Params) -> str:
    """Return a digest of parameters' names, shapes and dtypes: not of their values, which cost nothing."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    words = [f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}" for path, leaf in leaves]
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:16]


def path_of(key: dict[str, Any]) -> Path:
    """Return where the table of a key is kept."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "costs" / f"{name}.json"


def read(key: dict[str, Any]) -> CostTable | None:
    """Return the table kept for a key, or None; a file that is not one counts as none."""
    try:
        table = msgspec.json.decode(path_of(key).read_bytes(), type=CostTable)
    except (OSError, msgspec.DecodeError):
        return None
    return table if table.key == key else None


def write(table: CostTable) -> bool:
    """Keep a table; False where the cache folder cannot be written."""
    path = path_of(table.key)
    part = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
        part.replace(path)
    except OSError:
        return False
    return True


def measure(
    program: Program,
    params: dict[str, Params],
    key: dict[str, Any],
    *,
    longest: int,
    sampling: SamplingParams,
    rounds: int = ROUNDS,
) -> CostTable:
    """Time single rounds, those with different numbers of draft steps in turns.

    Raises:
        ValueError: ``longest`` leaves no room for a round.
    """
    gamma, widths = program.gamma, program.widths
    if longest < 3:
        raise ValueError(f"longest is {longest}; expected at least 3 tokens to time a round in.")
    timer = RoundTimer(program, params, key["batch_size"], longest, sampling)
    asked = sorted({0, min(1, gamma), *(min(width - 1, gamma) for width in widths),
                    *(min(width, gamma) for width in widths)})  # fmt: skip
    seconds: dict[int, list[float]] = {d: [] for d in asked}
    drafted = {d: timer.run(d).drafted for d in asked}
    for _ in range(rounds):
        for d in asked:
            seconds[d].append(timer.run(d).seconds)
    medians = {d: statistics.median(values) for d, values in seconds.items()}
    width_of = {d: int(np.searchsorted(widths, drafted[d] + 1)) for d in asked}
    fixed = _call_seconds(timer, rounds)
    # Of a tiny model a call costs more than a round: noise must not make the round free.
    apart = {d: max(value - fixed, _LEAST_SHARE * value) for d, value in medians.items()}
    step, verify = _fit(apart, width_of, len(widths), free=program.drafter.free)
    catch_up = 0.0
    if timer.has_cache and gamma and timer.lag > 0:
        late = statistics.median(timer.run(1, behind=timer.lag).seconds for _ in range(rounds))
        catch_up = max(late - medians[1], 0.0) / timer.lag
    return CostTable(
        key=key,
        widths=list(widths),
        draft_seconds=[step * d for d in range(gamma + 1)],
        verify_seconds=verify,
        catch_up_seconds=catch_up,
        rounds=rounds,
    )


def _call_seconds(timer: RoundTimer, repeats: int) -> float:
    """Return what a call of the loop costs besides its rounds: a chunk has many, these calls have one."""
    calls = [(timer.run(0), timer.run(0, rounds=SEVERAL)) for _ in range(repeats)]
    one, several = (statistics.median(call.seconds for call in side) for side in zip(*calls, strict=True))
    return max(one - per_round(one, several, calls[0][1].rounds), 0.0)


def _fit(
    seconds: dict[int, float], width_of: dict[int, int], num_widths: int, *, free: bool = False
) -> tuple[float, list[float]]:
    """Return seconds per draft step, and of the rest of a round at each width, by least squares.

    Noise must not make a wider step look cheaper, nor a draft step less than free. A width that no round had costs what
    the next smaller one does.
    """
    found = sorted(set(width_of.values()))
    rows = [[float(d), *(float(width_of[d] == i) for i in found)] for d in seconds]
    solution = np.linalg.lstsq(np.asarray(rows), np.asarray(list(seconds.values())), rcond=None)[0]
    step = 0.0 if free else max(float(solution[0]), 0.0)
    rest = {i: float(np.mean([value - step * d for d, value in seconds.items() if width_of[d] == i])) for i in found}
    verify, least = [], rest[found[0]]
    for i in range(num_widths):
        least = max(least, rest.get(i, least))
        verify.append(least)
    return step, verify
