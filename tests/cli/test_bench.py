"""``specjax bench``: what it measures and how it is written; never how fast."""

from __future__ import annotations

import json

import pytest
from tiny_text import DATA

from specjax import bench as room
from specjax import bench_result, report
from specjax.stats import row_stats

SIDE = {"compile_seconds", "tokens_per_second", "decode_tokens_per_second", "seconds", "prefill_seconds", "runs"}
RUN = {"seconds", "prefill_seconds", "decode_seconds", "num_tokens", "tokens_per_second", "decode_tokens_per_second"}
SETTING = set(report.SETTING)
RESULT = SETTING | {
    *("gamma", "plain", "speculative", "ratio", "decode_ratio", "coverage", "mean_acceptance_length"),
    *("acceptance_rate", "acceptance_per_position", "conditional_acceptance_per_position", "tokens_per_target_pass"),
    *("wasted_draft_tokens", "wasted_share", "stats", "equality", "rows", "categories"),
}
MORE = {"latency", "analytic_acceptance_per_position", "parts"}
REPORT = {"schema", "specjax", "settings", "environment", "machine", "pairs", "results", "advice"}


@pytest.fixture
def bench(specjax, model):
    """Return ``bench(*arguments)`` with few, short runs."""
    few = ["--dtype", "float32", "--repeats", 2, "--max-new-tokens", 12, "--speed-only"]
    return lambda *arguments: specjax("bench", "--target", model, *few, *arguments)


