"""``specjax bench``: what it measures and how it is written; never how fast."""

from __future__ import annotations

import json

import pytest
from tiny_text import DATA

from specjax import bench as room

SIDE = {"compile_seconds", "tokens_per_second", "decode_tokens_per_second", "seconds", "prefill_seconds", "runs"}
RUN = {"seconds", "prefill_seconds", "decode_seconds", "num_tokens", "tokens_per_second", "decode_tokens_per_second"}
RESULT = {
    *("gamma", "plain", "speculative", "ratio", "decode_ratio", "mean_acceptance_length", "acceptance_rate"),
    *("acceptance_per_position", "conditional_acceptance_per_position", "tokens_per_target_pass", "stats"),
    *("equality", "rows"),
}


@pytest.fixture
def bench(specjax, model):
    """Return ``bench(*arguments)`` with few, short runs."""
    few = ["--dtype", "float32", "--repeats", 2, "--max-new-tokens", 12]
    return lambda *arguments: specjax("bench", "--target", model, *few, *arguments)


def test_the_report_has_the_documented_fields(bench, rows_file, tmp_path):
    rows = rows_file({"id": "a", "prompt_ids": [5, 17, 42]}, {"prompt_ids": [9]}, {"prompt_ids": [8]})
    output = tmp_path / "report.json"
    near = DATA / "llama-gqa-tied.draft-near"
    page, lines = tmp_path / "page.html", tmp_path / "runs.csv"
    more = ["--html", page, "--csv", lines]
    done = bench("--draft", near, "--prompts", rows, "--gamma", 1, 3, "--limit", 2, "--output", output, *more)
    assert (done.code, done.err) == (0, "")
    assert page.read_text().count("<svg") == 4
    assert len(lines.read_text().splitlines()) == 1 + 2 * 2 * 2
    again = bench("--draft", near, "--prompts", rows, "--csv", lines)
    assert (again.code, again.err) == (2, f"specjax: error: --csv {lines} exists; pass --overwrite to replace it.\n")
    same = bench("--compare", output, output)
    assert same.code == 0
    assert same.out.count("same") == 2 * 4
    report = json.loads(output.read_text())
    assert set(report) == {"schema", "specjax", "settings", "load_seconds", "environment", "prompts", "results"}
    assert report["schema"] == room.SCHEMA
    assert report["settings"]["draft"] == str(near)
    assert {"jax", "device", "dtype", "num_cpus"} < set(report["environment"])
    assert report["prompts"][0] == {"id": "a", "category": None, "num_tokens": 3}
    assert [prompt["id"] for prompt in report["prompts"]] == ["a", 2]
    assert [result["gamma"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert set(result) == RESULT
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
    assert report["results"][1]["tokens_per_target_pass"] > 1


def test_the_table_has_a_line_for_each_gamma(bench, rows_file):
    done = bench("--prompts", rows_file({"prompt_ids": [5]}), "--gamma", 2, "--gamma", 4)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].endswith("draft ngram, float32, 1 prompts, batch size 1, temperature 0, 2 pairs of runs")
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
    prompts = [room.BenchPrompt(room.Row(1, 1, prompt_ids=(5,)))]
    room.bench(pair, prompts, gammas=[1, 2, 1], repeats=2, on_run=said.append, max_new_tokens=1)
    runs = [f"gamma {{}}: run {n} of 2 ({side})" for n in (1, 2) for side in ("plain", "speculative")]
    first = ["gamma 1: compiling (plain)", "gamma 1: compiling (speculative)"]
    second = ["gamma 2: compiling (speculative)"]
    assert said == [*first, *(run.format(1) for run in runs), *second, *(run.format(2) for run in runs)]


def test_a_divergence_is_named():
    from specjax.api import Output

    def output(row_id, ids):
        return Output(row_id, 0, None, ids, "length", {})

    prompts = [room.BenchPrompt(room.Row(i, i, prompt_ids=(1,))) for i in (1, 2, 3)]
    prompts.append(room.BenchPrompt(room.Row(4, 4, prompt_ids=(1,), temperature=1.0)))
    plain = [output(1, [5, 6]), output(2, [5, 6]), output(3, [5]), output(4, [1])]
    speculative = [output(1, [5, 6]), output(2, [5, 7]), output(3, [5, 9]), output(4, [2])]
    assert room._equality(prompts, plain, speculative, {}) == {
        "num_compared": 3,
        "num_equal": 1,
        "divergences": [
            {"id": 2, "position": 1, "plain": 6, "speculative": 7},
            {"id": 3, "position": 1, "plain": None, "speculative": 9},
        ],
    }
