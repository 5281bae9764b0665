"""A bench's report as CSV, as a page, and against another report."""

from __future__ import annotations

import copy
import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import pytest

from specjax import UsageError, report


def spread(low: float, high: float) -> dict[str, float]:
    return {"median": (low + high) / 2, "min": low, "max": high}


def result(gamma: int, fast: float) -> dict:
    run = {"seconds": 2.0, "prefill_seconds": 0.5, "decode_seconds": 1.4, "num_tokens": 20,
           "tokens_per_second": 10.0, "decode_tokens_per_second": 14.3}  # fmt: skip
    plain = {"tokens_per_second": spread(9, 11), "runs": [run, run]}
    speculative = {"tokens_per_second": spread(fast - 1, fast + 1), "runs": [run, run]}
    return {
        "gamma": gamma, "plain": plain, "speculative": speculative, "ratio": spread(fast / 10, fast / 10 + 0.1),
        "decode_ratio": spread(fast / 9, fast / 9 + 0.1), "mean_acceptance_length": 2.0, "acceptance_rate": 0.5,
        "acceptance_per_position": [0.5 / (i + 1) for i in range(gamma)],
        "equality": {"num_compared": 2, "num_equal": 2},
        "rows": [{"id": i, "mean_acceptance_length": 1.5 + i} for i in range(2)],
    }  # fmt: skip


REPORT = {
    "schema": 1,
    "settings": {"target": "a <b> & c", "draft": "ngram", "batch_size": 1, "temperature": 0.0},
    "environment": {"dtype": "float32", "jax": "0", "num_devices": 1, "device": "cpu", "processor": "p", "num_cpus": 2},
    "prompts": [{"id": 0, "category": "qa"}, {"id": 1, "category": "math"}],
    "results": [result(2, 18.0), result(4, 25.0)],
}


def test_every_run_is_a_line_of_csv():
    rows = list(csv.DictReader(io.StringIO(report.to_csv(REPORT))))
    assert [(row["gamma"], row["side"], row["run"]) for row in rows] == [
        (gamma, side, run) for gamma in ("2", "4") for side in ("plain", "speculative") for run in ("1", "2")
    ]
    assert rows[0]["num_tokens"] == "20"
    assert tuple(rows[0]) == report.COLUMNS


def test_the_page_stands_alone_and_holds_every_plot():
    page = report.to_html(REPORT)
    assert page.count("<svg") == page.count("</svg>") == 5
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
    with pytest.raises(UsageError, match="no gamma in common"):
        report.compare(REPORT, {**REPORT, "results": [result(7, 20.0)]})


def test_what_is_no_report_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(REPORT))
    assert report.read_report(tmp_path / "a.json") == REPORT
    for name, text in (("b.json", "[1]"), ("c.json", "{")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=name):
            report.read_report(tmp_path / name)
    with pytest.raises(UsageError, match="nowhere"):
        report.read_report(tmp_path / "nowhere.json")
