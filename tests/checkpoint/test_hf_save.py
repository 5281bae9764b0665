"""Saving a folder in Hugging Face layout: exact, complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from specjax.checkpoint import load_folder, save_folder
from specjax.errors import CheckpointError, UsageError


def save(checkpoint, path: Path, **options) -> Path:
    return save_folder(path, checkpoint.hf_config, checkpoint.params, checkpoint.family, checkpoint.config, **options)


def test_round_trip_is_exact(tied, tmp_path) -> None:
    checkpoint = load_folder(tied.path)
    out = save(checkpoint, tmp_path / "out")
    before, tied.path = tied.tensors(), out
    after = tied.tensors()
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert after[name].dtype == values.dtype
        np.testing.assert_array_equal(after[name], values)
    assert load_folder(out).config == checkpoint.config
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tied"]


def test_round_trip_in_bfloat16(sharded, tmp_path) -> None:
    checkpoint = load_folder(sharded.path, dtype="bfloat16")
    out = save(checkpoint, tmp_path / "out", dtype="bfloat16")
    again = load_folder(out, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    sharded.path = out
    assert {values.dtype for values in sharded.tensors().values()} == {np.dtype(ml_dtypes.bfloat16)}
    jax.tree.map(np.testing.assert_array_equal, again.params, checkpoint.params)


def test_old_configs_keep_their_key(tied, tmp_path) -> None:
    tied.config(drop="dtype", torch_dtype="bfloat16")
    config = json.loads((save(load_folder(tied.path), tmp_path / "out") / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert "dtype" not in config


def test_tokenizer_files_are_copied_when_asked(tied, tmp_path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "notes.txt"):
        (tied.path / name).write_text('{"eos_token_id": 5}')
    checkpoint = load_folder(tied.path)
    plain = save(checkpoint, tmp_path / "plain")
    full = save(checkpoint, tmp_path / "full", tokenizer_from=tied.path)
    assert sorted(p.name for p in plain.iterdir()) == ["config.json", "model.safetensors"]
    extra = {p.name for p in full.iterdir()} - {p.name for p in plain.iterdir()}
    assert extra == {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert load_folder(full).eos_ids == (5,)


def test_an_existing_folder_is_refused(tied, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists already"):
        save(load_folder(tied.path), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_save_leaves_nothing(tied, tmp_path, monkeypatch, error) -> None:
    checkpoint = load_folder(tied.path)

    def fail(*_):
        raise error

    monkeypatch.setattr("specjax.checkpoint.tensors._write", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError):
        save(checkpoint, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["tied"]


def test_params_that_do_not_fit(tied, tmp_path) -> None:
    checkpoint = load_folder(tied.path)
    checkpoint.params["embedding"] = checkpoint.params["embedding"][:10]
    with pytest.raises(CheckpointError, match=r"embedding has shape \[10, 64\].*\[320, 64\]"):
        save(checkpoint, tmp_path / "out")
    del checkpoint.params["embedding"]
    with pytest.raises(CheckpointError, match="embedding is missing"):
        save(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_dtype(tied, tmp_path) -> None:
    with pytest.raises(UsageError, match="'int4'"):
        save(load_folder(tied.path), tmp_path / "out", dtype="int4")
