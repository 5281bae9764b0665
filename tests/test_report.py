"""A bench's report as CSV, as a page, and against another report."""

from __future__ import annotations

import copy
import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import pytest

from specjax import UsageError, report, report_page


def spread(low: float, high: float) -> dict[str, float]:
    return {"median": (low + high) / 2, "min": low, "max": high}


SETTING = {"target": "a <b> & c", "draft": "ngram", "batch_size": 1, "temperature": 0.0, "rule": "rejection",
           "prompt_tokens": None}  # fmt: skip


def parts(gamma: int) -> dict:
    def side(width: int, draft: float) -> dict:
        return {"width": width, "round_seconds": 0.02 + draft, "draft_seconds": draft, "target_seconds": 0.015,
                "other_seconds": 0.005, "shares": {"draft": 0.1, "target": 0.7, "other": 0.2}}  # fmt: skip

    def step(rows: int) -> dict:
        return {"rows": rows, "seconds": 0.015, "bytes": 3e8, "flops": rows * 3e8, "bytes_per_second": 2e10,
                "flops_per_second": rows * 2e10}  # fmt: skip

    return {"plain": side(1, 0.0), "speculative": side(gamma + 1, 0.002), "predicted_ratio": 1.5 + gamma / 10,
            "roofline": {"plain": step(1), "speculative": step(gamma + 1)}}  # fmt: skip


def percentiles(base: float) -> dict[str, float]:
    return {"p50": base, "p95": 2 * base, "p99": 3 * base}


def result(gamma: int, fast: float, **setting) -> dict:
    run = {"seconds": 2.0, "prefill_seconds": 0.5, "decode_seconds": 1.4, "num_tokens": 20,
           "tokens_per_second": 10.0, "decode_tokens_per_second": 14.3}  # fmt: skip
    plain = {"tokens_per_second": spread(9, 11), "runs": [run, run], "compile_seconds": 1.0}
    speculative = {**plain, "tokens_per_second": spread(fast - 1, fast + 1)}
    rates = [0.5 / (i + 1) for i in range(gamma)]
    latency = {name: percentiles(0.1) for name in ("first_token", "round", "later_token", "request")}
    return {
        **SETTING, **setting, "gamma": gamma, "plain": plain, "speculative": speculative,
        "ratio": spread(fast / 10, fast / 10 + 0.1), "decode_ratio": spread(fast / 9, fast / 9 + 0.1),
        "coverage": 0.5, "mean_acceptance_length": 2.0, "acceptance_rate": 0.5, "acceptance_per_position": rates,
        "conditional_acceptance_per_position": [0.5] * gamma, "analytic_acceptance_per_position": [0.5] * gamma,
        "wasted_draft_tokens": 7, "equality": {"num_compared": 2, "num_equal": 2, "divergences": []},
        "rows": [{"id": i, "mean_acceptance_length": 1.5 + i} for i in range(2)],
        "categories": {
            kind: {"num_prompts": 1, "mean_acceptance_length": 2.0, "acceptance_rate": 0.5,
                   "tokens_per_target_pass": 1.7}
            for kind in ("qa", "math")
        },
        "latency": {"plain": latency, "speculative": latency}, "parts": parts(gamma),
    }  # fmt: skip


REPORT = {
    "schema": report.SCHEMA,
    "settings": {"title": "A title", "max_new_tokens": 20},
    "environment": {"dtype": "float32", "jax": "0", "num_devices": 1, "device": "cpu", "processor": "p", "num_cpus": 2},
    "machine": {"dtype": "float32", "read_bytes_per_second": 4e10, "copy_bytes_per_second": 3e10,
                "flops_per_second": 2e11},
    "pairs": [{"target": "a <b> & c", "draft": "ngram", "load_seconds": 1.0, "prompts": [
        {"id": 0, "category": "qa", "num_tokens": 3}, {"id": 1, "category": "math", "num_tokens": 5}]}],
    "results": [result(2, 18.0), result(4, 25.0)],
    "advice": [{**SETTING, "words": "speculate with gamma 4"}],
}  # fmt: skip
PLOTS = ("speed-up", "rates", "acceptance", "latency", "time", "roofline", "categories")


