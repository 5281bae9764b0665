"""``specjax distill``: from a recipe to a folder that ``--draft`` reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
teacher = "none"
data = "texts.jsonl"
[tokenizer]
vocab_size = 280
[student.config]
hidden_size = 16
num_hidden_layers = 1
intermediate_size = 32
num_attention_heads = 2
max_position_embeddings = 64
[train]
steps = {steps}
batch_rows = 2
length = 16
[validation]
every = 0
share = 0.2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the working folder, with data in it."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{word} {i} goes home."}) for i in range(20) for word in ("Ana", "Ben")]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_a_target_from_text_with_relative_paths(specjax, folder):
    """Case 90: a relative path on the command line works."""
    (folder / "r.toml").write_text(RECIPE.format(steps=2))
    done = specjax("distill", "--config", "r.toml", "--output", "runs/one")
    assert done.code == 0, done.err
    assert Path(done.out.strip()) == (folder / "runs" / "one" / "model").resolve()
    generated = specjax("generate", "Ana", "--target", "runs/one/model", "--max-new-tokens", "3", "--raw")
    assert generated.code == 0, generated.err
    again = specjax("distill", "--config", "r.toml", "--output", "runs/one")
    assert again.code == 2
    assert "is in use; pass --resume" in again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "absent.toml"), "cannot be read"),
        (("--config", "r.toml", "--data", "absent.jsonl"), "is not a file"),
        (("--config", "r.toml", "--teacher", "nowhere/model"), "leave out [tokenizer]"),
        ((), "--config"),
    ],
)
def test_wrong_calls_are_one_line(specjax, folder, arguments, message):
    (folder / "r.toml").write_text(RECIPE.format(steps=1))
    done = specjax("distill", *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.strip().count("\n") == 0


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_is_resumed(folder):
    (folder / "r.toml").write_text(RECIPE.format(steps=4000))
    command = [sys.executable, str(ROOT / "scripts" / "distill.py"), "--config", "r.toml", "--output", "run"]
    env = {**os.environ, "SPECJAX_CACHE": str(ROOT / ".cache")}
    process = subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "run" / "metrics.jsonl").is_file() or not (folder / "run" / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "--resume goes on" in said
    assert any(entry.name.isdecimal() for entry in (folder / "run" / "checkpoints").iterdir())
