"""Scoring given tokens: a teacher-forced pass over a real transformer."""

from __future__ import annotations

import numpy as np
import pytest
import tiny as t

from specjax.score import score, score_ids


@pytest.fixture(scope="module")
def model():
    return t.pair(t.tiny()).target


def test_scores_are_the_references_log_softmax(model):
    ids = t.prompts()[2]
    found = score_ids(model, ids)
    logits = t.reference()["logits_2"].astype(np.float64)
    logs = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert found[0] is None
    np.testing.assert_allclose(found[1:], logs[np.arange(39), ids[1:]], atol=3e-4)


def test_scores_are_generates_logprobs(model):
    """Case 53, up to the rounding of another width."""
    prompt = t.prompts()[2]
    (result,) = t.run(t.program(t.tiny().fn), t.tiny(), None, [prompt], 20)
    scored = score_ids(model, [*prompt, *result.ids.tolist()])
    np.testing.assert_allclose(scored[len(prompt) :], result.logprobs, atol=2e-4)


def test_a_long_row_runs_in_pieces(model):
    """301 ids: two pieces of 256, the same numbers as for its beginning alone."""
    ids = (t.prompts()[3] * 4)[:301]
    whole, part = score_ids(model, ids), score_ids(model, ids[:40])
    assert len(whole) == 301
    np.testing.assert_allclose(whole[1:40], part[1:], atol=2e-4)


def test_rows_come_back_in_order_with_their_faults(model):
    seen = []
    found = score(model, [[1, 2, 3], [], [5], [1, 320], [0] * 513, [-1, 2]], on_output=seen.append)
    assert found == seen
    assert [row["id"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[1]["logprobs"] == []
    assert found[2]["logprobs"] == [None]
    assert "error" not in found[1]
    assert "0..319" in found[3]["error"]
    assert "513 tokens" in found[4]["error"]
    assert "512" in found[4]["error"]
    assert "-1" in found[5]["error"]
    assert all(row["logprobs"] == [] for row in found[3:])


def test_logits_that_are_not_finite_fail_their_row():
    model = t.pair(t.with_nan(t.tiny(layers=1), 7)).target
    good, bad = score(model, [[1, 2, 3], [1, 7, 3]])
    assert "error" not in good
    assert "not finite" in bad["error"]
