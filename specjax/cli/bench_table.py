"""A bench's report on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specjax.cli.common import number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(report: dict[str, Any], *, to_stderr: bool) -> None:
    """Print a report: what was measured on what, a table for each setting, differences and advice."""
    from rich.console import Console

    from specjax.report import by_setting, setting_of

    console = Console(stderr=to_stderr, highlight=False)
    here = report["environment"]
    loaded = ", ".join(f"{pair['load_seconds']:.1f}" for pair in report["pairs"])
    _say(
        console,
        f"jax {here['jax']}, {here['num_devices']} x {here['device']} ({here['processor']}, {here['num_cpus']} CPU), "
        f"{here['dtype']}; loaded in {loaded} s",
    )
    if machine := report["machine"]:
        _say(
            console,
            f"the machine reads {machine['read_bytes_per_second'] / 1e9:.1f} GB/s, copies "
            f"{machine['copy_bytes_per_second'] / 1e9:.1f} (reads and writes), multiplies "
            f"{machine['flops_per_second'] / 1e9:.0f} GFLOP/s in {machine['dtype']}",
        )
    for setting, results in by_setting(report).items():
        _say(console, f"{setting}, {len(results[0]['rows'])} prompts, {len(results[0]['plain']['runs'])} pairs of runs")
        for table in (_speeds(results), _details(results)):
            if table is not None:
                wide = console.options.update(max_width=10_000)
                console.width = max(console.width, console.measure(table, options=wide).maximum)  # wrapped, not cut
                console.print(table)
        for result in results:
            for found in result["equality"]["divergences"]:
                _say(
                    console,
                    f"gamma {result['gamma']}: prompt {found['id']!r} first differs from plain at new token "
                    f"{found['position'] + 1}",
                )
    for found in report["advice"]:
        _say(console, f"{setting_of(found)}: {found['words']}" if len(report["advice"]) > 1 else found["words"])


def _say(console: Console, words: str) -> None:
    console.print(words, markup=False, soft_wrap=True)


def _table(*headings: str, caption: str = "") -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, caption_justify="left", caption=caption)
    for heading in headings:
        table.add_column(heading, justify="left" if "position" in heading else "right", no_wrap=True)
    return table


def _speeds(results: list[dict[str, Any]]) -> Table:
    table = _table(
        "γ", "plain\ntok/s", "speculative\ntok/s", "ratio\nwhole", "ratio\ndecode", "mean\nlength", "accep-\ntance",
        "by position", "tokens\n/pass", "wasted\ndrafts", "equal to\nplain", "compile\ns",
        caption="median (min to max) of the runs; whole: prefill and decoding; decode: without prefill",
    )  # fmt: skip
    for result in results:
        equality = result["equality"]
        compared = equality["num_compared"]
        table.add_row(
            str(result["gamma"]),
            spread_text(result["plain"]["tokens_per_second"], 1),
            spread_text(result["speculative"]["tokens_per_second"], 1),
            spread_text(result["ratio"], 2),
            spread_text(result["decode_ratio"], 2),
            number(result["mean_acceptance_length"]),
            number(result["acceptance_rate"]),
            _rates(result["acceptance_per_position"]),
            number(result["tokens_per_target_pass"]),
            str(result["wasted_draft_tokens"]),
            f"{equality['num_equal']}/{compared}" if compared else "in law",
            f"{result['plain']['compile_seconds']:.1f} + {result['speculative']['compile_seconds']:.1f}",
        )
    return table


def _details(results: list[dict[str, Any]]) -> Table | None:
    """Return what ``--speed-only`` leaves out, or None."""
    if "latency" not in results[0]:
        return None
    table = _table(
        "γ", "first token ms\np50 / p95 / p99", "round ms\np50 / p95 / p99", "request s\np50 / p95 / p99",
        "min(p, q) by position", "draft / target\n/ the rest", "plain step\nGB/s", "predicted\nratio",
        "cache\nMB", "peak\nMB",
        caption="looked at after each round, speculative over plain; min(p, q): means where the position was reached",
    )  # fmt: skip
    for result in results:
        parts, latency = result.get("parts"), result["latency"]
        cells = ["-"] * 5
        if parts:
            shares = parts["speculative"]["shares"]
            cells = [
                " / ".join(f"{shares[name]:.0%}" for name in ("draft", "target", "other")),
                f"{parts['roofline']['plain']['bytes_per_second'] / 1e9:.1f}",
                number(parts["predicted_ratio"]),
                f"{parts['memory']['target_cache_bytes'] / 1e6:.1f}",
                f"{parts['memory']['peak_bytes'] / 1e6:.0f}",
            ]
        table.add_row(
            str(result["gamma"]),
            *(_percentiles(latency, name, scale) for name, scale in
              (("first_token", 1e3), ("round", 1e3), ("request", 1.0))),
            _rates(result["analytic_acceptance_per_position"]),
            *cells,
        )  # fmt: skip
    return table


def _percentiles(latency: dict[str, Any], name: str, scale: float) -> str:
    lines = []
    for side in ("speculative", "plain"):
        found = latency[side][name]
        lines.append("-" if found is None else " / ".join(f"{scale * value:.3g}" for value in found.values()))
    return "\n".join(lines)


def _rates(rates: list[float | None] | None) -> str:
    if rates is None:
        return "-"
    return " ".join(number(rate).removeprefix("0") for rate in rates)


def spread_text(values: dict[str, float] | None, places: int) -> str:
    """Return a median with its span below it."""
    if values is None:
        return "-"
    low, high = (f"{values[name]:.{places}f}" for name in ("min", "max"))
    return f"{values['median']:.{places}f}\n({low} to {high})"
