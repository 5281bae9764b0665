"""What is made of a bench's JSON: a CSV and a comparison of two; ``report_page`` has the page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.errors import UsageError

Report = dict[str, Any]

SCHEMA = 2
SETTING = ("target", "draft", "batch_size", "temperature", "rule", "prompt_tokens")
COLUMNS: tuple[str, ...] = (
    *SETTING, "gamma", "side", "run", "seconds", "prefill_seconds", "decode_seconds", "num_tokens", "tokens_per_second",
    "decode_tokens_per_second",
)  # fmt: skip


def read_report(path: str | Path) -> Report:
    """Read a report that ``specjax bench --output`` wrote.

    Raises:
        UsageError: it cannot be read, or is no such report.
    """
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"Cannot read the report {path}: {error}") from error
    if not isinstance(report, dict) or not {"schema", "settings", "results"} <= set(report):
        raise UsageError(f"{path} is no report of specjax bench: expected the JSON that its --output writes.")
    if report["schema"] != SCHEMA:
        raise UsageError(f"{path} has schema {report['schema']}, this version reads {SCHEMA}: measure again.")
    return report


def to_csv(report: Report) -> str:
    """Return every timed run as a line; the columns are COLUMNS."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in report["results"]:
        where = {name: result[name] for name in SETTING}
        if where["prompt_tokens"] is not None:
            where["prompt_tokens"] = "{}-{}".format(*where["prompt_tokens"])
        for side in ("plain", "speculative"):
            for number, run in enumerate(result[side]["runs"], 1):
                writer.writerow({**where, "gamma": result["gamma"], "side": side, "run": number, **run})
    return out.getvalue()


def setting_of(result: Report, *, pair: bool = True) -> str:
    """Return in words what a result was measured at, gamma left out; without ``pair``, target and draft too."""
    lengths = result["prompt_tokens"]
    return (
        (f"target {result['target']}, draft {result['draft']}, " if pair else "")
        + f"batch size {result['batch_size']}, temperature {result['temperature']:g}, rule {result['rule']}"
        + ("" if lengths is None else ", prompts of {} to {} tokens".format(*lengths))
    )


def by_setting(report: Report) -> dict[str, list[Report]]:
    """Return a report's results in groups that differ in gamma alone, by what they were measured at."""
    groups: dict[str, list[Report]] = {}
    for result in report["results"]:
        groups.setdefault(setting_of(result), []).append(result)
    return groups


def compare(old: Report, new: Report) -> list[dict[str, Any]]:
    """Return, for each setting and gamma that both have, the figures of both and what became of them.

    The verdict is "same" where the spans of the runs overlap, else "faster" or "slower". Reports of one pair each may
    be of two pairs: two drafts are compared so.

    Raises:
        UsageError: they have nothing in common.
    """
    found = []
    several = any(len({(r["target"], r["draft"]) for r in report["results"]}) > 1 for report in (old, new))

    def name_of(result: Report) -> tuple[str, str]:
        return setting_of(result, pair=several), str(result["gamma"])

    before = {name_of(result): result for result in old["results"]}
    for result in new["results"]:
        key = name_of(result)
        if key not in before:
            continue
        for name, pick in _COMPARED.items():
            a, b = pick(before[key]), pick(result)
            if a is None or b is None:
                continue
            verdict = "faster" if b["min"] > a["max"] else "slower" if b["max"] < a["min"] else "same"
            change = b["median"] / a["median"]
            where = {"setting": key[0], "gamma": key[1], "figure": name}
            found.append({**where, "old": a, "new": b, "change": change, "verdict": verdict})
    if not found:
        here = [", ".join(sorted({f"{s} at gamma {g}" for s, g in map(name_of, r["results"])})) for r in (old, new)]
        raise UsageError(f"The reports have no setting and gamma in common: {here[0]}; and {here[1]}.")
    return found


_COMPARED: dict[str, Callable[[dict[str, Any]], dict[str, float] | None]] = {
    "plain, tokens/s": lambda result: result["plain"]["tokens_per_second"],
    "speculative, tokens/s": lambda result: result["speculative"]["tokens_per_second"],
    "ratio, whole call": lambda result: result["ratio"],
    "ratio, decoding": lambda result: result["decode_ratio"],
}
