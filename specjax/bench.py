"""Plain against speculative decoding on given prompts: measured, alternated, compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxlib import version as jaxlib_version

from specjax.api import Output, generate
from specjax.bench_result import SIDES, BenchPrompt, Record, category_speeds, latency_result, predicted, result
from specjax.errors import RowError, UsageError
from specjax.pair import Model, Pair, no_draft
from specjax.requests import as_rows, prompt_ids
from specjax.rows import BadRow, Row, parse_rows
from specjax.speculation import AUTO, DEFAULT_GAMMA, Gamma

MORE = ("latency", "parts", "analytic")


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
    more: Collection[str] = (),
    on_run: Callable[[str], None] | None = None,
    kept: MutableMapping[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Measure plain and speculative decoding in turns, for each gamma.

    For each gamma: a warm-up of each side compiles, then ``repeats`` pairs of runs follow, plain first. Plain is the
    same program without a draft.

    Args:
        pair: target and draft; its draft must be usable.
        prompts: what to decode in every run.
        gammas: draft lengths, "auto" among them; default the pair's, else 4.
        repeats: pairs of runs.
        more: of MORE, what else to measure: "latency", one run of each side that looks after each round; "parts",
            what drafting, verification and the rest of a round cost, and memory; "analytic", the sum of min(p, q) at
            each drafted position, in one more run round by round.
        on_run: called with a few words before each run.
        kept: what was measured, by name, as JSON has it; what it holds already is not measured again.
        **options: of ``specjax.generate``, for both sides.

    Returns:
        One result for each gamma, as docs/bench.md describes it, without what only the caller knows.

    Raises:
        UsageError: no draft, no prompt, a gamma below 1, or a prompt that fails.

    Example:
        bench(pair, from_texts(["Count to ten."], pair.target), gammas=[2, 4], max_new_tokens=64)
    """
    gammas = lengths_of(gammas, pair)
    if pair.draft.name == "none":
        raise UsageError("There is no draft to measure: give --draft.")
    if not prompts:
        raise UsageError("There is no prompt to measure on.")
    if low := [gamma for gamma in gammas if isinstance(gamma, int) and gamma < 1]:
        raise UsageError(f"gamma is {low[0]}; expected at least 1: plain decoding is always measured beside it.")
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; expected at least 1.")
    options = {"batch_size": 1, **options, "require_draft": True}
    table = _Table(pair, [prompt.row for prompt in prompts], options, {} if kept is None else kept, on_run)
    results = []
    for gamma in gammas:
        runs: dict[str, list[Record]] = {side: [] for side in SIDES}
        for side in SIDES:
            table.warm(side, gamma)
        for number, side in itertools.product(range(repeats), SIDES):
            runs[side].append(table.run(side, gamma, number, repeats))
        compiled = {side: table.first_seconds(side, gamma) for side in SIDES}
        found = result(gamma, compiled, runs, prompts, default_temperature(options))
        if "latency" in more:
            looks = {side: table.latency(side, gamma) for side in SIDES}
            found["latency"] = latency_result(looks)
            for kind, speeds in category_speeds(looks, prompts).items():
                found["categories"][kind] |= speeds
        if "analytic" in more:
            found["analytic_acceptance_per_position"] = table.analytic(gamma, found)
        if "parts" in more and isinstance(gamma, int):
            found["parts"] = table.parts(gamma, found)
        results.append(found)
    return results


def lengths_of(gammas: Sequence[Gamma], pair: Pair) -> list[Gamma]:
    """Return the draft lengths to measure."""
    return list(dict.fromkeys(gammas)) or [DEFAULT_GAMMA if pair.gamma is None else pair.gamma]


def num_runs(gammas: Sequence[Gamma], repeats: int, more: Collection[str] = ()) -> int:
    """Return how often ``bench`` calls ``on_run`` where nothing is kept."""
    per_gamma = 1 + 2 * repeats + ("latency" in more) + ("analytic" in more)
    return 1 + ("latency" in more) + sum(per_gamma + ("parts" in more and gamma != AUTO) for gamma in gammas)


