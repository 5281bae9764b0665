"""A tiny corpus, and a tiny target trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import recipes

from specjax.distill import distill


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Return a file of 120 texts."""
    return recipes.write_corpus(tmp_path_factory.mktemp("corpus") / "texts.jsonl")


@pytest.fixture(scope="session")
def target(tmp_path_factory, corpus) -> Path:
    """Return the run of a target that was trained for 60 steps."""
    run = tmp_path_factory.mktemp("runs") / "target"
    outcome = distill(recipes.target_recipe(corpus, run, train={"steps": 60}))
    assert outcome is not None
    assert outcome.folder == run / "model"
    return run