def test_the_report_has_the_documented_fields(bench, rows_file, tmp_path):
    rows = rows_file({"id": "a", "prompt_ids": [5, 17, 42]}, {"prompt_ids": [9]}, {"prompt_ids": [8]})
    output = tmp_path / "report.json"
    near = DATA / "llama-gqa-tied.draft-near"
    page, lines = tmp_path / "page.html", tmp_path / "runs.csv"
    more = ["--html", page, "--csv", lines]
    done = bench("--draft", near, "--prompts", rows, "--gamma", 1, 3, "--limit", 2, "--output", output, *more)
    assert (done.code, done.err) == (0, "")
    assert page.read_text().count("<svg") == 3
    assert len(lines.read_text().splitlines()) == 1 + 2 * 2 * 2
    again = bench("--draft", near, "--prompts", rows, "--csv", lines)
    assert (again.code, again.err) == (2, f"specjax: error: --csv {lines} exists; pass --overwrite to replace it.\n")
    same = bench("--compare", output, output)
    assert same.code == 0
    assert same.out.count("same") == 2 * 4
    assert not output.with_name("report.json.partial").exists()
    found = json.loads(output.read_text())
    assert set(found) == REPORT
    assert found["schema"] == report.SCHEMA
    assert found["machine"] is None
    assert found["settings"]["gammas"] == [1, 3]
    assert {"jax", "device", "dtype", "num_cpus"} < set(found["environment"])
    (loaded,) = found["pairs"]
    assert loaded["draft"] == str(near)
    assert loaded["prompts"][0] == {"id": "a", "category": None, "num_tokens": 3}
    assert [prompt["id"] for prompt in loaded["prompts"]] == ["a", 2]
    assert [result["gamma"] for result in found["results"]] == [1, 3]
    for result in found["results"]:
        assert set(result) == RESULT
        assert result["batch_size"] == 1
        for side in ("plain", "speculative"):
            assert set(result[side]) == SIDE
            assert len(result[side]["runs"]) == 2
            assert all(set(run) == RUN and run["num_tokens"] == 24 for run in result[side]["runs"])
            assert all(run["prefill_seconds"] + run["decode_seconds"] <= run["seconds"] for run in result[side]["runs"])
            assert all(
                set(result[side][name]) == {"median", "min", "max"} for name in SIDE - {"compile_seconds", "runs"}
            )
        assert set(result["ratio"]) == set(result["decode_ratio"]) == {"median", "min", "max"}
        assert len(result["acceptance_per_position"]) == result["gamma"]
        assert result["stats"]["num_tokens"] == 24
        assert result["equality"] == {"num_compared": 2, "num_equal": 2, "divergences": []}
        assert [row["id"] for row in result["rows"]] == ["a", 2]
        assert result["wasted_draft_tokens"] == (
            result["stats"]["num_draft_tokens"] - result["stats"]["num_accepted_tokens"]
        )
    assert found["results"][1]["tokens_per_target_pass"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_what_else_is_measured(specjax, model, rows_file, tmp_path, temperature):
    rows = rows_file({"prompt_ids": [5, 17, 42, 5, 17, 42]}, {"prompt_ids": [9, 8]})
    few = ["--dtype", "float32", "--repeats", 1, "--max-new-tokens", 12, "--prompts", rows, "--gamma", 2]
    near, output, page = DATA / "llama-gqa-tied.draft-near", tmp_path / "report.json", tmp_path / "page.html"
    more = ["--temperature", temperature, "--output", output, "--html", page]
    done = specjax("bench", "--target", model, "--draft", near, *few, *more)
    assert (done.code, done.err) == (0, "")
    assert "first token ms" in done.out
    found = json.loads(output.read_text())
    (result,) = found["results"]
    assert set(result) == RESULT | MORE
    for side in ("plain", "speculative"):
        assert result["latency"][side]["num_requests"] == 2
        assert result["latency"][side]["first_token"]["p50"] <= result["latency"][side]["request"]["p50"]
        parts = result["parts"][side]
        assert sum(parts["shares"].values()) == pytest.approx(1)
        assert parts["round_seconds"] > 0
    assert result["parts"]["plain"]["width"] == 1
    assert result["parts"]["speculative"]["width"] == 3
    assert result["parts"]["plain"]["draft_seconds"] == 0
    assert result["parts"]["predicted_ratio"] > 0
    memory = result["parts"]["memory"]
    assert memory["peak_bytes"] > memory["target_parameter_bytes"] > memory["target_cache_bytes"] / 100 > 0
    assert found["machine"]["read_bytes_per_second"] > 1e8
    assert found["advice"][0]["words"].startswith(("speculate", "do not speculate"))
    assert page.read_text().count("<svg") == 6
    analytic, conditional = (result[f"{name}acceptance_per_position"] for name in ("analytic_", "conditional_"))
    assert len(analytic) == 2
    if temperature == 0:
        assert analytic == conditional
    else:
        assert analytic != conditional
        assert all(abs(a - b) < 0.4 for a, b in zip(analytic, conditional, strict=True))


SUITE = """
pairs = [{target = "MODEL"}, {target = "MODEL", draft = "early-exit:1"}]
dtype = "float32"
prompts = "rows.jsonl"
gammas = [1, 2]
temperatures = [0.0, 1.0]
rules = ["rejection", "coupled"]
prompt_tokens = [[1, 2], [3, 9]]
max_new_tokens = 4
repeats = 1
"""


def test_a_suite_is_every_combination_and_goes_on_where_it_was_stopped(
    specjax, model, rows_file, tmp_path, monkeypatch
):
    rows_file({"prompt_ids": [5]}, {"prompt_ids": [9, 8, 7]}, {"prompt_ids": [1, 2, 3, 4]})
    path, output = tmp_path / "suite.toml", tmp_path / "report.json"
    path.write_text(SUITE.replace("MODEL", str(model)))
    call = ["bench", "--suite", path, "--output", output, "--speed-only"]
    calls = []

    def timed(pair, rows, **options):
        calls.append(options["gamma"])
        if len(calls) == 9:
            raise KeyboardInterrupt
        none = row_stats([0], [0], [0], speculation="on", gamma=options["gamma"])
        done = [{"id": row.id, "ids": [1], "finish_reason": "length", "stats": none} for row in rows]
        return {"seconds": 1.0 + len(calls), "prefill_seconds": 0.5, "decode_seconds": 0.5, "rows": done}

    monkeypatch.setattr(room, "timed", timed)
    assert specjax(*call).code == 130
    assert not output.exists()
    kept = json.loads(output.with_name("report.json.partial").read_text())["measured"]
    assert len(kept) == 8
    refused = specjax(*call)
    assert (refused.code, "--resume" in refused.err) == (2, True)
    path.write_text(SUITE.replace("MODEL", str(model)).replace("repeats = 1", "repeats = 2"))
    assert "another run" in specjax(*call, "--resume").err
    path.write_text(SUITE.replace("MODEL", str(model)))
    assert specjax(*call, "--resume").code == 0
    found = json.loads(output.read_text())
    # two pairs, two lengths of prompts, greedy once, two rules above, two gammas
    assert len(found["results"]) == 2 * 2 * (1 + 2) * 2
    assert len({json.dumps([r[name] for name in report.SETTING]) for r in found["results"]}) == 12
    assert found["results"][0]["plain"]["runs"][0]["seconds"] == 4.0  # of the run before it was stopped
    assert [len(r["rows"]) for r in found["results"][:2]] == [1, 1]
    assert {len(r["rows"]) for r in found["results"]} == {1, 2}
    assert not output.with_name("report.json.partial").exists()


def test_the_suites_that_ship_can_be_read():
    from specjax.bench_suite import read_suite, settings_of, suite_names

    assert {"quick", "spec-bench", "sweep"} <= set(suite_names())
    for name in suite_names():
        suite = read_suite(name)
        assert suite.title
        assert list(settings_of(suite))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "nothing"], "known: quick, spec-bench, sweep"),
        (["--suite", "quick", "--gamma", 2], "got --gamma and --suite; a suite says it itself, with gammas"),
        (["--suite", "sweep"], "give PROMPT, or --prompts FILE"),
        (["--suite", "BAD"], "unknown field `gama`"),
        (["--suite", "EMPTY"], "rules is empty"),
        (["--suite", "LONG"], "No prompt has 90 to 99 tokens, but 1 to 1"),
        (["--suite", "quick", "--resume"], "--resume needs --output FILE"),
    ],
)
def test_a_suite_that_cannot_be_run_is_a_wrong_call(specjax, model, rows_file, tmp_path, arguments, words):
    rows_file({"prompt_ids": [5]})
    texts = {"BAD": "gama = [2]", "EMPTY": "rules = []", "LONG": 'prompts = "rows.jsonl"\nprompt_tokens = [[90, 99]]'}
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)
    arguments = [str(tmp_path / f"{word}.toml") if word in texts else word for word in arguments]
    done = specjax("bench", "--target", model, *arguments)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert words in done.err


