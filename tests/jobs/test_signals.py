"""Processes that are killed, stopped and interrupted: nothing is lost, and the exit code says what to do."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import answers, read

from specjax.errors import Terminated
from specjax.jobs.signals import StopSignals

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "llama-gqa-tied"
COUNT = 40


def test_before_the_loop_a_signal_ends_the_work_at_once():
    with StopSignals():
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_in_the_loop_the_first_signal_is_noted_and_the_second_ends_it():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        stop.wait()
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert (stop(), stop.number) == (True, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return ``job(output, *flags)``: the command, started on forty rows, with parts of two rows."""
    folder = tmp_path_factory.mktemp("job")
    generator = random.Random(0)
    rows = [
        {"id": i, "prompt_ids": [generator.randrange(1, 320) for _ in range(4)], "temperature": i % 2,
         "max_new_tokens": 20 + 5 * (i % 7)}
        for i in range(COUNT)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "import sys, specjax.jobs.parts as parts; parts.ROWS = 2; from specjax.cli.main import main; sys.exit(main())"
    )

    def start(output: Path, *flags: str) -> subprocess.Popen:
        arguments = ["generate", "--input", folder / "rows.jsonl", "--output", output, "--target", MODEL, "--draft",
                     f"{MODEL}.draft-mid", "--dtype", "float32", "--gamma", "3", "--batch-size", "4",
                     *flags]  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "SPECJAX_CACHE": str(ROOT / ".cache")},
        )  # fmt: skip

    return start


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """The answers of a run that nothing disturbs, and the seconds from its first part to its end."""
    path = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    process = job(path)
    first = wait_for_parts(path, process, 1)
    assert finish(process) == (0, "")
    return answers(read(path)), time.monotonic() - first


def wait_for_parts(path: Path, process: subprocess.Popen, count: int) -> float:
    """Wait until so many parts are there, or the process has ended; return the time."""
    folder = path.parent / (path.name + ".parts")
    while process.poll() is None and not (folder.is_dir() and len(list(folder.glob("part-*.jsonl"))) >= count):
        time.sleep(0.002)
    return time.monotonic()


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Return how a process ended and its error, if it says one."""
    _, said = process.communicate(timeout=300)
    return process.returncode, "".join(line for line in said.splitlines() if "error" in line or "stopped" in line)


def num_parts(path: Path) -> int:
    """Return how many parts an unfinished output has."""
    return len(list((path.parent / (path.name + ".parts")).glob("part-*.jsonl")))


def kill_and_resume(job, path: Path, undisturbed, kills: int, generator: random.Random) -> int:
    """Kill a job at random moments and resume it each time; return how many kills struck it."""
    whole, seconds = undisturbed
    struck = 0
    for attempt in range(kills):
        process = job(path, *(["--resume"] if attempt else []))
        wait_for_parts(path, process, num_parts(path) + (attempt % 2))
        time.sleep(generator.random() * seconds / 4)
        process.send_signal(signal.SIGKILL)
        struck += finish(process)[0] == -signal.SIGKILL
        if path.exists():
            break
    assert finish(job(path, "--resume"))[0] == 0
    assert answers(read(path)) == whole
    assert sorted(os.listdir(path.parent)) == ["out.jsonl", "out.jsonl.manifest.json"]
    return struck


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing(job, tmp_path, undisturbed):
    generator, struck = random.Random(2), 0
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        struck += kill_and_resume(job, tmp_path / str(number) / "out.jsonl", undisturbed, 20 - struck, generator)
        if struck >= 20:
            return
    raise AssertionError(f"only {struck} of 20 kills struck a running job")


@pytest.mark.slow
def test_a_job_that_is_stopped_interrupted_and_killed_goes_on_each_time(job, tmp_path, undisturbed):
    path = tmp_path / "out.jsonl"
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        before = num_parts(path)
        process = job(path, "--resume")
        wait_for_parts(path, process, before + 1)
        process.send_signal(number)
        ended, said = finish(process)
        assert ended == code
        assert ("of 40 rows are finished and kept; the same command with --resume goes on" in said) == (code > 0)
        assert num_parts(path) > before
    assert finish(job(path, "--resume")) == (0, "")
    assert answers(read(path)) == undisturbed[0]


def test_what_all_processes_are_told_once_stays_told():
    said = iter([False, True, False, False])
    with StopSignals(lambda: next(said)) as stop:
        assert [stop(), stop(), stop()] == [False, True, True]
