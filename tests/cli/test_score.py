"""``specjax score``: exact log-probabilities of given tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_text import read_rows

from specjax.pair import load_model
from specjax.types import ModelFn

IDS = [5, 17, 42, 5, 300, 8]


@pytest.fixture
def score(specjax, model, tmp_path):
    """Return ``score(rows, *arguments)``: how it ended, and the rows written."""

    def run(rows, *arguments):
        output = tmp_path / "out.jsonl"
        done = specjax(
            "score", "--target", model, "--input", rows, "--output", output, "--dtype", "float32", *arguments
        )
        return done, read_rows(output) if output.exists() else None

    return run


def by_hand(fn: ModelFn, params, ids: list[int]) -> list[float]:
    """Return log-probabilities from one pass over all ids, in float64."""
    logits = fn(params, np.asarray([ids]), fn.init_cache(1, len(ids)), logits="all").logits
    logits = np.asarray(logits, np.float64)[0, :-1]
    logits -= logits.max(axis=-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logs[np.arange(len(ids) - 1), ids[1:]].tolist()


def test_scores_are_those_of_a_softmax_by_hand(score, rows_file, model):
    done, out = score(rows_file({"id": "a", "ids": IDS}, {"ids": [7]}, {"ids": []}))
    assert (done.code, done.out, done.err) == (0, "", "")
    loaded = load_model(model, dtype="float32")
    assert out["a"]["logprobs"][0] is None
    np.testing.assert_allclose(out["a"]["logprobs"][1:], by_hand(loaded.fn, loaded.params, IDS), atol=2e-5)
    assert out[2] == {"id": 2, "logprobs": [None]}
    assert out[3] == {"id": 3, "logprobs": []}


def test_scores_agree_with_those_of_generate(specjax, score, rows_file, model):
    prompt = IDS[:3]
    options = ["--target", model, "--dtype", "float32", "--max-new-tokens", 12, "--logprobs"]
    (row,) = specjax("generate", "--input", rows_file({"prompt_ids": prompt}), *options).rows
    _, out = score(rows_file({"ids": prompt + row["ids"]}))
    np.testing.assert_allclose(out[1]["logprobs"][3:], row["logprobs"], atol=2e-5)


def test_rows_that_cannot_be_scored_fail_alone(score, rows_file):
    rows = rows_file({"id": "a", "ids": [320]}, "[]", {"id": "b", "ids": [1, 2]}, {"id": "c", "ids": [1] * 513})
    done, out = score(rows)
    assert done.code == 1
    assert done.err == "specjax: 3 of 4 rows failed; their records say why.\n"
    assert "320" in out["a"]["error"]
    assert out[None]["error"].startswith("line 2: ")
    assert "513 tokens" in out["c"]["error"]
    assert out["a"]["logprobs"] == []
    assert len(out["b"]["logprobs"]) == 2
    assert "error" not in out["b"]


def test_an_output_that_exists_is_refused(score, rows_file):
    rows = rows_file({"ids": [1, 2]})
    assert score(rows)[0].code == 0
    done, _ = score(rows)
    assert done.code == 2
    assert "exists: pass --overwrite" in done.err
    assert score(rows, "--overwrite")[0].code == 0