def test_the_table_has_a_line_for_each_gamma(bench, rows_file):
    done = bench("--prompts", rows_file({"prompt_ids": [5]}), "--gamma", 2, "--gamma", 4)
    assert done.code == 0
    lines = done.out.splitlines()
    assert "float32" in lines[0]
    assert lines[1].endswith("draft ngram, batch size 1, temperature 0, rule rejection, 1 prompts, 2 pairs of runs")
    assert [line.split()[0] for line in lines if line.split()[:1] in (["2"], ["4"])] == ["2", "4"]
    assert sum("1/1" in line for line in lines) == 2


def test_the_report_alone_goes_to_standard_output(bench, rows_file):
    done = bench("--prompts", rows_file({"prompt_ids": [5]}), "--output", "-")
    assert (done.code, len(done.rows)) == (0, 1)
    assert "draft ngram" in done.err


def test_above_temperature_0_texts_are_equal_in_law_only(bench, rows_file):
    done = bench("--prompts", rows_file({"prompt_ids": [5]}), "--temperature", 1, "--output", "-")
    assert done.rows[0]["results"][0]["equality"]["num_compared"] == 0
    assert "in law" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "none"], "no draft to measure"),
        (["--draft", "./nowhere"], "does not exist"),
        (["--gamma", "0"], "gamma is 0"),
        (["--gamma", "99"], "gamma is 99"),
        (["--repeats", "0"], "repeats is 0"),
        (["--cache-length", "8"], "--cache-length"),
    ],
)
def test_what_cannot_be_measured_is_a_wrong_call(bench, rows_file, tmp_path, arguments, words):
    output = tmp_path / "report.json"
    done = bench("--prompts", rows_file({"prompt_ids": [5]}), "--output", output, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith("specjax: error: ")
    assert words in done.err
    assert not output.exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{}"], "line 1: expected exactly one of"),
        (["", '{"prompt_ids": [320]}'], "Prompt 2 failed: "),
        ([], "no prompt to measure on"),
    ],
)
def test_a_prompt_that_fails_is_fatal(bench, rows_file, rows, words):
    done = bench("--prompts", rows_file(*rows))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err


