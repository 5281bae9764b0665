"""``specjax generate`` on tiny models: rows in and out, text as it comes, what fails and how."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys

import pytest
from tiny_text import DATA, read_rows, with_tokenizer

from specjax.cli import generate as command
from specjax.text import load_tokenizer

PROMPT = [5, 17, 42, 5, 17]


@pytest.fixture
def generate(specjax, model):
    """Return ``generate(*arguments)`` in float32 on the model without a tokenizer."""
    return lambda *arguments: specjax("generate", *arguments, "--target", model, "--dtype", "float32")


@pytest.fixture
def say(specjax, text_model):
    """Return ``say(*arguments)`` in float32 on the model with a tokenizer."""
    return lambda *arguments: specjax("generate", *arguments, "--target", text_model, "--dtype", "float32")


def test_rows_out_have_the_documented_fields(generate, rows_file, tmp_path):
    rows = rows_file({"id": "a", "prompt_ids": PROMPT}, {"prompt_ids": [7], "max_new_tokens": 3})
    done = generate("--input", rows, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 6)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("specjax: 2 rows; 9 tokens, ")
    assert done.err.count("\n") == 1
    out = read_rows(tmp_path / "out.jsonl")
    assert set(out) == {"a", 2}
    assert list(out["a"]) == ["id", "text", "ids", "finish_reason", "stats"]
    assert (out["a"]["text"], len(out["a"]["ids"]), out["a"]["finish_reason"]) == (None, 6, "length")
    assert len(out[2]["ids"]) == 3
    counters = ["num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"]
    rates = ["mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram"]
    assert {*counters, *rates} < set(out["a"]["stats"])
    assert out["a"]["stats"]["speculation"] == "on"


def test_rows_go_to_standard_output_without_an_output(generate, rows_file):
    done = generate("--input", rows_file({"prompt_ids": PROMPT}), "--max-new-tokens", 2)
    assert [len(row["ids"]) for row in done.rows] == [2]


def test_rows_come_from_standard_input(generate, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt_ids": [5, 17]}\n')))
    assert [row["id"] for row in generate("--input", "-", "--max-new-tokens", 1).rows] == [1]


def test_the_ids_are_those_of_plain_decoding_with_every_draft(generate, rows_file):
    rows = rows_file({"prompt_ids": PROMPT})
    texts = []
    for draft in ("none", "ngram", DATA / "llama-gqa-tied.draft-near"):
        done = generate("--input", rows, "--draft", draft, "--gamma", 3, "--max-new-tokens", 24, "--check")
        assert done.code == 0
        (row,) = done.rows
        texts.append(row["ids"])
        assert row["stats"]["speculation"] == ("off: no draft" if draft == "none" else "on")
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 24
    assert row["stats"]["num_accepted_tokens"] > 0


@pytest.mark.slow
def test_samples_are_numbered_and_differ(generate, rows_file, tmp_path):
    rows = rows_file({"id": "x", "prompt_ids": PROMPT}, {"id": "y", "prompt_ids": []})
    output = tmp_path / "out.jsonl"
    done = generate("--input", rows, "--output", output, "--samples", 3, "--temperature", 9, "--max-new-tokens", 8)
    assert done.code == 0
    out = read_rows(output)
    assert set(out) == {(name, sample) for name in "xy" for sample in range(3)}
    assert len({tuple(out["x", sample]["ids"]) for sample in range(3)}) > 1
    again = generate("--input", rows, "--samples", 3, "--temperature", 9, "--max-new-tokens", 8, "--batch-size", 2)
    assert {(row["id"], row["sample"]): row["ids"] for row in again.rows} == {
        key: row["ids"] for key, row in out.items()
    }
    other = generate("--input", rows, "--temperature", 9, "--max-new-tokens", 8, "--seed", 1)
    assert other.rows[0]["ids"] != out["x", 0]["ids"]
    assert "sample" not in other.rows[0]


def test_logprobs_are_one_per_id_and_only_when_asked_for(generate, rows_file):
    rows = rows_file({"prompt_ids": PROMPT})
    (row,) = generate("--input", rows, "--logprobs", "--max-new-tokens", 7).rows
    assert len(row["logprobs"]) == len(row["ids"]) == 7
    assert all(value < 0 and math.isfinite(value) for value in row["logprobs"])
    assert list(row) == ["id", "text", "ids", "finish_reason", "logprobs", "sampled_logprobs", "stats"]
    assert row["sampled_logprobs"] == [0.0] * 7  # the likeliest token is certain at temperature 0


def test_an_output_that_exists_is_refused_before_any_work(generate, rows_file, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    rows = rows_file({"prompt_ids": PROMPT})
    done = generate("--input", rows, "--output", output)
    assert done.code == 2
    assert "exists: pass --overwrite" in done.err
    assert output.read_text() == "precious\n"
    assert generate("--input", rows, "--output", output, "--overwrite", "--max-new-tokens", 1).code == 0
    assert len(read_rows(output)) == 1


def test_a_missing_draft_is_a_warning_and_decoding_goes_on(generate, rows_file, tmp_path):
    rows = rows_file({"prompt_ids": PROMPT})
    done = generate("--input", rows, "--draft", tmp_path / "nowhere", "--max-new-tokens", 2)
    assert done.code == 0
    assert sum(line.startswith("specjax: warning: Draft ") for line in done.err.splitlines()) == 1
    assert done.rows[0]["stats"]["speculation"].startswith("off: draft missing")
    required = generate("--input", rows, "--draft", tmp_path / "nowhere", "--require-draft")
    assert (required.code, required.out) == (2, "")
    assert required.err.startswith("specjax: error: Draft ")


def test_a_draft_with_another_tokenizer_is_a_wrong_call(say, model, tmp_path):
    other = with_tokenizer(model, tmp_path / "other", "metaspace")
    done = say("hello", "--draft", other)
    assert (done.code, done.out) == (2, "")
    assert "a draft must share its target's tokenizer" in done.err


def test_bad_rows_fail_alone_with_their_line_numbers(generate, rows_file, tmp_path):
    rows = rows_file(
        {"id": "good", "prompt_ids": PROMPT},
        "",
        "{not json",
        {"id": "odd", "prompt_ids": PROMPT, "top_q": 1},
        {"id": "far", "prompt_ids": [5, 320]},
        {"id": "words", "prompt": "hello"},
        {"id": "eos", "prompt_ids": PROMPT, "eos": [320]},
        {"id": "last", "prompt_ids": [9]},
    )
    output = tmp_path / "out.jsonl"
    done = generate("--input", rows, "--output", output, "--max-new-tokens", 2)
    assert done.code == 1
    assert "8 rows" not in done.err
    assert "7 rows, 5 of them failed" in done.err
    out = read_rows(output)
    assert {name for name, row in out.items() if "error" not in row} == {"good", "last"}
    assert out[None]["error"].startswith("line 3: not JSON")
    assert out["odd"]["error"].startswith("line 4: unknown field")
    assert "320" in out["far"]["error"]
    assert "no tokenizer" in out["words"]["error"]
    assert "320" in out["eos"]["error"]
    failed = out["odd"]
    assert (failed["ids"], failed["text"], failed["finish_reason"]) == ([], None, "error")


def test_two_rows_of_one_id_are_a_wrong_call(generate, rows_file):
    done = generate("--input", rows_file({"id": 2, "prompt_ids": [1]}, {"prompt_ids": [2]}))
    assert (done.code, done.out) == (2, "")
    assert "Lines 1 and 2" in done.err


def test_a_prompt_as_long_as_the_cache_names_both_numbers(generate, rows_file):
    rows = rows_file({"prompt_ids": [5] * 12}, {"prompt_ids": [5] * 11})
    done = generate("--input", rows, "--cache-length", 12)
    assert done.code == 1
    assert "12 tokens" in done.rows[0]["error"]
    assert "cache length is 12" in done.rows[0]["error"]
    assert (len(done.rows[1]["ids"]), done.rows[1]["finish_reason"]) == (1, "length")


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_a_row_ends_at_the_cache_length_exactly(generate, rows_file, gamma):
    rows = rows_file({"prompt_ids": PROMPT})
    done = generate("--input", rows, "--cache-length", 20, "--gamma", gamma, "--check")
    assert [(len(row["ids"]), row["finish_reason"]) for row in done.rows] == [(15, "length")]


def test_no_new_tokens_is_no_ids(generate, rows_file):
    (row,) = generate("--input", rows_file({"prompt_ids": PROMPT}), "--max-new-tokens", 0).rows
    assert (row["ids"], row["finish_reason"], row["stats"]["mean_acceptance_length"]) == ([], "length", None)


def test_an_empty_input_is_an_empty_output(generate, rows_file, tmp_path):
    done = generate("--input", rows_file(), "--output", tmp_path / "out.jsonl")
    assert (done.code, (tmp_path / "out.jsonl").read_text()) == (0, "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gamma", "-1"], "gamma is -1"),
        (["--gamma", "65"], "gamma is 65; expected 0..64"),
        (["--width", "4"], "width is 4; expected more than gamma, 4"),
        (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--samples", "0"], "samples is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--cache-length", "513"], "cache_length is 513; expected 1..512"),
        (["--rule", "greedy", "--temperature", "1"], "rule greedy serves temperature 0 only"),
        (["--eos", "5", "320"], "eos has 320"),
        (["--stop", ""], "stop has ''"),
    ],
)
def test_a_value_out_of_range_is_a_wrong_call(generate, rows_file, tmp_path, options, words):
    output = tmp_path / "out.jsonl"
    done = generate("--input", rows_file({"prompt_ids": PROMPT}), "--output", output, *options)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert words in done.err
    assert list(tmp_path.glob("out*")) == []


def test_eos_ends_a_row_and_ignore_eos_does_not(generate, rows_file):
    rows = rows_file({"prompt_ids": PROMPT})
    hot = ["--temperature", 9, "--max-new-tokens", 10]
    free = generate("--input", rows, *hot, "--ignore-eos").rows[0]
    assert (len(free["ids"]), free["finish_reason"]) == (10, "length")
    first = next(i for i, token in enumerate(free["ids"]) if i and token not in free["ids"][:i])
    for flags in (["--eos", free["ids"][first]], ["--eos", 0, 1, "--eos", free["ids"][first]]):
        ended = generate("--input", rows, *hot, *flags).rows[0]
        assert (ended["ids"], ended["finish_reason"]) == (free["ids"][: first + 1], "eos")


# Text


def test_prompts_are_streamed_as_the_text_of_their_rows(say, tmp_path):
    shown = say("hello", "--max-new-tokens", 24)
    assert shown.code == 0
    line = shown.err
    assert line.startswith("specjax: 24 tokens, ")
    assert line.count("\n") == 1
    assert all(words in line for words in ("tokens/s", "mean acceptance length", "acceptance rate", "per target pass"))
    written = say("hello", "--max-new-tokens", 24, "--output", tmp_path / "out.jsonl")
    assert (written.code, written.out) == (0, "")
    (row,) = read_rows(tmp_path / "out.jsonl").values()
    assert row["id"] == 1
    assert row["text"]
    assert shown.out == row["text"] + "\n"


def test_text_comes_before_the_end(say, monkeypatch):
    pieces = []
    original = command._Screen.text
    monkeypatch.setattr(command._Screen, "text", lambda self, i, text: (pieces.append(text), original(self, i, text)))
    done = say("hello", "--max-new-tokens", 64, "--draft", "none")
    assert sum(bool(piece) for piece in pieces) > 4
    assert "".join(pieces) + "\n" == done.out


def test_several_prompts_have_headings(say):
    one, two = (say(text, "--max-new-tokens", 6).out for text in ("hello", "the\nworld"))
    both = say("hello", "the\nworld", "--max-new-tokens", 6)
    assert both.out == f"[1] hello\n{one}\n[2] the world\n{two}"
    samples = say("hello", "--samples", 2, "--max-new-tokens", 6)
    assert samples.out == f"[1, sample 0] hello\n{one}\n[1, sample 1] hello\n{one}"


def test_a_prompt_is_a_chat_unless_raw(say, text_model):
    tokenizer = load_tokenizer(text_model)
    longest = len(tokenizer.encode_chat([{"role": "user", "content": "hello"}]))
    assert say("hello", "--cache-length", longest + 1).code == 0
    done = say("hello", "--cache-length", longest)
    assert (done.code, done.out) == (1, "")
    assert f"prompt 1: The prompt has {longest} tokens" in done.err
    assert say("hello", "--raw", "--cache-length", len(tokenizer.encode("hello")) + 1).code == 0


def test_prompts_come_first_or_after_two_dashes(specjax, text_model):
    options = ["--target", text_model, "--max-new-tokens", 2]
    first = specjax("generate", "hello", *options, "--stop", "§", "¶")
    last = specjax("generate", *options, "--stop", "§", "¶", "--stop", "@@@", "--", "hello")
    dashes = specjax("generate", *options, "--", "hello", "--hello")
    assert (first.code, last.code, dashes.code) == (0, 0, 0)
    assert last.out == first.out
    assert "[2] --hello" in dashes.out


def test_a_stop_ends_the_text_and_is_left_out(say, text_model, tmp_path):
    hot = ["--temperature", 9, "--max-new-tokens", 40]
    whole = say("hello", *hot).out[:-1]
    pairs = (whole[i : i + 2] for i in range(5, len(whole) - 1))
    stop = next(pair for pair in pairs if "\ufffd" not in pair and pair.isprintable())
    stopped = say("hello", *hot, "--stop", "never to be found", "--stop", stop)
    assert stopped.out == whole[: whole.index(stop)] + "\n"
    say("hello", *hot, "--stop", stop, "--output", tmp_path / "out.jsonl")
    (row,) = read_rows(tmp_path / "out.jsonl").values()
    assert (row["finish_reason"], row["text"]) == ("stop", stopped.out[:-1])
    assert stop in load_tokenizer(text_model).decode(row["ids"])
    assert len(row["ids"]) < 40


@pytest.mark.slow
def test_a_prefix_stands_before_every_prompt(say, rows_file, tmp_path):
    """The same bits as with prompts that have it in them; as a system message of chats."""
    shared = "Once upon a time there was a fox. " * 12
    (tmp_path / "prefix.txt").write_text(shared)
    texts = ["It ran", "It slept", ""]
    rows = [{"id": i, "prompt": text} for i, text in enumerate(texts)]
    rows += [{"id": 3, "messages": [{"role": "user", "content": "Go on."}]}, {"id": 4, "prompt_ids": [7, 9]}]
    flags = ["--max-new-tokens", 8, "--logprobs"]
    found = say("--input", rows_file(*rows), "--prefix", tmp_path / "prefix.txt", *flags)
    assert found.code == 0
    whole = [{"id": i, "prompt": shared + text} for i, text in enumerate(texts)]
    whole.append({"id": 3, "messages": [{"role": "system", "content": shared}, *rows[3]["messages"]]})
    wanted = say("--input", rows_file(*whole), *flags)
    pick = {row["id"]: (row["ids"], row["logprobs"]) for row in found.rows}
    assert {row["id"]: (row["ids"], row["logprobs"]) for row in wanted.rows} == {i: pick[i] for i in range(4)}
    own = rows_file({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]})
    refused = say("--input", own, "--prefix", tmp_path / "prefix.txt")
    assert "system message of its own" in refused.rows[0]["error"]
    assert "Cannot read the prefix" in say("hello", "--prefix", tmp_path / "nowhere").err


def test_line_separators_of_unicode_stay_in_the_prompt(say, rows_file):
    text = "a\u2028b\u2029c\x85d"
    rows = rows_file({"id": 1, "prompt": text}, {"id": 2, "messages": [{"role": "user", "content": text}]})
    done = say("--input", rows, "--max-new-tokens", 8)
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    raw, chat = sorted(done.rows, key=lambda row: row["id"])
    assert say(text, "--raw", "--max-new-tokens", 8).out == raw["text"] + "\n"
    assert say(text, "--max-new-tokens", 8).out == chat["text"] + "\n"


def test_a_pair_file_names_target_and_draft(specjax, text_model, tmp_path):
    shutil.copytree(text_model, tmp_path / "model")
    (tmp_path / "mine.toml").write_text('target = "model"\ndraft = "ngram"\ngamma = 2\n')
    output = tmp_path / "out.jsonl"
    done = specjax("generate", "hello", "--pair", tmp_path / "mine.toml", "--max-new-tokens", 9, "--output", output)
    assert done.code == 0
    (row,) = read_rows(output).values()
    assert len(row["stats"]["acceptance_histogram"]) == 3


def test_the_real_command(text_model, tmp_path):
    command_line = [sys.executable, "-m", "specjax", "generate", "hello", "--target", str(text_model)]
    done = subprocess.run([*command_line, "--max-new-tokens", "8"], capture_output=True, cwd=tmp_path,
                          env={**os.environ, "SPECJAX_CACHE": str(tmp_path)}, encoding="utf-8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    assert done.stderr.startswith("specjax: 8 tokens, ")
    assert done.stderr.count("\n") == 1
    assert any((tmp_path / "xla").iterdir())
