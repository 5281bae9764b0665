"""Jobs: parts, manifest, resume; what stops goes on, and another job is refused."""

from __future__ import annotations

import json
import os

import pytest
from letters import DRAFT, pair
from runs import ROWS, Stopper, answers, read, run

from specjax.errors import SpecjaxError, UsageError
from specjax.jobs import parts, place


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The answers of a run that nothing disturbs."""
    path = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run(path)
    return answers(read(path))


def stopped(path, count: int, **options):
    """Run a job until ``count`` rows are there."""
    stop = Stopper(count)
    return run(path, stop=stop, on_output=stop.row, **options)


def test_a_file_is_complete_with_its_manifest_beside_it(tmp_path, undisturbed):
    result = run(tmp_path / "out.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.manifest.json"]
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest == json.loads(json.dumps(result.manifest))
    assert manifest["status"] == "complete"
    assert manifest["rows"] == {"expected": 24, "done": 24, "failed": 0, "finish_reason": {"length": 24}}
    assert manifest["acceptance"]["num_tokens"] == sum(row["max_new_tokens"] for row in ROWS)
    assert 0 < manifest["acceptance"]["num_accepted_tokens"] < manifest["acceptance"]["num_draft_tokens"]
    assert manifest["runs"][0]["rows"] == 24
    assert {"specjax", "jax", "python", "device"} <= set(manifest["versions"])
    assert len(undisturbed) == 24


def test_a_folder_holds_parts_of_whole_rows_and_its_manifest(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setattr(parts, "ROWS", 10)
    run(tmp_path / "out")
    names = [f"part-00000-{i:05d}.jsonl" for i in range(3)]
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", *names]
    assert [len(read(tmp_path / "out" / name)) for name in names] == [10, 10, 4]
    assert answers(read(tmp_path / "out")) == undisturbed


def test_the_manifest_stands_from_the_start(tmp_path):
    seen = []

    def look(output):
        seen.append(json.loads((tmp_path / "out" / "manifest.json").read_text()))

    run(tmp_path / "out", ROWS[:2], on_output=look)
    assert [manifest["status"] for manifest in seen] == ["running"] * 2
    assert seen[0]["fingerprint"]


@pytest.mark.parametrize("name", ["out.jsonl", "out"])
def test_a_stopped_job_goes_on_and_every_row_is_there_once(tmp_path, monkeypatch, name, undisturbed):
    monkeypatch.setattr(parts, "ROWS", 3)
    path, rows = tmp_path / name, 0
    for count in (1, 5, 9):
        result = stopped(path, count, resume=rows > 0)
        assert result.stopped
        rows += result.new_rows
        assert result.manifest["rows"]["done"] == rows
        assert rows >= count
        with pytest.raises(UsageError, match="--resume"):
            run(path)
    result = run(path, resume=True, batch_size=3, chunk=5)
    assert not result.stopped
    assert answers(read(path)) == undisturbed
    assert len(result.manifest["runs"]) == 4
    assert sum(one["rows"] for one in result.manifest["runs"]) == 24
    assert sum(one["num_tokens"] for one in result.manifest["runs"]) == result.manifest["acceptance"]["num_tokens"]
    again = run(path, resume=True)
    assert (again.new_rows, again.manifest["rows"]["done"]) == (0, 24)


def test_resume_starts_a_job_that_has_not_begun(tmp_path, undisturbed):
    run(tmp_path / "out.jsonl", resume=True)
    assert answers(read(tmp_path / "out.jsonl")) == undisturbed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "settings seed was 0, now 1"),
        ({"gamma": 2}, "settings gamma was 3, now 2"),
        ({"max_new_tokens": 5}, "settings max_new_tokens was 128, now 5"),
        ({"rows": ROWS[:23]}, "another input"),
        ({"of": pair(draft_table=DRAFT + 1)}, "other draft weights"),
        ({"of": pair("ngram")}, 'draft name was "small", now "ngram"'),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_another_job_is_refused(tmp_path, change, words, complete):
    path = tmp_path / "out.jsonl"
    if complete:
        run(path, ROWS)
    else:
        stopped(path, 2)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError, match="another job") as caught:
        run(path, change.get("rows", ROWS), resume=True, **{k: v for k, v in change.items() if k != "rows"})
    assert words in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_wrong_option_leaves_nothing(tmp_path):
    with pytest.raises(UsageError):
        run(tmp_path / "out.jsonl", cache_length=1000)
    assert os.listdir(tmp_path) == []


def test_overwrite_drops_what_is_there(tmp_path, undisturbed):
    for name in ("out.jsonl", "out"):
        stopped(tmp_path / name, 3, seed=1)
        run(tmp_path / name, overwrite=True)
        assert answers(read(tmp_path / name)) == undisturbed
        run(tmp_path / name, overwrite=True, seed=1)
        assert answers(read(tmp_path / name)) != undisturbed


def test_a_run_that_replaces_a_file_keeps_it_until_the_end(tmp_path, undisturbed):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(UsageError, match="--overwrite"):
        run(path)
    with pytest.raises(UsageError, match="no manifest"):
        run(path, resume=True)
    stopped(path, 3, overwrite=True)
    assert path.read_text() == "old\n"
    run(path, resume=True)
    assert answers(read(path)) == undisturbed


def test_a_file_made_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(SpecjaxError, match="meanwhile"):
        run(path, on_output=lambda output: path.write_text("theirs\n"))
    assert path.read_text() == "theirs\n"
    path.unlink()
    run(path, resume=True)
    assert len(read(path)) == 24


def test_a_death_while_the_file_is_completed_is_made_good(tmp_path, monkeypatch, undisturbed):
    """Wherever it strikes: before the file has its name, after it, and between its parts' removal."""
    for step in ("join", "remove", "drop"):
        path = tmp_path / f"{step}.jsonl"

        def die(self, *arguments, step=step):
            if step == "remove":  # the manifest goes first
                (self.path / "manifest.json").unlink()
            raise SystemExit

        with monkeypatch.context() as patch:
            patch.setattr("specjax.jobs.folder.Folder." + step, die)
            with pytest.raises(SystemExit):
                run(path)
        run(path, resume=True)
        assert answers(read(path)) == undisturbed
        assert not (tmp_path / f"{path.name}.parts").exists()


