"""``specjax convert``: a checkpoint in another form."""

from __future__ import annotations

import pytest


def test_there_and_back(specjax, text_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = specjax("convert", text_model, "orbax", "--to", "orbax")
    assert (done.code, done.out, done.err) == (0, "orbax\n", "")
    assert specjax("convert", "orbax", "back").code == 0
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (text_model / name).read_bytes()
    rows = [
        specjax("generate", "Hello", "--target", where, "--dtype", "float32", "--max-new-tokens", 8).out
        for where in (text_model, "orbax", "./back/")
    ]
    assert rows[0] == rows[1] == rows[2] != ""


def test_an_orbax_folder_scores_as_its_source(specjax, model, rows_file, tmp_path):
    specjax("convert", model, tmp_path / "orbax", "--to", "orbax", "--dtype", "bfloat16")
    rows = rows_file({"ids": [1, 2, 3]})
    outs = [
        specjax("score", "--target", where, "--input", rows, "--output", "-").rows
        for where in (model, tmp_path / "orbax")
    ]
    assert len(outs[0][0]["logprobs"]) == len(outs[1][0]["logprobs"]) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none/here/x", "out"], "none/here/x does not exist"),
        (["{model}", "{model}"], "exists already"),
        (["{model}", "out", "--to", "onnx"], "onnx"),
        (["{model}", "out", "--dtype", "int4"], "int4"),
        (["{model}"], "DEST"),
    ],
)
def test_wrong_calls(specjax, model, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = specjax("convert", *(argument.format(model=model) for argument in arguments))
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.startswith("specjax: error: ")
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
