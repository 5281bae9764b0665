"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from copies import SHARDED, TIED, Folder


@pytest.fixture
def tied(tmp_path: Path) -> Folder:
    """A single-file float32 model with a tied head."""
    return Folder(tmp_path / "tied", TIED)


@pytest.fixture
def sharded(tmp_path: Path) -> Folder:
    """A bfloat16 model in eight shards."""
    return Folder(tmp_path / "sharded", SHARDED)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of one's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECJAX_CACHE", str(folder))
    return folder
