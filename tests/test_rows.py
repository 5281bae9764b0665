"""Rows in: each line is a row or says what is wrong with it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types

import pytest

from specjax.errors import UsageError
from specjax.rows import (
    SETTINGS,
    BadRow,
    Row,
    ScoreRow,
    parse_rows,
    parse_score_rows,
    read_rows,
    read_score_rows,
    refuse_duplicates,
    stable_id,
)


def one(line: str | bytes | dict):
    content = (
        json.dumps(line).encode() if isinstance(line, dict) else line if isinstance(line, bytes) else line.encode()
    )
    rows = parse_rows(content)
    assert len(rows) == 1
    return rows[0]


def test_a_row_with_every_setting():
    line = {"id": "a", "prompt": "x", "max_new_tokens": 0, "temperature": 1, "eos": [1, 2], "stop": "s", "seed": 5}
    assert one(line) == Row("a", 1, prompt="x", max_new_tokens=0, temperature=1.0, eos=(1, 2), stop=("s",), seed=5)
    assert one({"prompt_ids": [1, 2], "eos": 3, "stop": ["a", "b"]}) == Row(
        1, 1, prompt_ids=(1, 2), eos=(3,), stop=("a", "b")
    )
    messages = [{"role": "user", "content": "x"}]
    assert one({"messages": messages}) == Row(1, 1, messages=messages)
    assert one({"prompt": "", "stop": [], "eos": []}) == Row(1, 1, prompt="", stop=(), eos=())


def test_only_a_line_feed_ends_a_line():
    prompt = "a\u2028b\x85c\u2029d"
    content = json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" + json.dumps({"prompt": "next"})
    assert [row.prompt for row in parse_rows(content.encode())] == [prompt, "next"]


def test_blank_lines_are_skipped_and_bad_lines_have_their_true_number():
    content = b'\xef\xbb\xbf\n  \n{"prompt": "a"}\r\n\r\n{"prompt"\n\n{"prompt": "b", "id": "b"}\n\xff\n'
    rows = parse_rows(content)
    assert [(row.id, row.line) for row in rows] == [(3, 3), (None, 5), ("b", 7), (None, 8)]
    assert [type(row) for row in rows] == [Row, BadRow, Row, BadRow]
    assert rows[1].message == "line 5: not JSON: Expecting ':' delimiter at character 10."
    assert rows[3].message == "line 8: not UTF-8 at byte 1 of the line."


def test_an_empty_file_has_no_rows():
    assert parse_rows(b"") == parse_rows(b"\n \r\n") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "expected an object, got [1]."),
        ('{"prompt": NaN}', "not JSON: NaN is no number."),
        ('{"prompt": "a", "prompt": "b"}', '"prompt" is given twice.'),
        ("[" * 100_000, "not JSON that can be read: nested too deeply."),
        ({}, "expected exactly one of prompt, prompt_ids, messages, got none."),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of prompt, prompt_ids, messages, got prompt and prompt_ids."),
        ({"prompt": "a", "tempurature": 1}, 'unknown field "tempurature"; known are id, prompt,'),
        ({"text": "a"}, 'unknown field "text"'),
        ({"prompt": None}, "prompt must be text, got null."),
        ({"prompt": "\ud800"}, "prompt holds half a character"),
        ({"prompt_ids": "1"}, 'prompt_ids must be a list of token ids, got "1".'),
        ({"prompt_ids": [1, True]}, "prompt_ids[1] must be an integer from 0 to 2147483647, got true."),
        ({"prompt_ids": [-1]}, "prompt_ids[0] must be an integer"),
        ({"prompt_ids": [2**31]}, "prompt_ids[0] must be an integer"),
        ({"messages": []}, "messages must be a list of at least one message, got []."),
        ({"messages": "hi"}, "messages must be a list"),
        ({"prompt": "a", "id": 1.5}, "id must be text or an integer, got 1.5."),
        ({"prompt": "a", "id": True}, "id must be text or an integer, got true."),
        ({"prompt": "a", "id": None}, "id must be text or an integer, got null."),
        ({"prompt": "a", "max_new_tokens": -1}, "max_new_tokens must be an integer from 0 to 2147483647, got -1."),
        ({"prompt": "a", "max_new_tokens": 2.0}, "got 2.0."),
        ({"prompt": "a", "max_new_tokens": None}, "got null."),
        ({"prompt": "a", "temperature": -0.1}, "temperature must be a finite number of at least 0, got -0.1."),
        ('{"prompt": "a", "temperature": 1e999}', "temperature must be a finite number"),
        ({"prompt": "a", "temperature": 10**400}, "temperature must be a finite number"),
        ({"prompt": "a", "temperature": True}, "temperature must be a finite number"),
        ({"prompt": "a", "temperature": "1"}, "temperature must be a finite number"),
        ({"prompt": "a", "eos": "2"}, 'eos must be an integer from 0 to 2147483647, got "2".'),
        ({"prompt": "a", "eos": [1, -2]}, "eos[1] must be an integer"),
        ({"prompt": "a", "stop": ""}, "stop must be text that is not empty"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop must be text, got 1."),
        ({"prompt": "a", "top_p": "0.9"}, 'top_p must be a finite number, got "0.9".'),
        ({"prompt": "a", "top_k": -1}, "top_k must be an integer from 0 to"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias must be an object of token ids and numbers"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 'logit_bias has the key "x"; expected token ids.'),
        ({"prompt": "a", "logit_bias": {"1": None}}, "logit_bias[1] must be a finite number, got null."),
        ({"prompt": "a", "allow": [1, -1]}, "allow[1] must be an integer"),
        ({"prompt": "a", "seed": -1}, "seed must be an integer from 0 to 4294967295, got -1."),
        ({"prompt": "a", "seed": 2**32}, "seed must be an integer"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not JSON that can be read"),
    ],
)
def test_a_bad_row_says_what_is_wrong(line, message):
    row = one(line)
    assert isinstance(row, BadRow)
    assert row.message.startswith("line 1: ")
    assert message in row.message
    assert "\n" not in row.message
    assert len(row.message) < 250


def test_the_id_of_a_bad_row_is_kept_where_it_is_known():
    assert one({"id": "x", "prompt": 1}).id == "x"
    assert one({"prompt": 1}).id == 1
    assert one({"id": [1], "prompt": "a"}).id is None


def test_every_setting_is_a_field():
    assert set(SETTINGS) <= set(Row.__dataclass_fields__)


@pytest.mark.parametrize(
    "content",
    [
        '{"id": "a", "prompt": ""}\n\n{"id": "a", "prompt": ""}',
        '{"id": 3, "prompt": ""}\n\n{"prompt": ""}',
        '{"id": "a", "prompt": ""}\n\n{"id": "\\u0061", "prompt": 1}',
    ],
)
def test_duplicate_ids_name_both_lines(content):
    with pytest.raises(UsageError, match=r"Lines 1 and 3 of in\.jsonl both have the id"):
        parse_rows(content.encode(), "in.jsonl")


def test_ids_are_equal_as_json_only():
    rows = parse_rows(b'{"id": "1", "prompt": ""}\n{"id": 1, "prompt": ""}\n{"prompt"\n{"prompt"')
    assert [row.id for row in rows] == ["1", 1, None, None]
    refuse_duplicates(rows)
    assert [stable_id(name) for name in (1, "1", "é")] == ["1", '"1"', '"\\u00e9"']


def test_a_dict_is_checked_like_a_line():
    record = {"id": "a", "prompt_ids": (1, 2), "eos": (3,), "stop": ("s",)}
    assert Row.from_dict(record, line=4) == Row("a", 4, prompt_ids=(1, 2), eos=(3,), stop=("s",))
    assert record["id"] == "a"
    assert Row.from_dict({"prompt": "a"}, line=4).id == 4
    assert Row.from_dict({"prompt": object()}, line=4) == BadRow(4, 4, "line 4: prompt must be text, got a object.")


def test_score_rows():
    rows = parse_score_rows(b'{"id": "a", "ids": [1, 2]}\n{"ids": []}\n{"id": 9}\n{"ids": [1], "top_k": 1}')
    assert rows[:2] == [ScoreRow("a", 1, (1, 2)), ScoreRow(2, 2, ())]
    assert [row.message for row in rows[2:]] == [
        "line 3: expected ids, a list of token ids, got none.",
        'line 4: unknown field "top_k"; known are id, ids.',
    ]


def test_reading_files_and_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n')
    assert read_rows(path) == read_rows(str(path)) == [Row(1, 1, prompt="a")]
    stdin = types.SimpleNamespace(buffer=io.BytesIO(b'{"ids": [1]}'))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_score_rows("-") == [ScoreRow(1, 1, (1,))]
    with pytest.raises(UsageError, match=r"Cannot read the input .*none: No such file"):
        read_rows(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        read_rows(tmp_path)


def test_rows_and_outputs_load_nothing_heavy():
    code = "import sys, specjax.rows, specjax.outputs; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "specjax.outputs" in loaded
    assert not {"jax", "numpy", "tokenizers", "jinja2"} & set(loaded)
