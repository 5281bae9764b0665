"""The plots of a bench's page, as SVG. Matplotlib draws them; nothing else of the package imports this."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from specjax.report import Report, by_setting, setting_of
from specjax.report_page import best_of

SIDES = ("plain", "speculative")
_COLOURS = {"plain": "#7f7f7f", "speculative": "#1f77b4"}


def plots_of(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Yield each plot that the report has figures for: a name, a title, the SVG, and words below it."""
    measured = [result for result in report["results"] if result.get("parts")]
    late = any("latency" in result for result in report["results"])
    plots = [
        ("speed-up", "Speed against plain decoding", _ratio, True,
         "Decoding, without prefill: median and span of the runs. Dashed: as fast as plain. Crosses: what the cost "
         "model predicts from the parts of a round, measured apart, and the acceptance."),
        ("rates", "Tokens per second", _rates, True,
         "Both sides, whole calls: a speed-up over a slow yardstick is none."),
        ("acceptance", "Acceptance by position", _acceptance, True,
         "Of the longest drafts of each setting. Solid: share of rounds in which this draft and all before it stood. "
         "Dotted: of those that reached it. Crosses: the mean of the sum of min(p, q) there, which the rejection rule "
         "accepts with."),
        ("latency", "Latency", _latency, late,
         "From a row's being taken up to its first token; and from one look that brought it tokens to the next, a "
         "look after each round. Bars: P50, P95 and P99."),
        ("time", "Where the time of a round goes", _time, bool(measured),
         "A plain step beside a speculative round: drafting, the target's step over all drafted rows, and the rest "
         "(the rule, draws, bookkeeping)."),
        ("roofline", "How far a step is from the machine's limit", _roofline, bool(measured and report["machine"]),
         "Each point is one target step: operations for each byte of weights and cache that it must read, against "
         "operations per second. The line is what this machine reads from memory, and multiplies at most, in one large "
         "piece each."),
        ("categories", "By category", _categories, len(best_of(report)["categories"]) > 1,
         "Tokens a round, over all prompts of the category, at the best draft length."),
    ]  # fmt: skip
    for name, title, draw, there, words in plots:
        if there:
            yield name, title, _svg(draw, report), words


def _svg(draw: Callable[[Axes, Report], None], report: Report) -> str:
    figure = Figure(figsize=(8.2, 4.0), layout="constrained")
    draw(figure.add_subplot(), report)
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out)
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML head, to stand inside a page


def _names(report: Report) -> dict[str, str]:
    """Return a short name for each setting: what all have in common left out."""
    firsts = {name: results[0] for name, results in by_setting(report).items()}
    words = {name: setting_of(result).split(", ") for name, result in firsts.items()}
    common = set.intersection(*(set(parts) for parts in words.values()))
    short = {name: ", ".join(part for part in parts if part not in common) for name, parts in words.items()}
    return {name: short[name] or "speculative" for name in words}


def _errors(values: Sequence[dict[str, float]]) -> list[list[float]]:
    return [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]


def _legend(axes: Axes, *, beside: bool = False) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if beside else {}
        axes.legend(handles, labels, fontsize="small", **place)


def _ratio(axes: Axes, report: Report) -> None:
    names = _names(report)
    for mark, (name, results) in zip("osD^v<>" * 8, by_setting(report).items(), strict=False):
        known = [(str(r["gamma"]), r) for r in results if r["decode_ratio"] is not None]
        values = [r["decode_ratio"] for _, r in known]
        lines = axes.errorbar([gamma for gamma, _ in known], [v["median"] for v in values], yerr=_errors(values),
                              fmt=f"{mark}-", capsize=4, label=names[name])  # fmt: skip
        guesses = [(gamma, r["parts"]["predicted_ratio"]) for gamma, r in known if r.get("parts")]
        guesses = [(gamma, value) for gamma, value in guesses if value is not None]
        axes.plot([gamma for gamma, _ in guesses], [value for _, value in guesses], "x", markersize=9,
                  color=lines.lines[0].get_color())  # fmt: skip
    axes.axhline(1.0, color="0.5", linestyle="--")
    axes.set(xlabel="drafted tokens a round", ylabel="times as fast as plain")
    _legend(axes)


def _labels(report: Report) -> list[str]:
    """Return a name for each result: its gamma, and its setting where there are several."""
    names = _names(report)
    several = len(names) > 1
    return [f"γ {r['gamma']}" + (f"\n{names[setting_of(r)]}" if several else "") for r in report["results"]]


def _groups(axes: Axes, report: Report, groups: dict[str, list[float]], width: float = 0.38) -> None:
    labels = _labels(report)
    for i, (name, values) in enumerate(groups.items()):
        places = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(places, values, width=0.95 * width, label=name, color=_COLOURS.get(name))
    axes.set_xticks(range(len(labels)), labels, fontsize="small", rotation=45 if len(labels) > 8 else 0)
    _legend(axes)


