"""A pair on fake devices: the ids of one device, whichever way rows, layers and vocabulary are split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_text import with_tokenizer

from specjax.checkpoint import load_folder, save_folder

HERE = Path(__file__).parent
ROOT = HERE.parent
LLAMA, GEMMA = "llama-8-heads", "gemma3-dual-rope"
MESHES = {8: ["data=8,model=1", "data=1,model=8", "data=4,model=2", "data=2,model=4"], 4: ["data=1,model=4"]}
ROWS, NEW = 8, 24
pytestmark = pytest.mark.slow


def run(count: int, script: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a script with fake devices and return its lines."""
    environment = {
        **os.environ, "JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """A noisy draft of each target, right at times and wrong at times: noise of a part of each matrix's spread."""
    found = load_folder(HERE / "data" / LLAMA)
    leaves, tree = jax.tree.flatten(found.params)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noisy = [
        leaf + 0.08 * leaf.std() * jax.random.normal(key, leaf.shape) if leaf.ndim > 1 else leaf
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(tree, noisy)
    folder = tmp_path_factory.mktemp("drafts") / "llama"
    save_folder(folder, found.hf_config, params, found.family, found.config)
    return {LLAMA: folder, GEMMA: HERE / "data" / f"{GEMMA}.draft-mid"}


@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
@pytest.mark.parametrize(("target", "count"), [(LLAMA, 8), (GEMMA, 4)])
def test_ids_are_those_of_one_device(target, count, rule, drafts):
    """float32, noisy drafts; the script ends with 1 where rows differ elsewhere than at a greedy near-tie.

    Gemma has one key-value head: each of 4 shards holds it.
    """
    meshes = MESHES[count]
    if rule == "rejection":
        meshes = [*meshes, f"{meshes[-1]},draft=sharded"]
    lines = run(count, "check_mesh.py", "--target", HERE / "data" / target, "--draft", drafts[target], "--rule", rule,
                "--new", NEW, "--mesh", *meshes)  # fmt: skip
    assert [line["mesh"] for line in lines] == meshes
    for line in lines:
        print(line)
        assert line["tokens"] == ROWS * NEW
        assert 0.05 < line["num_accepted_tokens"] / line["num_draft_tokens"] < 0.95


@pytest.mark.parametrize("draft", ["ngram", "early-exit:1"])
def test_other_drafts_and_a_vocabulary_that_is_smaller_than_the_embedding(draft, tmp_path):
    """With a tokenizer, its ids are in use: logits past them are -inf, so that the mesh splits evenly."""
    target = with_tokenizer(HERE / "data" / LLAMA, tmp_path / "text")
    [line] = run(8, "check_mesh.py", "--target", target, "--draft", draft, "--rule", "rejection", "--new", NEW,
                 "--mesh", "data=1,model=8")  # fmt: skip
    assert line["differences"] == []
    assert line["tokens"] == ROWS * NEW


@pytest.mark.parametrize("mesh", ["data=2,model=4,draft=sharded", "data=1,model=8"])
def test_no_collective_moves_a_vocabulary_or_a_cache(mesh):
    """Read from the compiled decode step, with every transform of sampling in it and log-probabilities kept."""
    vocab, batch, longest, capacity = 32768, 8, 1000, 1024
    found = run(8, "count_collectives.py", "--target", HERE / "data" / LLAMA / "config.json", "--layers", 1,
                "--vocab", vocab, "--mesh", mesh, "--batch", batch, "--gamma", 3, "--longest", longest)  # fmt: skip
    ways = 4 if "model=4" in mesh else 8
    rows = batch * ways // 8  # of one device
    assert {"all-reduce", "all-gather"} <= {line["kind"] for line in found}  # they are found at all
    assert [line for line in found if line["elements"] / rows >= vocab / ways] == []
    cached = rows * capacity  # elements of one head of width 1: far less than any cache
    assert [line for line in found if line["elements"] >= 8 * cached or line["shape"][-2:-1] == [capacity]] == []
