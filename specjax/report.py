"""What is made of a bench's JSON: a CSV, a comparison of two, and one HTML page with plots (extra: bench)."""

from __future__ import annotations

import csv
import html
import io
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Report = dict[str, Any]

COLUMNS = (
    "gamma", "side", "run", "seconds", "prefill_seconds", "decode_seconds", "num_tokens", "tokens_per_second",
    "decode_tokens_per_second",
)  # fmt: skip
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#1b1b1b}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #ddd}
figure{margin:1.5rem 0}figcaption{color:#555;font-size:.9rem}svg{max-width:100%;height:auto}
.first{font-size:1.25rem}small{color:#555}
"""


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
    return report


def to_csv(report: Report) -> str:
    """Return every timed run as a line; the columns are COLUMNS."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in report["results"]:
        for side in ("plain", "speculative"):
            for number, run in enumerate(result[side]["runs"], 1):
                writer.writerow({"gamma": result["gamma"], "side": side, "run": number, **run})
    return out.getvalue()


def compare(old: Report, new: Report) -> list[dict[str, Any]]:
    """Return, for each gamma that both have, the figures of both and what became of them.

    The verdict is "same" where the spans of the runs overlap, else "faster" or "slower".

    Raises:
        UsageError: they have no gamma in common.
    """
    found = []
    before = {str(result["gamma"]): result for result in old["results"]}
    for result in new["results"]:
        gamma = str(result["gamma"])
        if gamma not in before:
            continue
        for name, pick in _COMPARED.items():
            a, b = pick(before[gamma]), pick(result)
            if a is None or b is None:
                continue
            verdict = "faster" if b["min"] > a["max"] else "slower" if b["max"] < a["min"] else "same"
            change = b["median"] / a["median"]
            found.append({"gamma": gamma, "figure": name, "old": a, "new": b, "change": change, "verdict": verdict})
    if not found:
        raise UsageError(f"The reports have no gamma in common: {sorted(before)} and {_gammas(new)}.")
    return found


_COMPARED: dict[str, Callable[[dict[str, Any]], dict[str, float] | None]] = {
    "plain, tokens/s": lambda result: result["plain"]["tokens_per_second"],
    "speculative, tokens/s": lambda result: result["speculative"]["tokens_per_second"],
    "ratio, whole call": lambda result: result["ratio"],
    "ratio, decoding": lambda result: result["decode_ratio"],
}


def require_plots() -> None:
    """Raise UsageError where the library that draws is not installed; before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--html needs matplotlib: install 'specjax[bench]'.") from error


def to_html(report: Report) -> str:
    """Return one self-contained page: what was measured, the figures, and plots that need no other file."""
    require_plots()
    settings, here = report["settings"], report["environment"]
    plots = [
        ("Speed against plain decoding", _plot_ratio, "Median and span of the runs; 1 is plain decoding."),
        ("Tokens per second", _plot_rates, "Both sides, whole calls: a speed-up over a slow yardstick is none."),
        ("Acceptance by position", _plot_acceptance, "Share of rounds in which this draft and all before it stood."),
        ("Where the time goes", _plot_time, "Seconds of a whole call, median run."),
    ]
    if len({prompt["category"] for prompt in report["prompts"]} - {None}) > 1:
        plots.append(("By category", _plot_categories, "Tokens a round, means over prompts, at the best draft length."))
    figures = "\n".join(
        f"<figure><h2>{html.escape(title)}</h2>{_svg(draw, report)}"
        f"<figcaption>{html.escape(words)}</figcaption></figure>"
        for title, draw, words in plots
    )
    about = (
        f"target {settings['target']}, draft {settings['draft']}, {here['dtype']}, {len(report['prompts'])} prompts, "
        f"batch size {settings['batch_size']}, temperature {settings['temperature']:g}"
    )
    machine = (
        f"jax {here['jax']}, {here['num_devices']} x {here['device']} ({here['processor']}, {here['num_cpus']} CPU)"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>specjax bench</title>'
        f"<style>{_STYLE}</style></head><body><h1>Speculative against plain decoding</h1>"
        f'<p class="first">{html.escape(headline(report))}</p><p>{html.escape(about)}<br><small>{html.escape(machine)}'
        f"</small></p>{_table(report)}{figures}</body></html>\n"
    )


def headline(report: Report) -> str:
    """Return the report in one sentence."""
    best = _best(report)
    ratio = best["ratio"]
    if ratio is None:
        return "No tokens were generated."
    words = "faster than" if ratio["median"] > 1 else "slower than, or as slow as,"
    plain, fast = (best[side]["tokens_per_second"]["median"] for side in ("plain", "speculative"))
    return (
        f"At best {ratio['median']:.2f} times as fast, {words} plain decoding: {fast:.1f} tokens/s for {plain:.1f}, "
        f"at gamma {best['gamma']}."
    )


def _best(report: Report) -> dict[str, Any]:
    return max(report["results"], key=lambda result: (result["ratio"] or {"median": 0.0})["median"])


def _gammas(report: Report) -> list[str]:
    return [str(result["gamma"]) for result in report["results"]]


def _table(report: Report) -> str:
    heads = ("gamma", "plain, tokens/s", "speculative, tokens/s", "ratio, whole", "ratio, decoding", "mean length",
             "acceptance", "equal to plain")  # fmt: skip
    rows = []
    for result in report["results"]:
        equality = result["equality"]
        cells = (
            str(result["gamma"]),
            *(_span(result[side]["tokens_per_second"], 1) for side in ("plain", "speculative")),
            *(_span(result[name], 2) for name in ("ratio", "decode_ratio")),
            *(_number(result[name]) for name in ("mean_acceptance_length", "acceptance_rate")),
            f"{equality['num_equal']}/{equality['num_compared']}" if equality["num_compared"] else "in law",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _span(values: dict[str, float] | None, places: int) -> str:
    if values is None:
        return "-"
    return f"{values['median']:.{places}f} ({values['min']:.{places}f} to {values['max']:.{places}f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _svg(draw: Callable[[Axes, Report], None], report: Report) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    draw(figure.add_subplot(), report)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out)
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML head, to stand inside a page


def _errors(values: Sequence[dict[str, float]]) -> list[list[float]]:
    return [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]


def _plot_ratio(axes: Axes, report: Report) -> None:
    for name, label in (("ratio", "whole call"), ("decode_ratio", "decoding")):
        known = [(str(r["gamma"]), r[name]) for r in report["results"] if r[name] is not None]
        values = [value for _, value in known]
        axes.errorbar([gamma for gamma, _ in known], [v["median"] for v in values], yerr=_errors(values), fmt="o-",
                      capsize=4, label=label)  # fmt: skip
    axes.axhline(1.0, color="0.5", linestyle="--")
    axes.set(xlabel="drafted tokens a round", ylabel="times as fast as plain")
    axes.legend()


def _plot_rates(axes: Axes, report: Report) -> None:
    _bars(axes, report, {
        side: [(result[side]["tokens_per_second"] or {"median": 0.0})["median"] for result in report["results"]]
        for side in ("plain", "speculative")
    })  # fmt: skip
    axes.set(xlabel="drafted tokens a round", ylabel="tokens/s")


def _bars(axes: Axes, report: Report, groups: dict[str, list[float]]) -> None:
    labels = _gammas(report)
    for i, (name, values) in enumerate(groups.items()):
        axes.bar([x + (i - 0.5) * 0.38 for x in range(len(labels))], values, width=0.36, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.legend()


def _plot_acceptance(axes: Axes, report: Report) -> None:
    for result in report["results"]:
        rates = [rate or 0.0 for rate in result["acceptance_per_position"]]
        axes.plot(range(1, len(rates) + 1), rates, "o-", label=f"gamma {result['gamma']}")
    axes.set(xlabel="position in the block", ylabel="accepted", ylim=(0, 1.02))
    axes.legend()


def _plot_time(axes: Axes, report: Report) -> None:
    names = [f"{result['gamma']}\n{side}" for result in report["results"] for side in ("plain", "spec.")]
    runs = [result[side]["runs"] for result in report["results"] for side in ("plain", "speculative")]
    parts = {
        part: [statistics.median(run[f"{part}_seconds"] for run in each) for each in runs]
        for part in ("prefill", "decode")
    }
    whole = [statistics.median(run["seconds"] for run in each) for each in runs]
    parts["the rest"] = [max(0.0, w - p - d) for w, p, d in zip(whole, *parts.values(), strict=True)]
    below = [0.0] * len(names)
    for part, values in parts.items():
        axes.bar(names, values, bottom=below, label=part, width=0.6)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes.set(ylabel="seconds")
    axes.legend()


def _plot_categories(axes: Axes, report: Report) -> None:
    kinds = {prompt["id"]: prompt["category"] or "none" for prompt in report["prompts"]}
    lengths: dict[str, list[float]] = defaultdict(list)
    for row in _best(report)["rows"]:
        if row["mean_acceptance_length"] is not None:
            lengths[kinds[row["id"]]].append(row["mean_acceptance_length"])
    names = sorted(lengths)
    axes.barh(names, [statistics.mean(lengths[name]) for name in names])
    axes.set(xlabel="tokens a round")