def test_every_run_is_a_line_of_csv():
    rows = list(csv.DictReader(io.StringIO(report.to_csv(REPORT))))
    assert [(row["gamma"], row["side"], row["run"]) for row in rows] == [
        (gamma, side, run) for gamma in ("2", "4") for side in ("plain", "speculative") for run in ("1", "2")
    ]
    assert rows[0]["num_tokens"] == "20"
    assert tuple(rows[0]) == report.COLUMNS
    ranged = {**REPORT, "results": [result(2, 18.0, prompt_tokens=[3, 9])]}
    assert "a <b> & c,ngram,1,0.0,rejection,3-9,2,plain,1,2.0" in report.to_csv(ranged)


def test_the_page_stands_alone_and_holds_every_plot():
    page = report_page.to_html(REPORT)
    assert page.count("<svg") == page.count("</svg>") == len(PLOTS)
    assert all(f'<figure id="{name}">' in page for name in PLOTS)
    assert "a &lt;b&gt; &amp; c" in page
    assert "At best 2.55 times as fast, faster than plain decoding: 25.0 tokens/s for 10.0, at gamma 4." in page
    for figure in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + figure[: figure.index("</svg>")] + "</svg>")  # well-formed
    assert "src=" not in page
    assert "<link" not in page
    assert "<script" not in page


def test_two_reports_are_compared_by_whether_their_spans_meet():
    slower = copy.deepcopy(REPORT)
    slower["results"][1] = result(4, 12.0)
    verdicts = {(row["gamma"], row["figure"]): row["verdict"] for row in report.compare(REPORT, slower)}
    assert verdicts["2", "speculative, tokens/s"] == "same"
    assert verdicts["4", "speculative, tokens/s"] == "slower"
    assert verdicts["4", "plain, tokens/s"] == "same"
    back = {(row["gamma"], row["figure"]): row["verdict"] for row in report.compare(slower, REPORT)}
    assert back["4", "ratio, decoding"] == "faster"
    with pytest.raises(UsageError, match="no setting and gamma in common"):
        report.compare(REPORT, {**REPORT, "results": [result(7, 20.0)]})


def test_a_setting_is_compared_with_itself_alone():
    hot = {"temperature": 1.0}
    both = {**REPORT, "results": [result(2, 18.0), result(2, 30.0, **hot)]}
    slower = {**REPORT, "results": [result(2, 18.0), result(2, 12.0, **hot)]}
    found = {(row["setting"], row["verdict"]) for row in report.compare(both, slower)}
    assert {verdict for setting, verdict in found if "temperature 0" in setting} == {"same"}
    assert {verdict for setting, verdict in found if "temperature 1" in setting} == {"same", "slower"}
    other = {**REPORT, "results": [result(2, 30.0, draft="another")]}
    assert {row["verdict"] for row in report.compare(REPORT, other)} == {"same", "faster"}  # one pair against another
    several = {**REPORT, "results": [result(2, 18.0), result(2, 30.0, draft="another")]}
    assert {row["setting"] for row in report.compare(several, several)} == {
        report.setting_of(found) for found in several["results"]
    }


def test_a_page_of_several_settings_names_what_differs():
    several = [result(2, 18.0), result(2, 30.0, batch_size=4), result(2, 20.0, batch_size=16)]
    page = report_page.to_html({**REPORT, "results": several})
    assert page.count("<h3>") == 3
    assert "batch size 16" in page
    lean = [{name: value for name, value in result(2, 18.0).items() if name not in ("latency", "parts")}]
    page = report_page.to_html({**REPORT, "results": lean, "machine": None, "advice": []})
    assert page.count("<svg") == len(PLOTS) - 3


def test_what_is_no_report_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(REPORT))
    assert report.read_report(tmp_path / "a.json") == REPORT
    for name, text in (("b.json", "[1]"), ("c.json", "{"), ("d.json", json.dumps({**REPORT, "schema": 1}))):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=name):
            report.read_report(tmp_path / name)
    with pytest.raises(UsageError, match="nowhere"):
        report.read_report(tmp_path / "nowhere.json")
