"""A tiny model with text, and rows read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"


def with_tokenizer(source: Path, folder: Path, tokenizer: str = "byte_level") -> Path:
    """Copy a model and give it a tiny tokenizer; byte_level has a chat template."""
    shutil.copytree(source, folder)
    for file in (DATA / "tokenizers" / tokenizer).iterdir():
        shutil.copy(file, folder)
    return folder


def read_rows(path: Path) -> dict[Any, dict[str, Any]]:
    """Read rows that a command wrote, by their id; samples of one id by (id, sample)."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {(row["id"], row["sample"]) if "sample" in row else row["id"]: row for row in rows}
