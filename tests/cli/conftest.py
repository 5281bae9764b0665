"""The command line in this process, and tiny models to run it on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_text import DATA, with_tokenizer

from specjax.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as rows."""
        return [json.loads(line) for line in self.out.split("\n") if line]


@pytest.fixture
def specjax(capsys, monkeypatch) -> Callable[..., Done]:
    """Return ``specjax(*arguments)``: the command line, run here."""
    monkeypatch.setenv("SPECJAX_CACHE", str(ROOT / ".cache"))

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def model() -> Path:
    """Return a tiny model without a tokenizer; 320 ids, 512 positions."""
    return DATA / "llama-gqa-tied"


@pytest.fixture(scope="session")
def text_model(tmp_path_factory, model) -> Path:
    """Return the tiny model with a byte-level tokenizer and a chat template."""
    return with_tokenizer(model, tmp_path_factory.mktemp("models") / "text")


@pytest.fixture
def rows_file(tmp_path) -> Callable[..., Path]:
    """Return ``rows_file(*rows)``: a JSON Lines file of dicts, or of lines as they are."""

    def write(*rows: dict[str, Any] | str) -> Path:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
