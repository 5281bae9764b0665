"""Plain against speculative decoding on given prompts: measured, alternated, compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxlib import version as jaxlib_version

from specjax import stats
from specjax.api import Output, generate
from specjax.errors import UsageError
from specjax.pair import Model, Pair, no_draft
from specjax.requests import as_rows, prompt_ids
from specjax.rows import BadRow, Row, parse_rows
from specjax.speculation import DEFAULT_GAMMA, Gamma

SCHEMA = 1
SIDES = ("plain", "speculative")


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One prompt to measure on.

    Attributes:
        row: as ``specjax.generate`` takes it.
        category: of the task, where the file names one.
    """

    row: Row
    category: str | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed call over all prompts.

    Attributes:
        seconds: of the whole call.
        prefill, decode: seconds spent in each, the device waited for.
        outputs: what came out.
    """

    seconds: float
    prefill: float
    decode: float
    outputs: list[Output]

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(out.ids) for out in self.outputs)

    def record(self) -> dict[str, Any]:
        """Return the run as the report has it."""
        return {
            "seconds": self.seconds,
            "prefill_seconds": self.prefill,
            "decode_seconds": self.decode,
            "num_tokens": self.num_tokens,
            "tokens_per_second": _per_second(self.num_tokens, self.seconds),
            "decode_tokens_per_second": _per_second(self.num_tokens, self.decode),
        }


def read_prompts(path: str | Path, target: Model) -> list[BenchPrompt]:
    """Read prompts: rows as ``generate --input`` takes them, or lines of Spec-Bench.

    A line with ``turns`` is Spec-Bench's: its first turn is a chat message (raw text where the model has no
    template), its ``question_id`` the id.

    Raises:
        UsageError: the file cannot be read, or a line is not a prompt.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"Cannot read the prompts {path}: {error.strerror}.") from error
    chat = target.tokenizer is not None and target.tokenizer.has_template
    categories: dict[int, str | None] = {}
    for i, line in enumerate(lines):
        try:
            question = json.loads(line)
            turns = question["turns"]
            first = turns[0]
        except (ValueError, KeyError, TypeError, IndexError):
            continue  # a row of ours, or a line whose fault the rows' own reader names
        form = {"messages": [{"role": "user", "content": first}]} if chat else {"prompt": first}
        lines[i] = json.dumps({"id": question.get("question_id", i + 1), **form}).encode()
        categories[i + 1] = question.get("category")
    return [BenchPrompt(row, categories.get(row.line)) for row in _good(parse_rows(b"\n".join(lines), str(path)))]


def from_texts(texts: Sequence[str], target: Model, *, raw: bool = False) -> list[BenchPrompt]:
    """Return texts as prompts; ``raw`` without the chat template."""
    return [BenchPrompt(row) for row in _good(as_rows(list(texts), target, raw=raw))]


def _good(rows: Iterable[Row | BadRow]) -> list[Row]:
    good = []
    for row in rows:
        if isinstance(row, BadRow):
            raise UsageError(f"A prompt cannot be used: {row.message}")
        good.append(row)
    return good


