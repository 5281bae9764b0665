"""Shared set-up: a persistent compile cache, and shape checks on everything the core calls."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

CHECKED = ["specjax.cache", "specjax.round", "specjax.verify", "specjax.draft.ngram", "specjax.prefill"]
install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(autouse=True, scope="module")
def release_programs():
    """Drop compiled programs after each file: their pieces of mapped memory have a limit that one process can reach."""
    yield
    jax.clear_caches()
    gc.collect()