def test_a_second_run_on_one_output_is_refused(tmp_path):
    def second(output):
        with pytest.raises(UsageError, match="Another run is writing"):
            run(tmp_path / "out", ROWS[:2], resume=True)

    run(tmp_path / "out", ROWS[:2], on_output=second)
    assert len(read(tmp_path / "out")) == 2


def test_samples_and_rows_without_an_id_are_resumed_too(tmp_path):
    """Bad lines are known by their number."""
    rows = [{"prompt": "ab"}, {"id": [1]}, {"id": "x", "prompt": "abc", "typo": 1}, {"id": True}, {"prompt": "b"}]
    run(tmp_path / "whole.jsonl", rows, samples=2, max_new_tokens=9)
    for count in (1, 7):
        stop = Stopper(count)
        result = run(tmp_path / "out.jsonl", rows, samples=2, max_new_tokens=9, resume=count > 1, stop=stop,
                     on_output=stop.row)  # fmt: skip
    result = run(tmp_path / "out.jsonl", rows, samples=2, max_new_tokens=9, resume=True)
    lines = [sorted(read(tmp_path / name), key=json.dumps) for name in ("whole.jsonl", "out.jsonl")]
    assert lines[0] == lines[1]
    assert (len(lines[0]), result.failed) == (10, 6)
    assert (
        sorted(row["error"].split(":")[0] for row in lines[0] if row["id"] is None) == ["line 2"] * 2 + ["line 4"] * 2
    )


def test_an_empty_input_is_an_empty_output(tmp_path):
    run(tmp_path / "out.jsonl", [])
    result = run(tmp_path / "out", [])
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert os.listdir(tmp_path / "out") == ["manifest.json"]
    assert result.manifest["rows"]["expected"] == 0


def test_draft_work_past_a_stop_is_counted_as_wasted(tmp_path):
    rows = [{"prompt": "abc", "stop": letter} for letter in "abcdefgh"]
    result = run(tmp_path / "out.jsonl", rows, chunk=64, max_new_tokens=50)
    stopped_rows = [row for row in read(tmp_path / "out.jsonl") if row["finish_reason"] == "stop"]
    assert stopped_rows
    wasted = result.manifest["wasted"]
    assert wasted["num_tokens"] == sum(50 - len(row["ids"]) for row in stopped_rows)
    assert wasted["num_draft_tokens"] > 0


def test_a_broken_part_is_named(tmp_path):
    stopped(tmp_path / "out", 3)
    part = next((tmp_path / "out").glob("part-*"))
    part.write_text(part.read_text()[:-9])
    with pytest.raises(SpecjaxError, match=r"part-00000-00000.jsonl line \d+ is no row"):
        run(tmp_path / "out", resume=True)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    for resume in (False, True):
        with pytest.raises(UsageError, match="is not empty"):
            run(tmp_path / "out", resume=resume)
    run(tmp_path / "out", ROWS[:1], overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", "part-00000-00000.jsonl", "precious"]
    with pytest.raises(UsageError, match="does not exist"):
        run(tmp_path / "no" / "out")


@pytest.mark.parametrize(
    ("path", "folder"), [("x.jsonl", False), ("x", True), ("x/", True), ("gs://b/x", True), ("gs://b/x.jsonl", False)]
)
def test_a_name_without_a_suffix_is_a_folder(path, folder):
    assert place.names_a_folder(path) == folder