def bench(
    pair: Pair,
    prompts: Sequence[BenchPrompt],
    *,
    gammas: Sequence[Gamma] = (),
    repeats: int = 5,
    on_run: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure plain and speculative decoding in turns, for each gamma.

    For each gamma: a warm-up of each side compiles, then ``repeats`` pairs of runs follow, plain first. Plain is the
    same program without a draft.

    Args:
        pair: target and draft; its draft must be usable.
        prompts: what to decode in every run.
        gammas: draft lengths, "auto" among them; default the pair's, else 4.
        repeats: pairs of runs.
        on_run: called with a few words before each run.
        **options: of ``specjax.generate``, for both sides.

    Returns:
        The report, as docs/command-line.md describes it, without what only the caller knows.

    Raises:
        UsageError: no draft, no prompt, a gamma below 1, or a prompt that fails.

    Example:
        report = bench(pair, from_texts(["Count to ten."], pair.target), gammas=[2, 4], max_new_tokens=64)
    """
    gammas = list(dict.fromkeys(gammas)) or [DEFAULT_GAMMA if pair.gamma is None else pair.gamma]
    if pair.draft.name == "none":
        raise UsageError("There is no draft to measure: give --draft.")
    if not prompts:
        raise UsageError("There is no prompt to measure on.")
    if low := [gamma for gamma in gammas if isinstance(gamma, int) and gamma < 1]:
        raise UsageError(f"gamma is {low[0]}; expected at least 1: plain decoding is always measured beside it.")
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; expected at least 1.")
    options = {"batch_size": 1, **options, "require_draft": True}
    pairs = {"plain": dataclasses.replace(pair, draft=no_draft()), "speculative": pair}
    given = {side: dict(options) for side in SIDES}
    if "sampling" in options:
        given["plain"]["sampling"] = options["sampling"].without_draft
    rows = [prompt.row for prompt in prompts]
    say = on_run or (lambda words: None)
    results = []
    warm_ups: dict[tuple[str, Gamma], Run] = {}
    for gamma in gammas:
        lengths: dict[str, Gamma] = {"plain": 0, "speculative": gamma}
        for side in SIDES:
            if (side, lengths[side]) not in warm_ups:
                say(f"gamma {gamma}: compiling ({side})")
                warm_ups[side, lengths[side]] = timed(pairs[side], rows, gamma=lengths[side], **given[side])
        runs: dict[str, list[Run]] = {side: [] for side in SIDES}
        for number, side in itertools.product(range(repeats), SIDES):
            say(f"gamma {gamma}: run {number + 1} of {repeats} ({side})")
            runs[side].append(timed(pairs[side], rows, gamma=lengths[side], **given[side]))
        warm_up = {side: warm_ups[side, lengths[side]] for side in SIDES}
        results.append(_result(gamma, warm_up, runs, prompts, options))
    return {
        "schema": SCHEMA,
        "environment": environment(pair.target.dtype),
        "prompts": [_prompt_record(prompt, pair.target) for prompt in prompts],
        "results": results,
    }


def timed(pair: Pair, rows: Sequence[Row], **options: Any) -> Run:
    """Run one call and time it.

    Raises:
        UsageError: a row failed.
    """
    spent = {"prefill": 0.0, "decode": 0.0}

    def on_seconds(stage: str, seconds: float) -> None:
        spent[stage] += seconds

    began = time.perf_counter()
    outputs = generate(pair, rows, on_seconds=on_seconds, **options)
    seconds = time.perf_counter() - began
    if failed := next((out for out in outputs if out.error is not None), None):
        raise UsageError(f"Prompt {failed.id!r} failed: {failed.error}")
    return Run(seconds, spent["prefill"], spent["decode"], outputs)


def environment(dtype: str) -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib_version.__version__,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "dtype": dtype,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _prompt_record(prompt: BenchPrompt, target: Model) -> dict[str, Any]:
    return {"id": prompt.row.id, "category": prompt.category, "num_tokens": len(prompt_ids(prompt.row, target))}


def _result(
    gamma: Gamma,
    warm_up: dict[str, Run],
    runs: dict[str, list[Run]],
    prompts: Sequence[BenchPrompt],
    options: dict[str, Any],
) -> dict[str, Any]:
    total = stats.merge_stats(out.stats for out in runs["speculative"][-1].outputs)
    return {
        "gamma": gamma,
        **{side: _side(warm_up[side], runs[side]) for side in SIDES},
        "ratio": _ratio(runs, "tokens_per_second"),
        "decode_ratio": _ratio(runs, "decode_tokens_per_second"),
        "mean_acceptance_length": total["mean_acceptance_length"],
        "acceptance_rate": total["draft_acceptance_rate"],
        "acceptance_per_position": stats.unconditional_rates(total),
        "conditional_acceptance_per_position": stats.conditional_rates(total),
        "tokens_per_target_pass": stats.tokens_per_target_pass(total),
        "stats": total,
        "equality": _equality(prompts, runs["plain"][-1].outputs, runs["speculative"][-1].outputs, options),
        "rows": [
            {"id": out.id, "num_tokens": len(out.ids), "finish_reason": out.finish_reason,
             "mean_acceptance_length": out.stats["mean_acceptance_length"],
             "acceptance_rate": out.stats["draft_acceptance_rate"]}
            for out in runs["speculative"][-1].outputs
        ],
    }  # fmt: skip


def _side(warm_up: Run, runs: list[Run]) -> dict[str, Any]:
    records = [run.record() for run in runs]
    seconds = [run.seconds for run in runs]
    return {
        "compile_seconds": max(0.0, warm_up.seconds - statistics.median(seconds)),
        **{
            name: spread([record[name] for record in records])
            for name in ("tokens_per_second", "decode_tokens_per_second", "seconds", "prefill_seconds")
        },
        "runs": records,
    }


def _ratio(runs: dict[str, list[Run]], name: str) -> dict[str, float] | None:
    """Compare the runs that stood side by side."""
    rates = [[run.record()[name] for run in runs[side]] for side in SIDES]
    return spread([fast / slow if slow and fast is not None else None for slow, fast in zip(*rates, strict=True)])


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return median, min and max; None when a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _equality(
    prompts: Sequence[BenchPrompt], plain: list[Output], speculative: list[Output], options: dict[str, Any]
) -> dict[str, Any]:
    """Compare the ids of greedy rows; others are equal in law only."""
    sampling = options.get("sampling")
    default = 0.0 if sampling is None else sampling.temperature
    compared, divergences = 0, []
    for prompt, ours, theirs in zip(prompts, plain, speculative, strict=True):
        if (default if prompt.row.temperature is None else prompt.row.temperature) > 0:
            continue
        compared += 1
        pairs = itertools.zip_longest(ours.ids, theirs.ids)
        if first := next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None):
            divergences.append({"id": ours.id, "position": first[0], "plain": first[1], "speculative": first[2]})
    return {"num_compared": compared, "num_equal": compared - len(divergences), "divergences": divergences}
