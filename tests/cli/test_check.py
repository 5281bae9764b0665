"""``specjax check``: a table of findings, a verdict, an exit code."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny_heads
from tiny_text import DATA, with_tokenizer

from specjax.head_folder import Made, save_head
from specjax.text import load_tokenizer


@pytest.fixture
def check(specjax):
    """Return ``check(target, draft)``."""
    return lambda target, draft: specjax("check", "--target", target, "--draft", draft)


def row(done, what: str) -> str:
    """Return a line of the table."""
    return next(line for line in done.out.split("\n") if line.startswith(f"│ {what} "))


def copy(source: Path, folder: Path, **changes: object) -> Path:
    """Copy a model with another config."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_pair_that_fits(check, text_model):
    done = check(text_model, text_model)
    assert (done.code, done.err) == (0, "")
    assert done.out.rstrip().endswith("\nfits")
    assert "the same, id by id" in row(done, "tokenizer")
    assert "320" in row(done, "ids in use")
    assert "padded" in row(done, "ids in use")
    assert "3 layers, width 64" in row(done, "size")


def test_a_pair_that_does_not(check, text_model, tmp_path):
    other = with_tokenizer(DATA / "llama-gqa-tied.draft-near", tmp_path / "other", "sentencepiece")
    done = check(text_model, other)
    assert (done.code, done.err) == (2, "")
    assert "error" in row(done, "tokenizer")
    assert "a draft must share its target's tokenizer" in done.out
    assert "id 0: " in done.out
    assert done.out.rstrip().endswith("\ndoes not fit")


def test_warnings(check, model, tmp_path):
    done = check(model, copy(model, tmp_path / "short", max_position_embeddings=100))
    assert (done.code, done.err) == (0, "")
    assert "a row goes on without speculation past 100." in done.out
    assert done.out.rstrip().endswith("\nfits with warnings")


def test_an_orbax_folder_and_a_draft_without_a_model(specjax, check, model, tmp_path):
    specjax("convert", model, tmp_path / "orbax", "--to", "orbax", "--dtype", "bfloat16")
    done = check(model, tmp_path / "orbax")
    assert done.code == 0
    assert "bfloat16" in row(done, "weights")
    assert check(model, "ngram").out.rstrip().endswith("\nfits")


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_model_that_is_missing(specjax, model, side):
    sides = {"target": model, "draft": model, side: "./none"}
    done = specjax("check", "--target", sides["target"], "--draft", sides["draft"])
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "./none does not exist" in done.err


def test_both_a_target_and_a_pair(specjax, model):
    done = specjax("check", "--target", model, "--pair", "smollm2")
    assert (done.code, done.out) == (2, "")
    assert "both a target and a pair" in done.err


def test_a_head_is_compared_with_its_target(check, text_model, tmp_path):
    tokenizer = load_tokenizer(text_model)
    head = tiny_heads.head("mlp", listed=True, steps=0)
    ids = head.ids[head.ids < tokenizer.vocab_size]
    config = dataclasses.replace(head.config, vocab_size=tokenizer.vocab_size, num_ids=len(ids))
    for name, made in (("right", Made("text", tokenizer.fingerprint)), ("wrong", Made("other", "0" * 64))):
        save_head(tmp_path / name, config, head.params, target=made, card="", ids=ids)
    done = check(text_model, tmp_path / "right")
    assert done.out.rstrip().endswith("\nfits")
    assert done.code == 0
    assert "head, mlp" in row(done, "draft")
    assert "the same" in row(done, "tokenizer")
    done = check(text_model, tmp_path / "wrong")
    assert done.code == 2
    assert "was made for the tokenizer of other (000000000000)" in done.out
