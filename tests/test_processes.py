"""Several processes as one job, on loopback: the rows of one process, and what happens when one is missing or lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import answers, read

from specjax.distributed import Cluster, Processes, parse
from specjax.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "data" / "llama-gqa-tied"
COUNT = 30
# Small parts, and a rest after each: a signal sent after the first parts must find the job at work.
CODE = """
import sys, time
import specjax.distributed as d, specjax.jobs.parts as parts
d.HEARTBEAT_SECONDS, d.CHUNK, parts.ROWS = 10, 2, 2
flush = parts.Parts.flush
def slowly(self):
    rows = self.written
    flush(self)
    time.sleep(0.5 if self.written > rows else 0)
parts.Parts.flush = slowly
from specjax.cli.main import main
sys.exit(main())
"""


def test_the_option_is_read():
    assert parse("auto") == "auto"
    assert parse("off") == "off"
    assert parse("coordinator=10.0.0.1:1234,num=4,id=3") == Cluster("10.0.0.1:1234", 4, 3)


@pytest.mark.parametrize(
    "text", ["on", "", "coordinator=h:1,num=2", "coordinator=h,num=2,id=0", "coordinator=h:1,num=2,id=2", "id=x,num=2"]
)
def test_a_wrong_option_is_refused(text):
    with pytest.raises(UsageError, match="distributed"):
        parse(text)


def test_every_row_is_dealt_to_one_process_whatever_its_place():
    names = [(f'"row {i}"', sample) for i in range(200) for sample in range(2)]
    dealt = [[name for name in names if Processes(i, 3).deals(name)] for i in range(3)]
    assert sorted(name for part in dealt for name in part) == sorted(names)
    assert all(90 < len(part) < 180 for part in dealt)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "rows.jsonl"
    lines = [{"id": f"r{i}", "prompt_ids": [1 + 7 * i % 300, 5, 9], "temperature": i % 2, "max_new_tokens": 8 + i % 13}
             for i in range(COUNT)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def start(rows: Path, output: Path, *flags: str, devices: int = 2) -> subprocess.Popen:
    """Start one process of a job."""
    arguments = ["generate", "--input", rows, "--output", output, "--target", MODEL, "--draft", f"{MODEL}.draft-mid",
                 "--dtype", "float32", "--gamma", "3", "--batch-size", "6", *flags]  # fmt: skip
    environment = {**os.environ, "SPECJAX_CACHE": str(ROOT / ".cache"), "JAX_PLATFORMS": "cpu",
                   "JAX_NUM_CPU_DEVICES": str(devices)}  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", CODE, *map(str, arguments)], env=environment, text=True,
                            stderr=subprocess.PIPE)  # fmt: skip


def together(rows: Path, output: Path, *flags: str, num: int = 2, ids=(0, 1)) -> list[subprocess.Popen]:
    """Start the processes of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(rows, output, "--distributed", f"coordinator=127.0.0.1:{port},num={num},id={i}", *flags) for i in ids]


def ends(processes: list[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Wait for all; return exit codes and what they said."""
    end = time.monotonic() + seconds
    try:
        found = []
        for process in processes:
            _, said = process.communicate(timeout=max(end - time.monotonic(), 1))
            found.append((process.returncode, said))
        return found
    finally:
        for process in processes:
            process.kill()


def wait_for_parts(output: Path, count: int = 2) -> None:
    """Wait until some parts are written."""
    end = time.monotonic() + 120
    while len(list(output.glob("part-*.jsonl"))) < count:
        assert time.monotonic() < end, "no parts were written"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(rows, tmp_path_factory):
    """The answers of one process on one device."""
    output = tmp_path_factory.mktemp("alone") / "out"
    assert ends([start(rows, output)], 120)[0][0] == 0
    return answers(read(output))


@pytest.mark.slow
def test_two_processes_write_the_rows_of_one(rows, alone, tmp_path):
    """Rows over both, and layers over both: each writes its share; the manifest counts all."""
    for mesh in ("data=4", "data=2,model=2"):
        output = tmp_path / mesh
        assert [code for code, _ in ends(together(rows, output, "--mesh", mesh), 180)] == [0, 0]
        assert answers(read(output)) == alone
        shares = [[row["id"] for part in sorted(output.glob(f"part-{i:05d}-*")) for row in read(part)] for i in (0, 1)]
        assert all(len(share) > 5 for share in shares)
        assert set(shares[0]).isdisjoint(shares[1])
        manifest = json.loads((output / "manifest.json").read_text())
        assert manifest["status"] == "complete"
        assert manifest["rows"]["done"] == COUNT


@pytest.mark.slow
@pytest.mark.parametrize("present", [0, 1])
def test_a_missing_peer_is_named_within_the_timeout(rows, tmp_path, present):
    began = time.monotonic()
    [(code, said)] = ends(together(rows, tmp_path / "out", "--start-timeout", "8", ids=(present,)), 60)
    assert time.monotonic() - began < 40
    assert code == 75
    assert f"process {1 - present}" in said
    assert "did not start within 8 s" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "num"), [(1, 1), (0, 2)])
def test_a_lost_peer_ends_all_and_the_rerun_completes(rows, alone, tmp_path, lost, num):
    output = tmp_path / "out"
    processes = together(rows, output)
    wait_for_parts(output)
    processes[lost].kill()
    began = time.monotonic()
    code, _ = ends(processes, 90)[1 - lost]
    assert time.monotonic() - began < 60
    assert code != 0
    kept = {path.name: path.read_bytes() for path in output.glob("part-*.jsonl")}
    assert len(kept) >= 2
    rerun = together(rows, output, "--resume") if num == 2 else [start(rows, output, "--resume")]
    assert [code for code, _ in ends(rerun, 180)] == [0] * num
    assert answers(read(output)) == alone
    assert all((output / name).read_bytes() == content for name, content in kept.items())


@pytest.mark.slow
def test_a_notice_to_one_stops_all_after_the_chunk_and_the_rerun_completes(rows, alone, tmp_path):
    output = tmp_path / "out"
    processes = together(rows, output)
    wait_for_parts(output)
    processes[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in ends(processes, 60)] == [75, 75]
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["status"] == "stopped"
    assert 0 < manifest["rows"]["done"] == len(read(output)) < COUNT
    assert [code for code, _ in ends(together(rows, output, "--resume"), 180)] == [0, 0]
    assert answers(read(output)) == alone
