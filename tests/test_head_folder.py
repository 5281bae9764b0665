"""A head's folder: written, read, compared with a target, and plugged into --draft."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tiny as t
import tiny_heads as h

import specjax
from specjax.errors import CheckpointError, UsageError
from specjax.head_folder import Made, compare, is_head, load_head, save_head
from specjax.models.heads import KINDS
from specjax.pair import DraftWarning, load, side_of

TARGET = t.DATA / t.TARGET


def written(folder, kind="mlp", *, made=None, steps=0, **options):
    head = h.head(kind, listed=True, steps=steps)
    made = Made("tiny") if made is None else made
    save_head(folder, head.config, head.params, target=made, card="# A head\n", ids=head.ids, **options)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(tmp_path, kind):
    folder = written(tmp_path / "head", kind, dtype="float32")
    assert is_head(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "head_ids.json", "model.safetensors"
    ]  # fmt: skip
    head, expected = load_head(folder), h.head(kind, listed=True, steps=0)
    assert head.config == expected.config
    assert head.ids.tolist() == h.IDS.tolist()
    for name, leaf in expected.params.items():
        np.testing.assert_array_equal(head.params[name], leaf)


def test_a_folder_drafts_with_no_further_code(tmp_path):
    folder = written(tmp_path / "head", steps=h.STEPS, dtype="float32")
    for draft in (folder, f"mixed:{folder}"):
        pair = load(TARGET, draft, dtype="float32")
        (out,) = specjax.generate(pair, [t.prompts()[1]], max_new_tokens=30, check=True)
        assert out.ids == t.greedy()[1][:30]
        assert out.stats["num_draft_tokens"] > 10
        assert out.stats["num_accepted_tokens"] > 0
        assert pair.draft.kind == ("model" if draft is folder else "mixed")


def test_matrices_are_stored_in_bfloat16_unless_said_otherwise(tmp_path):
    head = load_head(written(tmp_path / "head"))
    assert head.dtype == str(head.params["fc"].dtype) == "bfloat16"
    assert head.params["norm"].dtype == np.float32


def test_a_head_for_another_target_is_refused(tmp_path):
    folder = written(tmp_path / "head", made=Made("other", "0" * 64))
    target = load(TARGET, "none", dtype="float32").target
    head = load_head(folder)
    assert compare(side_of(target), head).verdict == "fits"
    wide = dataclasses.replace(head, config=dataclasses.replace(head.config, width=32, vocab_size=400))
    errors = compare(side_of(target), wide).errors
    assert len(errors) == 2
    assert "was made for 400 ids, target" in errors[0]
    assert "uses 320" in errors[0]
    assert "features of width 32" in errors[1]
    assert "has 64" in errors[1]
    late = load_head(written(tmp_path / "late", "early_exit"))
    late = dataclasses.replace(late, config=dataclasses.replace(late.config, layers=3))
    assert "exits after 3 layers" in compare(side_of(target), late).errors[0]


def test_an_early_exit_cannot_be_mixed(tmp_path):
    folder = written(tmp_path / "head", "early_exit")
    with pytest.raises(UsageError, match="cannot be mixed"):
        load(TARGET, f"mixed:{folder}", dtype="float32")


def change(folder, key, value):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config if key in config else config["sizes"])[key] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("specjax_head", 2, "specjax_head is 2; this version of specjax reads 1"),
        ("kind", "rnn", "kind is 'rnn'"),
        ("sizes", {}, "is not the config of a head"),
        ("mlp_width", "96", "mlp_width is '96'; expected int"),
        ("mlp_width", 80, "asks for"),
        ("num_ids", 100, "a list of 160 ids; its config.json says 100"),
        ("dtype", "int4", "dtype is 'int4'"),
    ],
)
def test_a_folder_that_is_not_what_it_says_cannot_be_loaded(tmp_path, key, value, words):
    folder = written(tmp_path / "head")
    change(folder, key, value)
    with pytest.raises(CheckpointError, match=words):
        load_head(folder)
    with pytest.warns(DraftWarning, match="cannot be loaded"):
        assert load(TARGET, folder, dtype="float32").draft.name == "none"


def test_wrong_parameters_are_not_written(tmp_path):
    head = h.head("mlp", listed=True, steps=0)
    made = {"target": Made("tiny"), "card": ""}
    with pytest.raises(ValueError, match="got 0 ids; expected 160"):
        save_head(tmp_path / "a", head.config, head.params, **made)
    with pytest.raises(ValueError, match="parameters are"):
        save_head(tmp_path / "a", head.config, {**head.params, "up": head.params["fc"]}, ids=head.ids, **made)
    assert not (tmp_path / "a").exists()
