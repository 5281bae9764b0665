"""Writing rows: nothing written is lost, nothing half-written has a final name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specjax import outputs
from specjax.errors import SpecjaxError, UsageError
from specjax.outputs import RowWriter, json_line, result_row

ROW = {"id": 1, "text": "a"}
LINE = '{"id":1,"text":"a"}\n'


def interrupt(writer: RowWriter, error: BaseException) -> None:
    """Write one row, then end in an error."""
    with writer:
        writer.write(ROW)
        raise error


def test_rows_get_their_final_name_at_the_end(tmp_path):
    out = tmp_path / "out.jsonl"
    with RowWriter(out) as writer:
        writer.write(ROW)
        assert not out.exists()
        assert (tmp_path / "out.jsonl.partial").read_text() == LINE  # each row as it comes
        writer.write(ROW)
    assert out.read_text() == LINE * 2
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert writer.count == 2
    with pytest.raises(ValueError, match="closed"):
        writer.write(ROW)


def test_no_rows_is_an_empty_file(tmp_path):
    with RowWriter(tmp_path / "out"):
        pass
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_written_stays(tmp_path, error, capsys):
    out = tmp_path / "out.jsonl"
    with pytest.raises(error):
        interrupt(RowWriter(out), error())
    assert os.listdir(tmp_path) == ["out.jsonl.partial"]
    assert (tmp_path / "out.jsonl.partial").read_text() == LINE
    assert capsys.readouterr().err == f"Rows finished so far (1) are kept in {tmp_path}/out.jsonl.partial.\n"
    with pytest.raises(UsageError, match=r"interrupted run.*--overwrite"):
        RowWriter(out)
    with RowWriter(out, overwrite=True) as writer:
        writer.write({"id": 2})
    assert out.read_text() == '{"id":2}\n'
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_nothing_is_left_when_nothing_was_written(tmp_path, capsys):
    with pytest.raises(RuntimeError), RowWriter(tmp_path / "out"):
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().err == ""


def test_an_existing_output_needs_overwrite(tmp_path):
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(UsageError, match="--overwrite"):
        RowWriter(out)
    assert os.listdir(tmp_path) == ["out"]
    kept = []
    with pytest.raises(RuntimeError):
        interrupt(RowWriter(out, overwrite=True, report=kept.append), RuntimeError())
    assert out.read_text() == "old"
    assert len(kept) == 1


def test_an_output_made_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out"
    writer = RowWriter(out)
    writer.write(ROW)
    out.write_text("theirs")
    with pytest.raises(SpecjaxError, match=r"meanwhile.*kept in .*out\.partial"):
        writer.close()
    assert out.read_text() == "theirs"
    assert (tmp_path / "out.partial").read_text() == LINE


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "real")
    with RowWriter(tmp_path / "link") as writer:
        writer.write(ROW)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "deep" / "real").read_text() == LINE


def test_wrong_places_are_known_at_the_start(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        RowWriter(tmp_path)
    with pytest.raises(UsageError, match="does not exist: make it first"):
        RowWriter(tmp_path / "no" / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="does not exist: make it first"):
        RowWriter(tmp_path / "file" / "out")


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(outputs.os, "open", refuse)  # folder modes do not bind root
    with pytest.raises(UsageError, match=r"Cannot write the output .*: Permission denied"):
        RowWriter(tmp_path / "out")


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch, capsys):
    writer = RowWriter(tmp_path / "out")
    writer.write(ROW)
    real = os.write

    def half(fd, data):
        if len(data) < len(LINE):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2])

    monkeypatch.setattr(outputs.os, "write", half)
    with pytest.raises(SpecjaxError, match=r"No space left on device \(after 1 rows\)") as caught, writer:
        writer.write(ROW)
    assert caught.value.exit_code == 1
    assert (tmp_path / "out.partial").read_text() == LINE
    assert "kept in" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_devices_are_written_to_directly():
    with pytest.raises(SpecjaxError, match="No space left"), RowWriter("/dev/full") as writer:
        writer.write(ROW)
    with RowWriter("/dev/null") as writer:
        writer.write(ROW)
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("path", ["-", None])
def test_standard_output(path, capsys):
    with RowWriter(path) as writer:
        writer.write(ROW)
        assert capsys.readouterr().out == LINE


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_a_reader_that_leaves_is_one_line(path):
    code = f"""
import sys
from specjax.errors import SpecjaxError
from specjax.outputs import RowWriter
sys.stdin.readline()
try:
    with RowWriter({path!r}) as writer:
        writer.write({{"id": 1}})
except SpecjaxError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert error.startswith("Cannot write to ")
    assert error.count("\n") == 1
    assert "Broken pipe" in error


def test_json_is_one_ascii_line():
    record = {"text": "a\u2028b\u2029c\x85d\n\ud800 你🙂"}
    line = json_line(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == record
    assert json_line({"a": [1, 2.5], "b": None}) == '{"a":[1,2.5],"b":null}'


def test_numbers_that_json_lacks_are_null():
    nan, inf = float("nan"), float("inf")
    line = json_line({"a": [nan, (inf, -inf), {"b": np.float32("nan")}], "c": np.array([1.5, np.inf]), "d": 1})
    assert line == '{"a":[null,[null,null],{"b":null}],"c":[1.5,null],"d":1}'


def test_numpy_is_written_exactly():
    value = np.float32(-0.1)
    assert json.loads(json_line({"x": value, "i": np.int32(3)})) == {"x": float(value), "i": 3}
    with pytest.raises(TypeError, match="object cannot be written"):
        json_line(object())


def test_result_rows_have_their_documented_fields():
    row = result_row(7, text="a", ids=(1, 2), finish_reason="eos", stats={"n": 1})
    assert json_line(row) == '{"id":7,"text":"a","ids":[1,2],"finish_reason":"eos","stats":{"n":1}}'
    row = result_row(
        None, text=None, ids=[], finish_reason="error", stats={}, error="e", sample=0, logprobs=[], top_logprobs=None
    )
    assert list(row) == ["id", "sample", "text", "ids", "finish_reason", "logprobs", "error", "stats"]
    assert row["id"] is None