def _rates(axes: Axes, report: Report) -> None:
    _groups(axes, report, {
        side: [(result[side]["tokens_per_second"] or {"median": 0.0})["median"] for result in report["results"]]
        for side in SIDES
    })  # fmt: skip
    axes.set(ylabel="tokens/s")


def _acceptance(axes: Axes, report: Report) -> None:
    names = _names(report)
    for name, results in by_setting(report).items():
        longest = max(results, key=lambda result: len(result["acceptance_per_position"]))
        (line,) = _rate_line(axes, longest["acceptance_per_position"], "o-", label=names[name])
        colour = line.get_color()
        _rate_line(axes, longest["conditional_acceptance_per_position"], "o:", color=colour)
        _rate_line(axes, longest.get("analytic_acceptance_per_position") or [], "x", color=colour, markersize=9)
    axes.set(xlabel="position in the block", ylabel="accepted", ylim=(0, 1.05))
    _legend(axes)


def _rate_line(axes: Axes, rates: Sequence[float | None], style: str, **looks: Any) -> Any:
    known = [(place, rate) for place, rate in enumerate(rates, 1) if rate is not None]
    return axes.plot([place for place, _ in known], [rate for _, rate in known], style, **looks)


def _latency(axes: Axes, report: Report) -> None:
    labels, names = _labels(report), ("first_token", "round")
    shades = {"p99": 0.3, "p95": 0.6, "p50": 1.0}
    for i, (side, name) in enumerate(itertools.product(SIDES, names)):
        for percent, shade in shades.items():
            found = [(result.get("latency") or {}).get(side, {}).get(name) for result in report["results"]]
            values = [1e3 * value[percent] if value else 0.0 for value in found]
            places = [x + (i - 1.5) * 0.2 for x in range(len(labels))]
            label = f"{side}, {name.replace('_', ' ')}" if percent == "p50" else None
            axes.bar(places, values, width=0.18, alpha=shade, label=label, color=_COLOURS[side],
                     hatch="//" if name == "round" else None, edgecolor="white")  # fmt: skip
    axes.set_xticks(range(len(labels)), labels, fontsize="small", rotation=45 if len(labels) > 8 else 0)
    axes.set(ylabel="ms", yscale="log")
    _legend(axes, beside=True)


def _time(axes: Axes, report: Report) -> None:
    measured = [(label, r) for label, r in zip(_labels(report), report["results"], strict=True) if r.get("parts")]
    names = ["plain", *(label for label, _ in measured)]
    plain = [result["parts"]["plain"] for _, result in measured]
    below = [0.0] * len(names)
    for part, label in (("draft", "drafting"), ("target", "target's step"), ("other", "the rest")):
        values = [1e3 * statistics.median(each[f"{part}_seconds"] for each in plain)]
        values += [1e3 * result["parts"]["speculative"][f"{part}_seconds"] for _, result in measured]
        axes.bar(range(len(names)), values, bottom=below, label=label, width=0.6)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes.set_xticks(range(len(names)), names, fontsize="small", rotation=45 if len(names) > 8 else 0)
    axes.set(ylabel="ms a round")
    _legend(axes, beside=True)


def _roofline(axes: Axes, report: Report) -> None:
    machine, labels = report["machine"], _labels(report)
    points: dict[str, dict[str, float]] = {}
    for label, result in zip(labels, report["results"], strict=True):
        if result.get("parts"):
            roofs = result["parts"]["roofline"]
            points.setdefault("plain", roofs["plain"])
            points[label.replace("\n", ", ")] = roofs["speculative"]
    read, most = machine["read_bytes_per_second"], machine["flops_per_second"]
    intensities = [point["flops"] / point["bytes"] for point in points.values()]
    low, high = min(intensities) / 2, max(*intensities, most / read) * 2
    xs = [low, min(max(most / read, low), high), high]
    axes.plot(xs, [min(most, x * read) / 1e9 for x in xs], "-", color="0.4", label="this machine's limit")
    for mark, (name, point) in zip("*osD^v<>" * 8, points.items(), strict=False):
        rate, limit = point["flops_per_second"], min(most, point["flops"] / point["bytes"] * read)
        axes.plot([point["flops"] / point["bytes"]], [rate / 1e9], mark, markersize=9, linestyle="none",
                  label=f"{name}: {rate / limit:.0%} of it, {point['bytes_per_second'] / 1e9:.1f} GB/s")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte read", ylabel="GFLOP/s")
    _legend(axes)


def _categories(axes: Axes, report: Report) -> None:
    found = {
        name: value["tokens_per_target_pass"]
        for name, value in best_of(report)["categories"].items()
        if value["tokens_per_target_pass"] is not None
    }
    axes.barh(list(found), list(found.values()))
    axes.axvline(1.0, color="0.5", linestyle="--")
    axes.set(xlabel="tokens a round")
