"""A bench's report as one self-contained HTML page: figures in tables, plots as SVG (extra: bench)."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from specjax.errors import UsageError
from specjax.report import Report, by_setting, setting_of

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:66rem;padding:0 1rem;color:#1b1b1b}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}.wide{overflow-x:auto}
figure{margin:1.5rem 0}figcaption{color:#555;font-size:.9rem;max-width:46rem}svg{max-width:100%;height:auto}
.first{font-size:1.25rem}small,.note{color:#555}h2{margin-top:2.2rem}
"""
Cells = Sequence[str]


def require_plots() -> None:
    """Raise UsageError where the library that draws is not installed; before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--html needs matplotlib: install 'specjax[bench]'.") from error


def to_html(report: Report) -> str:
    """Return the page: the best result in a sentence, what was measured on what, plots, and a table of each setting."""
    require_plots()
    from specjax.report_plots import plots_of

    figures = "\n".join(
        f'<figure id="{name}"><h2>{html.escape(title)}</h2>{svg}<figcaption>{html.escape(words)}</figcaption></figure>'
        for name, title, svg, words in plots_of(report)
    )
    tables = "\n".join(_setting(name, results) for name, results in by_setting(report).items())
    said = [html.escape(f"{setting_of(found)}: {found['words']}.") for found in report["advice"]]
    advice = "".join(f"<p>{words}</p>" for words in said)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>specjax bench</title>'
        f"<style>{_STYLE}</style></head><body><h1>Speculative against plain decoding</h1>"
        f'<p class="first">{html.escape(headline(report))}</p>{_about(report)}{figures}'
        f"<h2>All figures</h2>{tables}{_categories(report)}"
        + (f"<h2>What the cost model says</h2>{advice}" if advice else "")
        + "</body></html>\n"
    )


def headline(report: Report) -> str:
    """Return the report in one sentence."""
    best = best_of(report)
    ratio = best["ratio"]
    if ratio is None:
        return "No tokens were generated."
    words = "faster than" if ratio["median"] > 1 else "slower than, or as slow as,"
    plain, fast = (best[side]["tokens_per_second"]["median"] for side in ("plain", "speculative"))
    return (
        f"At best {ratio['median']:.2f} times as fast, {words} plain decoding: {fast:.1f} tokens/s for {plain:.1f}, "
        f"at gamma {best['gamma']}."
    )


def best_of(report: Report) -> Report:
    """Return the result with the greatest ratio."""
    return max(report["results"], key=lambda result: (result["ratio"] or {"median": 0.0})["median"])


def _about(report: Report) -> str:
    here, settings, machine = report["environment"], report["settings"], report["machine"]
    lines = [f"{settings['title']}."] if settings["title"] else []
    lines += [
        f"target {pair['target']}, draft {pair['draft']}, {here['dtype']}, {len(pair['prompts'])} prompts of "
        f"{min(p['num_tokens'] for p in pair['prompts'])} to {max(p['num_tokens'] for p in pair['prompts'])} tokens, "
        f"up to {settings['max_new_tokens']} new ones"
        for pair in report["pairs"]
    ]
    lines.append(
        f"jax {here['jax']}, {here['num_devices']} x {here['device']} ({here['processor']}, {here['num_cpus']} CPU)"
    )
    if machine:
        lines.append(
            f"the machine reads {machine['read_bytes_per_second'] / 1e9:.1f} GB/s, copies "
            f"{machine['copy_bytes_per_second'] / 1e9:.1f} GB/s (reads and writes) and multiplies "
            f"{machine['flops_per_second'] / 1e9:.0f} GFLOP/s in {machine['dtype']}"
        )
    return "<p>" + "<br>".join(f"<small>{html.escape(line)}</small>" for line in lines) + "</p>"


def _setting(name: str, results: Sequence[Report]) -> str:
    heads, pick = zip(*_FIGURES, strict=True)
    rows = [[figure(result) for figure in pick] for result in results]
    runs, coverage = len(results[0]["plain"]["runs"]), results[0]["coverage"]
    note = (
        f"median (min to max) of {runs} pairs of runs, in turns; such a span holds the true median with probability "
        f"{coverage:.2f}. {len(results[0]['rows'])} prompts."
    )
    return f"<h3>{html.escape(name)}</h3><p class='note'>{html.escape(note)}</p>{table(heads, rows)}"


def _categories(report: Report) -> str:
    """Return a table by category, at the draft length that is best over all."""
    best = best_of(report)
    if len(best["categories"]) < 2:
        return ""
    heads = ("category", "prompts", "plain, tokens/s", "speculative, tokens/s", "ratio", "mean length", "acceptance")
    rows = [
        [
            kind,
            str(found["num_prompts"]),
            *(number(found.get(f"{side}_tokens_per_second"), 1) for side in ("plain", "speculative")),
            *(number(found.get(name)) for name in ("ratio", "mean_acceptance_length", "acceptance_rate")),
        ]
        for kind, found in best["categories"].items()
    ]
    words = f"{setting_of(best)}, gamma {best['gamma']}; speeds of each row's own time, looked at after each round"
    return f"<h2>By category</h2><p class='note'>{html.escape(words)}</p>{table(heads, rows)}"


def table(heads: Cells, rows: Sequence[Cells]) -> str:
    """Return an HTML table of texts."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def number(value: float | None, places: int = 2) -> str:
    """Return a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{places}f}"


def _span(values: dict[str, float] | None, places: int) -> str:
    if values is None:
        return "-"
    return f"{values['median']:.{places}f} ({values['min']:.{places}f} to {values['max']:.{places}f})"


def _equal(result: Report) -> str:
    found = result["equality"]
    return f"{found['num_equal']}/{found['num_compared']}" if found["num_compared"] else "in law"


def _part(result: Report, *names: str) -> Any:
    found: Any = result.get("parts")
    for name in names:
        found = None if found is None else found[name]
    return found


_FIGURES: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("gamma", lambda r: str(r["gamma"])),
    ("plain, tokens/s", lambda r: _span(r["plain"]["tokens_per_second"], 1)),
    ("speculative, tokens/s", lambda r: _span(r["speculative"]["tokens_per_second"], 1)),
    ("ratio, whole", lambda r: _span(r["ratio"], 2)),
    ("ratio, decoding", lambda r: _span(r["decode_ratio"], 2)),
    ("ratio, predicted", lambda r: number(_part(r, "predicted_ratio"))),
    ("mean length", lambda r: number(r["mean_acceptance_length"])),
    ("acceptance", lambda r: number(r["acceptance_rate"])),
    ("drafts wasted", lambda r: str(r["wasted_draft_tokens"])),
    ("equal to plain", _equal),
    ("compile, s", lambda r: f"{r['plain']['compile_seconds']:.1f} + {r['speculative']['compile_seconds']:.1f}"),
)