def test_an_output_that_exists_is_refused(bench, rows_file, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    done = bench("--prompts", rows_file({"prompt_ids": [5]}), "--output", tmp_path / "report.json")
    assert (done.code, "--overwrite" in done.err) == (2, True)


def test_questions_of_spec_bench_are_read_as_they_are(rows_file, text_model, model):
    from specjax.pair import load_model

    question = {"question_id": 81, "category": "writing", "turns": ["Say hello.\u2028Twice.", "Again."]}
    path = rows_file("", question, {"id": "mine", "prompt": "hello"})
    first, second = room.read_prompts(path, load_model(text_model))
    assert (first.row.id, first.row.line, first.category) == (81, 2, "writing")
    assert first.row.messages == [{"role": "user", "content": "Say hello.\u2028Twice."}]
    assert (second.row.id, second.row.prompt, second.category) == ("mine", "hello", None)
    assert room.read_prompts(path, load_model(model))[0].row.prompt == "Say hello.\u2028Twice."


def test_plain_and_speculative_take_turns_after_both_are_compiled(model, monkeypatch):
    from specjax.pair import load

    said = []
    pair = load(model, "ngram", dtype="float32")
    prompts = [bench_result.BenchPrompt(room.Row(1, 1, prompt_ids=(5,)))]
    room.bench(pair, prompts, gammas=[1, 2, 1], repeats=2, on_run=said.append, max_new_tokens=1)
    runs = [f"gamma {{}}: run {n} of 2 ({side})" for n in (1, 2) for side in ("plain", "speculative")]
    first = ["gamma 1: compiling (plain)", "gamma 1: compiling (speculative)"]
    second = ["gamma 2: compiling (speculative)"]
    assert said == [*first, *(run.format(1) for run in runs), *second, *(run.format(2) for run in runs)]


def test_percentiles_are_values_that_so_many_do_not_exceed():
    assert bench_result.percentiles([float(i) for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert bench_result.percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert bench_result.percentiles([]) is None


def test_the_span_of_five_runs_holds_the_median_in_fifteen_of_sixteen_cases():
    assert bench_result.coverage(5) == 1 - 1 / 16


def test_latencies_are_seen_from_the_host():
    looks = [{"id": 1, "seconds": [0.5, 0.7, 1.0], "num_tokens": [2, 1, 3]}, {"id": 2, "seconds": [], "num_tokens": []}]
    found = bench_result.latency_result({"plain": looks, "speculative": looks})["plain"]
    assert found["first_token"]["p50"] == 0.5
    assert found["round"]["p99"] == pytest.approx(0.3)
    assert found["later_token"]["p50"] == pytest.approx(0.5 / 4)
    assert (found["request"]["p50"], found["num_requests"]) == (1.0, 1)
    prompts = [bench_result.BenchPrompt(room.Row(i, i, prompt_ids=(1,)), "qa") for i in (1, 2)]
    speeds = bench_result.category_speeds({"plain": looks, "speculative": looks}, prompts)
    assert speeds == {"qa": {"plain_tokens_per_second": 6.0, "speculative_tokens_per_second": 6.0, "ratio": 1.0}}


def test_the_prediction_is_the_cost_model_s():
    parts = {"plain": {"round_seconds": 10e-3},
             "speculative": {"draft_seconds": 8e-3, "target_seconds": 12e-3, "other_seconds": 2e-3}}  # fmt: skip
    total = {"num_rounds": 100, "num_accepted_tokens_per_pos": [80, 60, 45, 35]}  # E[N] = 3.2
    assert bench_result.predicted(parts, total) == pytest.approx(1.4545, abs=1e-4)


def test_a_divergence_is_named():
    def output(row_id, ids):
        return {"id": row_id, "ids": ids}

    prompts = [bench_result.BenchPrompt(room.Row(i, i, prompt_ids=(1,))) for i in (1, 2, 3)]
    prompts.append(bench_result.BenchPrompt(room.Row(4, 4, prompt_ids=(1,), temperature=1.0)))
    plain = [output(1, [5, 6]), output(2, [5, 6]), output(3, [5]), output(4, [1])]
    speculative = [output(1, [5, 6]), output(2, [5, 7]), output(3, [5, 9]), output(4, [2])]
    assert bench_result.equality(prompts, plain, speculative, 0.0) == {
        "num_compared": 3,
        "num_equal": 1,
        "divergences": [
            {"id": 2, "position": 1, "plain": 6, "speculative": 7},
            {"id": 3, "position": 1, "plain": None, "speculative": 9},
        ],
    }
