"""Folders: a file is there whole or not at all, on a disk and in a bucket; full and unwritable ones."""

from __future__ import annotations

import errno
import os

import pytest
from etils import epath
from runs import ROWS, answers, read, run

from specjax.errors import SpecjaxError, UsageError
from specjax.jobs import folder as folders
from specjax.jobs import parts
from specjax.jobs.folder import Folder, RemoteFolder, open_folder
from specjax.rows import read_rows


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Keep gs:// objects in a folder here."""
    (tmp_path / "bucket").mkdir()
    monkeypatch.setattr(folders, "remote_path", lambda path: epath.Path(path.replace("gs://", f"{tmp_path}/")))
    monkeypatch.setattr("specjax.jobs.place.remote_path", folders.remote_path)
    return tmp_path / "bucket"


@pytest.fixture
def full_disk(monkeypatch):
    """Return ``fill(bytes)``: after so many more bytes the disk is full."""

    def fill(left: int) -> None:
        real = os.write

        def write(fd, data):
            nonlocal left
            if left <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = real(fd, data[:left])
            left -= count
            return count

        monkeypatch.setattr(folders.os, "write", write)

    return fill


def test_a_full_disk_stops_the_job_and_leaves_whole_rows(tmp_path, monkeypatch, full_disk):
    monkeypatch.setattr(parts, "ROWS", 5)
    run(tmp_path / "whole.jsonl")
    full_disk(6_000)
    with pytest.raises(SpecjaxError, match=r"No space left on device\. \d+ rows are whole in .*--resume") as caught:
        run(tmp_path / "out")
    assert caught.value.exit_code == 1
    kept = read(tmp_path / "out")
    assert len(kept) % 5 == 0
    assert 0 < len(kept) < len(ROWS)
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".tmp")]
    assert sorted(os.listdir(tmp_path / "out"))[0] == "manifest.json"
    monkeypatch.undo()
    run(tmp_path / "out", resume=True)
    assert answers(read(tmp_path / "out")) == answers(read(tmp_path / "whole.jsonl"))


def test_an_output_that_cannot_be_written_is_a_wrong_call(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders.Path, "mkdir", refuse)  # a folder's mode does not bind root
    with pytest.raises(UsageError, match=r"Cannot write the output .*Permission denied"):
        run(tmp_path / "out")
    monkeypatch.setattr("specjax.jobs.place.os.access", lambda *_: False)
    with pytest.raises(UsageError, match="no permission"):
        run(tmp_path / "out.jsonl")


def test_a_folder_that_becomes_unwritable_stops_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROWS", 5)
    replace, done = os.replace, []

    def fail(source, target):
        if len(done) == 3:
            raise OSError(errno.EROFS, "Read-only file system")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(folders.os, "replace", fail)
    with pytest.raises(SpecjaxError, match="Read-only file system") as caught:
        run(tmp_path / "out")
    assert caught.value.exit_code == 1
    assert len(read(tmp_path / "out")) == 10


def test_half_written_files_do_not_count(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / "part-00000-00000.jsonl.tmp").write_text("{")
    assert folder.names() == []
    folder.make()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_a_bucket_has_one_object_per_file(bucket, tmp_path, monkeypatch, name):
    monkeypatch.setattr(parts, "ROWS", 10)
    run(tmp_path / "whole.jsonl")
    url = f"gs://bucket/{name}"

    class Stop:
        rows = 0

        def row(self, output):
            Stop.rows += 1

        def __call__(self):
            return Stop.rows >= 12

    stop = Stop()
    assert run(url, stop=stop, on_output=stop.row).stopped
    with pytest.raises(UsageError, match="--resume"):
        run(url)
    result = run(url, resume=True)
    assert 12 > result.new_rows > 0
    if name == "out":
        assert sorted(os.listdir(bucket / "out")) == ["manifest.json", *(f"part-00000-0000{i}.jsonl" for i in range(4))]
    else:
        assert {"out.jsonl", "out.jsonl.manifest.json"} <= set(os.listdir(bucket))
    assert answers(read(bucket / name)) == answers(read(tmp_path / "whole.jsonl"))
    assert run(url, resume=True).new_rows == 0


def test_rows_are_read_from_a_bucket(bucket):
    (bucket / "rows.jsonl").write_text('{"id": "x", "prompt": "ab"}\n')
    assert [row.id for row in read_rows("gs://bucket/rows.jsonl")] == ["x"]
    with pytest.raises(UsageError, match="Cannot reach gs://bucket/none"):
        read_rows("gs://bucket/none")
    with pytest.raises(UsageError, match="begins with gs://"):
        read_rows("ftp://bucket/none")


def test_a_bucket_that_cannot_be_reached_is_one_line(monkeypatch):
    class Down:
        def exists(self):
            raise RuntimeError("no credentials\nand a long trace")

    monkeypatch.setattr(folders, "remote_path", lambda path: Down())
    with pytest.raises(SpecjaxError, match=r"^Cannot reach gs://b/x: no credentials$"):
        RemoteFolder("gs://b/x").exists()
    assert isinstance(open_folder("gs://b/x"), RemoteFolder)
    assert isinstance(open_folder("b/x"), Folder)