def given_to(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each side: plain decoding has no draft to have settings of its own."""
    given = {side: dict(options) for side in SIDES}
    if "sampling" in options:
        given["plain"]["sampling"] = options["sampling"].without_draft
    return given


def default_temperature(options: dict[str, Any]) -> float:
    """Return the temperature of rows that name none."""
    sampling = options.get("sampling")
    return 0.0 if sampling is None else sampling.temperature


class _Table:
    """What is measured of one pair with one set of options: each thing once, kept by name."""

    def __init__(
        self, pair: Pair, rows: list[Row], options: dict[str, Any], kept: MutableMapping[str, Any], on_run: Any
    ):
        self._pairs = {"plain": dataclasses.replace(pair, draft=no_draft()), "speculative": pair}
        self._rows, self._options, self._kept = rows, options, kept
        self._given = given_to(options)
        self._say = on_run or (lambda words: None)
        self._warm: set[str] = set()

    def warm(self, side: str, gamma: Gamma) -> None:
        """Compile, where a run of the same name is not kept."""
        self._once(f"{self._name(side, gamma)} first", f"gamma {gamma}: compiling ({side})",
                   lambda: self._timed(side, gamma))  # fmt: skip

    def first_seconds(self, side: str, gamma: Gamma) -> float:
        """Return what the run took that compiled."""
        return self._kept[f"{self._name(side, gamma)} first"]["seconds"]

    def run(self, side: str, gamma: Gamma, number: int, repeats: int) -> Record:
        """Return a timed run; plain ones stand beside their gamma's."""
        words = f"gamma {gamma}: run {number + 1} of {repeats} ({side})"

        return self._once(f"{side} beside {gamma} run {number}", words, lambda: self._timed(side, gamma, warm=True))

    def latency(self, side: str, gamma: Gamma) -> list[Record]:
        """Return when each row's tokens reached the host, looked at after each round."""
        return self._once(
            f"{self._name(side, gamma)} latency",
            f"gamma {gamma}: latency ({side})",
            lambda: latencies(self._pairs[side], self._rows, **self._of(side, gamma, warm=True)),
        )

    def analytic(self, gamma: Gamma, found: Record) -> list[float | None] | None:
        """Return the mean of sum min(p, q) at each position, where it was reached; None at several widths."""
        hot = default_temperature(self._options) > 0 or any(row.temperature for row in self._rows)
        if not hot:  # p is one-hot, so the sum is 1 where the draft is accepted and 0 elsewhere
            return found["conditional_acceptance_per_position"]
        if gamma == AUTO and self._options.get("width") is None:
            return None  # such rounds cannot be traced
        return self._once(
            f"{self._name('speculative', gamma)} analytic",
            f"gamma {gamma}: sum of min(p, q)",
            lambda: analytic(self._pairs["speculative"], self._rows, **self._of("speculative", gamma)),
        )

    def parts(self, gamma: int, found: Record) -> Record:
        """Return what a round is made of."""
        from specjax.bench_parts import measure_parts

        measured = self._once(
            f"{self._name('speculative', gamma)} parts",
            f"gamma {gamma}: parts of a round",
            lambda: measure_parts(self._pairs, self._rows, gamma, self._given),
        )
        return {**measured, "predicted_ratio": predicted(measured, found["stats"])}

    def _once(self, name: str, words: str, measure: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._say(words)
            self._kept[name] = measure()
        return self._kept[name]

    def _timed(self, side: str, gamma: Gamma, *, warm: bool = False) -> Record:
        return timed(self._pairs[side], self._rows, **self._of(side, gamma, warm=warm))

    def _of(self, side: str, gamma: Gamma, *, warm: bool = False) -> dict[str, Any]:
        """Return the options of a run; where ``warm``, after one in this process that compiled."""
        name = self._name(side, gamma)
        if warm and name not in self._warm:
            self._timed(side, gamma)
        self._warm.add(name)
        return self._given[side] | {"gamma": 0 if side == "plain" else gamma}

    @staticmethod
    def _name(side: str, gamma: Gamma) -> str:
        return side if side == "plain" else f"{side} {gamma}"


def timed(pair: Pair, rows: Sequence[Row], **options: Any) -> Record:
    """Run one call and time it.

    Returns:
        ``seconds`` of the whole call, ``prefill_seconds`` and ``decode_seconds`` (the device waited for), ``rows``:
        ``id``, ``ids``, ``finish_reason``, ``stats``.

    Raises:
        UsageError: a row failed.
    """
    spent = {"prefill": 0.0, "decode": 0.0}

    def on_seconds(stage: str, seconds: float) -> None:
        spent[stage] += seconds

    began = time.perf_counter()
    outputs = generate(pair, rows, on_seconds=on_seconds, **options)
    seconds = time.perf_counter() - began
    _refuse_failures(outputs)
    return {
        "seconds": seconds,
        **{f"{stage}_seconds": value for stage, value in spent.items()},
        "rows": [
            {"id": out.id, "ids": out.ids, "finish_reason": out.finish_reason, "stats": out.stats} for out in outputs
        ],
    }


def latencies(pair: Pair, rows: Sequence[Row], **options: Any) -> list[Record]:
    """Run one call, looking at the rows after each round, and note when tokens reach the host.

    Returns:
        Per row ``id``, ``seconds`` [N] since the row was taken up (before its prefill), and ``num_tokens`` [N] that
        came with each look that brought some.
    """
    clocks: dict[Any, float] = {}
    seconds: dict[Any, list[float]] = {row.id: [] for row in rows}
    counts: dict[Any, list[int]] = {row.id: [] for row in rows}

    def on_ids(row_id: Any, sample: int, ids: list[int]) -> None:
        now = time.perf_counter()
        if not ids:
            clocks[row_id] = now
            return
        seconds[row_id].append(now - clocks[row_id])
        counts[row_id].append(len(ids))

    _refuse_failures(generate(pair, rows, on_ids=on_ids, **{**options, "chunk": 1}))
    return [{"id": row.id, "seconds": seconds[row.id], "num_tokens": counts[row.id]} for row in rows]


def analytic(pair: Pair, rows: Sequence[Row], **options: Any) -> list[float | None]:
    """Return the mean of sum min(p, q) at each drafted position, over the rounds that reached it."""
    sums: dict[int, list[float]] = {}

    def on_round(record: dict[str, Any]) -> None:
        for i, draft in enumerate(record["drafts"][: record["num_accepted"] + 1]):
            sums.setdefault(i, []).append(draft["overlap"])

    _refuse_failures(generate(pair, rows, trace=on_round, **options))
    return [statistics.fmean(sums[i]) if i in sums else None for i in range(max(sums, default=-1) + 1)]


def _refuse_failures(outputs: Sequence[Output]) -> None:
    if failed := next((out for out in outputs if out.error is not None), None):
        raise UsageError(f"Prompt {failed.id!r} failed: {failed.error}")


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


def prompt_record(prompt: BenchPrompt, target: Model) -> dict[str, Any]:
    """Return a prompt as the report has it.

    Raises:
        UsageError: it cannot be encoded.
    """
    try:
        count = len(prompt_ids(prompt.row, target))
    except RowError as error:
        raise UsageError(f"Prompt {prompt.row.id!r} failed: {error}") from error
    return {"id": prompt.row.id, "category": prompt.category, "num_tokens": count}
